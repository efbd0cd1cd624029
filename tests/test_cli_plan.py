"""`peagle plan`: what it prints, and when it says no."""

from __future__ import annotations

import importlib.util
import json
import sys

import pytest

from peagle_jax import cli

OSS = ["plan", "--model", "openai/gpt-oss-20b", "--topology", "v6e:2x4"]
SMALL = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 128,
}


@pytest.fixture
def small(tmp_path) -> list[str]:
    """A model that fits anything, of which there is the configuration alone."""
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    return ["plan", "--model", str(tmp_path), "--topology", "v5e:2x2", "--batch", "8"]


def test_a_release_with_its_drafter(capsys) -> None:
    drafter = ["--drafter", "amazon/gpt-oss-20b-p-eagle", "--context", "8192", "--json"]
    assert cli.main([*OSS, *drafter]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["devices"], found["method"], found["num_draft_tokens"]) == (8, "p-eagle", 5)
    assert (found["acceptance_length"], found["acceptance_length_assumed"]) == (2.0, True)
    assert found["models"]["openai/gpt-oss-20b"]["packed_bytes"] == 13_761_264_768
    assert "rope_theta" in found["models"]["amazon/gpt-oss-20b-p-eagle"]["guesses"]
    assert found["fits"]
    assert found["compiled"] is None
    (chosen,) = [
        one for one in found["meshes"] if one["mesh"] == {"data": 1, "expert": 1, "model": 8}
    ]
    assert found["suggested"] == "model=8"
    assert chosen["fits"]
    step = chosen["step_floor"]
    moved = step["weight_bytes"] + step["cache_bytes"]
    assert step["memory_ms"] == pytest.approx(moved / 1640e9 * 1e3)
    assert chosen["tokens_per_second_floor"] == pytest.approx(64 * 2 / step["ms"] * 1e3)


def test_packed_experts_count_as_they_are_kept(capsys) -> None:
    experts = {}
    for weights in ("full", "mxfp4", "int8"):
        cli.main([*OSS, "--mesh", "data=8", "--weights", weights, "--json"])
        (mesh,) = json.loads(capsys.readouterr().out)["meshes"]
        experts[weights] = mesh["weights"]["experts"]
        flops = mesh["step_floor"]["flops"]
        assert flops == experts.setdefault("flops", flops), "products do not get fewer"
    each, biases = 24 * 32 * 3 * 2880 * 2880, 24 * 32 * 3 * 2880 * 2
    assert experts["full"] == 2 * each + biases
    assert experts["mxfp4"] == each * 17 // 32 + biases
    assert experts["int8"] == each + 24 * 32 * 3 * 2880 * 4 + biases


def test_a_model_of_ones_own_and_its_table(small, capsys) -> None:
    assert cli.main([*small, "--method", "prompt-lookup", "--acceptance-length", "1.5"]) == 0
    out = capsys.readouterr().out
    assert "acceptance length 1.5\n" in out
    assert "devices     4 of v5e: 15.75 GiB, 819 GB/s" in out
    assert "run         8 requests of 128 tokens, 2 pages of 128 each" in out
    assert "* data=4 " in out
    assert "suggested   --mesh data=4 --slots 8 --context 128 --page-size 128 --pages 4" in out
    assert "upper bounds from published rates, no predictions" in out
    assert cli.main([*small, "--mesh", "data=2,model=2"]) == 0
    out = capsys.readouterr().out
    assert "* data=2,model=2 " in out
    assert "acceptance length 1\n" in out
    assert "data=4" not in out


@pytest.mark.parametrize(("method", "curves"), [("prompt-lookup", 2), ("none", 1)])
def test_a_picture_by_batch(small, method, curves, capsys, tmp_path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "batches.png"
    options = ["--topology", "v6e:2x4", "--plot", str(picture), "--json", "--method", method]
    assert cli.main([*small, *options]) == 0
    found = json.loads(capsys.readouterr().out)["by_batch"]
    assert [curve["method"] for curve in found] == [method, "none"][:curves]
    for curve in found:
        fitting = [one["batch"] for one in curve["batches"] if one["fits"]]
        assert curve["largest_batch"] == fitting[-1]
        assert 8 in fitting
        assert not curve["batches"][-1]["fits"]
    content = picture.read_bytes()
    assert content.startswith(b"\x89PNG")
    assert len(content) > 20_000


def test_a_picture_where_nothing_fits(capsys, tmp_path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "batches.png"
    options = ["--topology", "v6e:1x1", "--batch", "4", "--plot", str(picture)]
    assert cli.main([*OSS, *options]) == 1
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_picture_without_matplotlib(small, capsys, monkeypatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == "matplotlib" else find(name)
    )
    assert cli.main([*small, "--plot", "batches.png"]) == 2
    assert "--plot: found no matplotlib, expected it from pip install" in capsys.readouterr().err


def test_what_does_not_fit_ends_with_1(capsys) -> None:
    assert cli.main([*OSS, "--topology", "v6e:1x1", "--batch", "4"]) == 1
    out = capsys.readouterr().out
    assert "does not fit: with --mesh data=1, the roomiest, all but pages take 39." in out
    assert "suggested" not in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--topology", "v6e:3x3"], "--topology: found 'v6e:3x3', expected a slice of v6e"),
        (["--mesh", "model=3"], "--mesh: found model=3, which takes 3 devices, expected 4"),
        (["--mesh", "data=1,model=4"], "mesh: model: found 4, expected a divisor of 2"),
        (["--batch", "0"], "--batch: found 0"),
        (["--context", "4096"], "--context: found 4096, expected 2 to 128"),
        (["--num-draft-tokens", "auto"], "--num-draft-tokens: found auto, expected a number"),
        (["--method", "p-eagle"], "method: found 'p-eagle', but no drafter is loaded"),
        (["--plot", "batches.svg"], "--plot: found 'batches.svg', expected a name that ends in"),
        (["--plot", "nowhere/batches.png"], "--plot: found no folder 'nowhere', expected one"),
        (["--acceptance-length", "9"], "--acceptance-length: found 9.0, expected 1 to 1"),
        (["--model", "nowhere/model/folder"], "nowhere/model/folder: found no such"),
        (["--weights", "mxfp4"], "whose experts are not packed, expected full or int8"),
        (
            ["--model", "Qwen/Qwen3-Coder-30B-A3B-Instruct", "--weights", "mxfp4"],
            "--weights: found mxfp4 and Qwen/Qwen3-Coder-30B-A3B-Instruct, whose experts",
        ),
    ],
)
def test_bad_options_are_one_line(small, capsys, options, message) -> None:
    assert cli.main([*small, *options]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("peagle: error: ")
    assert shown.err.count("\n") == 1
    assert message in shown.err


def test_without_the_compiler(small, capsys, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "libtpu", None)
    assert cli.main([*small, "--compile"]) == 2
    assert "--compile: found no libtpu package" in capsys.readouterr().err


def test_a_drafter_of_another_release_is_named(capsys) -> None:
    other = ["--model", "openai/gpt-oss-20b", "--drafter", "amazon/GPT-OSS-120B-P-EAGLE"]
    assert cli.main(["plan", *other, "--topology", "v6e:2x4"]) == 2
    shown = capsys.readouterr().err
    assert "-p-eagle: found a drafter for openai/gpt-oss-120b" in shown.lower()
    assert "config.json" not in shown
