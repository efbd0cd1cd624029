"""`peagle convert --check`, and how conversion takes a release that is not as its manifest says."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from peagle_jax import cli
from peagle_jax.convert import checking, differences, releases, synthetic
from peagle_jax.convert.checking import check
from peagle_jax.convert.conversion import convert
from peagle_jax.convert.inspection import inspect
from peagle_jax.convert.releases import Release, TensorSpec
from peagle_jax.errors import InputError
from tests.convert.tiny import BF16, DRAFTER_JSON, TARGET, drafter_tensors, write_checkpoint

DRAFTER = {
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "vocab_size": 40,
    "draft_vocab_size": 40,
    "ptd_token_id": 5,
}


def released(name: str) -> Release:
    found = releases.find(name)
    assert found is not None
    return found


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Release:
    """The 20b's drafter and its target, scaled down, in place of the shipped manifests."""
    target = released("openai/gpt-oss-20b").scaled(
        num_hidden_layers=8, hidden_size=16, vocab_size=40, intermediate_size=32
    )
    drafter = released("amazon/gpt-oss-20b-p-eagle").scaled(**DRAFTER)
    monkeypatch.setattr(releases, "shipped_releases", lambda: (drafter, target))
    return drafter


def change_tensor(folder: Path, name: str, value: np.ndarray | None) -> None:
    path = folder / "model.safetensors"
    tensors = {key: np.array(array) for key, array in load_file(path).items()}
    del tensors[name]
    save_file(tensors if value is None else {**tensors, name: value}, path)


def test_compare_groups_what_is_alike() -> None:
    release = released("openai/gpt-oss-20b")
    found = release.tensors()
    for layer in range(24):
        del found[f"model.layers.{layer}.self_attn.sinks"]
    found["model.norm.weight"] = TensorSpec((2881,), "BF16")
    found["lm_head.weight"] = TensorSpec((201088, 2880), "F32")
    found["model.layers.3.self_attn.q_norm.weight"] = TensorSpec((64,), "BF16")
    rows = differences.compare(release, found)
    assert {(d.name, d.expected, d.found, d.count) for d in rows} == {
        ("model.layers.*.self_attn.sinks", "BF16 [64]", "none", 24),
        ("model.norm.weight", "BF16 [2880]", "BF16 [2881]", 1),
        ("lm_head.weight", "BF16 [201088, 2880]", "F32 [201088, 2880]", 1),
        ("model.layers.*.self_attn.q_norm.weight", "none", "BF16 [64]", 1),
    }
    assert all(d.verified for d in rows)
    assert str(rows[0]).startswith("model.layers.*.self_attn.sinks (24 of them): found none, exp")
    lines = differences.table(rows)
    assert lines[0].split() == ["expected", "found"]
    assert lines[1].split() == [
        "model.layers.*.self_attn.sinks", "x", "24", "BF16", "[64]", "none"
    ]  # fmt: skip
    assert len({line.index("BF16") for line in lines[1:3]}) == 1  # in one column
    assert differences.compare(release, release.tensors()) == []


def test_names_alone_are_compared_where_shapes_are_not_known() -> None:
    release = released("openai/gpt-oss-20b")
    names = dict.fromkeys(release.tensors(), TensorSpec(None, ""))
    assert differences.compare(release, names) == []
    del names["model.norm.weight"]
    (row,) = differences.compare(release, names)
    assert (row.name, row.found) == ("model.norm.weight", "none")


def test_config_differences() -> None:
    release = released("amazon/gpt-oss-20b-p-eagle")
    config = {"hidden_size": 2048, "rope_theta": 1.0, "vocab_size": 201088, "other": 1}
    rows = differences.compare_config(release, config)
    assert [(d.name, d.verified) for d in rows] == [
        ("config.json: hidden_size", True),
        ("config.json: rope_theta", False),
    ]


def test_released_drafter_in_its_own_layout(small: Release, tmp_path: Path) -> None:
    folder = synthetic.write_release(tmp_path / "gpt-oss-20b-p-eagle", small)
    report = check(folder, target=TARGET)
    assert (report.passed, report.differences, report.problems) == (True, (), ())
    facts = dict(report.facts)
    assert facts["checked"] == f"the header of {folder / 'model.safetensors'}"
    assert facts["is"] == "a drafter in the layout vllm"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = convert(folder, tmp_path / "out", target=TARGET)
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["config"]["aux_layer_ids"] == [2, 4, 5]
    assert manifest["config"]["own_embedding"] is True


def test_guesses_give_way_to_the_header(small: Release, tmp_path: Path) -> None:
    """Unlike the manifest in its width and rope, which could not be verified: a warning."""
    other = small.scaled(intermediate_size=28, rope_theta=1234)
    folder = synthetic.write_release(tmp_path / "gpt-oss-20b-p-eagle", other)
    with pytest.warns(UserWarning, match="read as its own header says: config.json: inter") as seen:
        convert(folder, tmp_path / "out", target=TARGET)
    assert "found 28, expected 24" in str(seen[0].message)
    report = check(folder, target=TARGET)
    assert report.passed
    assert report.differences
    assert not any(d.verified for d in report.differences)
    seen_by_inspect = inspect(folder, target=TARGET)
    assert seen_by_inspect.release == "amazon/gpt-oss-20b-p-eagle"
    assert seen_by_inspect.differences == tuple(map(str, report.differences))
    assert "differences: peagle convert --check" in dict(seen_by_inspect.summary())["release"]


def test_what_is_verified_is_held_to(
    small: Release, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error where the repository was named, a warning for a folder that is called like it."""
    other = small.scaled(ptd_token_id=7)
    folder = synthetic.write_release(tmp_path / "gpt-oss-20b-p-eagle", other)
    with pytest.warns(UserWarning, match="ptd_token_id: found 7, expected 5"):
        convert(folder, tmp_path / "out", target=TARGET)
    monkeypatch.setattr("peagle_jax.convert.opening.locate", lambda *a, **k: folder)
    with pytest.raises(InputError, match=r"ptd_token_id: found 7, expected 5 \(the manifest of"):
        convert("amazon/gpt-oss-20b-p-eagle", tmp_path / "other", target=TARGET)
    assert not check(folder, target=TARGET).passed


def test_drafter_of_another_target(small: Release, tmp_path: Path) -> None:
    import dataclasses

    folder = synthetic.write_release(tmp_path / "gpt-oss-20b-p-eagle", small)
    deeper = dataclasses.replace(TARGET, block=dataclasses.replace(TARGET.block, num_layers=12))
    expected = r"found a drafter for openai/gpt-oss-20b \(num_hidden_layers 8\), expected one for"
    with pytest.raises(InputError, match=expected):
        convert(folder, tmp_path / "out", target=deeper)
    (problem,) = check(folder, target=deeper).problems
    assert "num_hidden_layers 12" in problem
    assert not (tmp_path / "out").exists()


def test_source_against_another_s_config(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", DRAFTER_JSON, drafter_tensors())
    wider = tmp_path / "config.json"
    wider.write_text(json.dumps({**DRAFTER_JSON, "intermediate_size": 25}))
    assert check(source, target=TARGET).passed
    (problem,) = check(wider, source, target=TARGET).problems
    assert "down_proj.weight: found shape [16, 24], expected [16, 25]" in problem


def test_index_without_shards(small: Release, tmp_path: Path) -> None:
    folder = synthetic.write_release(tmp_path / "gpt-oss-20b-p-eagle", small, shard_bytes=3000)
    assert len(list(folder.glob("*.safetensors"))) > 2
    for path in folder.glob("*.safetensors"):
        path.unlink()
    report = check(folder, target=TARGET)
    assert report.passed
    assert dict(report.facts)["checked"] == f"the names in {folder}/model.safetensors.index.json"
    index = folder / "model.safetensors.index.json"
    values = json.loads(index.read_text())
    del values["weight_map"]["fc.weight"]
    index.write_text(json.dumps(values))
    (difference,) = check(folder, target=TARGET).differences
    assert (difference.name, difference.found) == ("fc.weight", "none")


def test_config_alone(tmp_path: Path) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "vocab_size": 40,
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert dict(check(path).facts)["is"] == "a target of 3 layers"
    path.write_text(json.dumps({**config, "architectures": ["Unheard"]}))
    (problem,) = check(tmp_path).problems
    assert "found 'Unheard'" in problem


def test_config_of_a_release_alone(small: Release, tmp_path: Path) -> None:
    """Its own widths count, where the manifest's are guesses."""
    folder = tmp_path / "gpt-oss-20b-p-eagle"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**small.config, "intermediate_size": 28}))
    report = check(folder, target=TARGET)
    assert report.passed
    assert [d.name for d in report.differences] == ["config.json: intermediate_size"]


def test_nothing_to_check(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"found neither config\.json nor weights"):
        check(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="empty: found no weights, expected some to check"):
        check("openai/gpt-oss-20b", tmp_path / "empty")


class TestCommand:
    """Exit codes and what is printed."""

    def peagle(self, capsys: Any, *argv: object) -> tuple[int, str, str]:
        code = cli.main(["convert", *map(str, argv)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    def test_passes(self, capsys: Any, tmp_path: Path) -> None:
        config = {**DRAFTER_JSON, "eagle_aux_hidden_state_layer_ids": [1, 3, 5]}
        folder = write_checkpoint(tmp_path, config, drafter_tensors())
        code, out, err = self.peagle(capsys, "--check", folder)
        assert (code, err) == (0, "")
        assert "a drafter in the layout vllm" in out

    def test_table_of_differences(self, capsys: Any, small: Release, tmp_path: Path) -> None:
        folder = synthetic.write_release(tmp_path / "gpt-oss-20b-p-eagle", small)
        change_tensor(folder, "norm.weight", np.ones(17, BF16))
        change_tensor(folder, "d2t", None)
        code, out, err = self.peagle(capsys, "--check", folder)
        assert code == 2
        assert err.count("\n") == 1
        rows = [line.split() for line in out.splitlines()]
        assert ["norm.weight", "BF16", "[16]", "BF16", "[17]"] in rows
        assert ["d2t", "I64", "[40]", "none"] in rows

    @pytest.mark.parametrize(
        ("argv", "message"),
        [
            ((), "found no SRC and OUT, expected both"),
            (("src",), "found no SRC and OUT, expected both"),
            (("src", "out", "--check", "x"), "found OUT beside --check"),
        ],
    )
    def test_arguments(self, capsys: Any, argv: tuple[str, ...], message: str) -> None:
        code, out, err = self.peagle(capsys, *argv)
        assert (code, out) == (2, "")
        assert message in err


def test_a_description_has_zeros(small: Release) -> None:
    reader = checking.DescribedReader(Path("x/model.safetensors"), {}, small.tensors())
    assert reader.rows("fc.weight", 2, 5).shape == (3, 48)
    assert not reader.read("d2t").any()
