"""The shipped manifests: what they add up to, what they call themselves, what they refuse."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from peagle_jax.config import ModelConfig
from peagle_jax.convert import releases, synthetic
from peagle_jax.convert.releases import Release, TensorSpec
from peagle_jax.errors import InputError
from tests.convert.tiny import TARGET

RELEASES = {release.repository: release for release in releases.shipped_releases()}
GPT_OSS_20B = RELEASES["openai/gpt-oss-20b"]
MIB = 1 << 20


def size_of(release: Release) -> int:
    return sum(map(synthetic.tensor_bytes, release.tensors().values()))


def test_every_release_is_there() -> None:
    assert set(RELEASES) == {
        "openai/gpt-oss-20b",
        "openai/gpt-oss-120b",
        "Qwen/Qwen3-Coder-30B-A3B-Instruct",
        "amazon/gpt-oss-20b-p-eagle",
        "amazon/GPT-OSS-120B-P-EAGLE",
        "amazon/Qwen3-Coder-30B-A3B-Instruct-P-EAGLE",
    }
    for release in RELEASES.values():
        assert release.path.stat().st_size < 5000  # tables, not lists


@pytest.mark.parametrize("name", [n for n, r in RELEASES.items() if r.kind == "target"])
def test_tables_add_up_to_what_was_published(name: str) -> None:
    release = RELEASES[name]
    assert len(release.tensors()) == release.num_tensors
    assert size_of(release) == release.num_bytes
    assert release.unverified == {}
    assert all(spec.verified for spec in release.tensors().values())


def test_gpt_oss_tensors() -> None:
    tensors = GPT_OSS_20B.tensors()
    experts = "model.layers.23.mlp.experts."
    assert tensors[f"{experts}gate_up_proj_blocks"] == TensorSpec((32, 5760, 90, 16), "U8")
    assert tensors[f"{experts}gate_up_proj_scales"] == TensorSpec((32, 5760, 90), "U8")
    assert tensors["model.layers.0.self_attn.q_proj.weight"].shape == (4096, 2880)
    assert tensors["model.layers.0.self_attn.sinks"].shape == (64,)
    assert sum(synthetic.tensor_bytes(t) for t in tensors.values() if t.dtype == "U8") == (
        10_152_345_600
    )


def test_qwen_tensors() -> None:
    tensors = RELEASES["Qwen/Qwen3-Coder-30B-A3B-Instruct"].tensors()
    last = "model.layers.47.mlp.experts.127.down_proj.weight"
    assert tensors[last] == TensorSpec((2048, 768), "BF16")
    assert "model.layers.48.mlp.gate.weight" not in tensors
    assert sum(math.prod(t.shape or ()) for t in tensors.values()) == 30_532_122_624


def test_drafters_say_what_is_a_guess() -> None:
    tensors = RELEASES["amazon/gpt-oss-20b-p-eagle"].tensors()
    assert tensors["mask_hidden"] == TensorSpec((1, 1, 8640), "BF16")
    assert tensors["fc.weight"] == TensorSpec((2880, 8640), "BF16")
    assert not tensors["midlayer.mlp.up_proj.weight"].verified  # its width is a guess
    assert "layers.0.mlp.up_proj.weight" not in tensors
    assert "layers.3.mlp.up_proj.weight" in tensors
    elements = sum(math.prod(t.shape or ()) for t in tensors.values() if t.dtype == "BF16")
    assert round(elements / 1e9, 1) == 1.8  # the model card
    other = RELEASES["amazon/GPT-OSS-120B-P-EAGLE"].tensors()
    assert not any(spec.verified for spec in other.values())


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("openai/gpt-oss-20b", "openai/gpt-oss-20b"),
        ("OpenAI/GPT-OSS-20B", "openai/gpt-oss-20b"),
        ("amazon/gpt-oss-120b-p-eagle", "amazon/GPT-OSS-120B-P-EAGLE"),
        ("amazon/gpt-oss-20b-p-eagle-long-context", "amazon/gpt-oss-20b-p-eagle"),
        ("someone/gpt-oss-20b-finetuned", None),
        ("gpt", None),
    ],
)
def test_found_by_repository(source: str, expected: str | None) -> None:
    found = releases.find(source)
    assert (found and found.repository) == expected


def test_found_by_folder(tmp_path: Path) -> None:
    named = tmp_path / "gpt-oss-120b"
    cached = tmp_path / "models--openai--gpt-oss-20b" / "snapshots" / "0123abc"
    for folder in (named, cached):
        folder.mkdir(parents=True)
        (folder / "model.safetensors").touch()
    expected = (RELEASES["openai/gpt-oss-120b"], GPT_OSS_20B)
    assert (releases.find(named, named), releases.find(cached, cached)) == expected
    assert releases.find("x", named / "model.safetensors") == expected[0]
    assert releases.find(tmp_path, tmp_path) is None
    assert GPT_OSS_20B.is_named("openai/GPT-oss-20b")
    assert not GPT_OSS_20B.is_named(cached)


def test_scaled() -> None:
    small = GPT_OSS_20B.scaled(num_hidden_layers=3, num_local_experts=2, hidden_size=64)
    tensors = small.tensors()
    assert len(tensors) == 3 + 3 * 19
    assert tensors["model.layers.2.mlp.experts.down_proj_blocks"].shape == (2, 64, 90, 16)
    assert list(small.config["layer_types"]) == ["sliding_attention", "full_attention"] * 1 + [
        "sliding_attention"
    ]
    assert GPT_OSS_20B.config["num_hidden_layers"] == 24
    with pytest.raises(InputError, match=r"hidden_size/32: found 40 / 32, expected a whole number"):
        GPT_OSS_20B.scaled(hidden_size=40).tensors()


def target(layers: int, hidden: int = 2880, vocab: int = 201088) -> ModelConfig:
    import dataclasses

    block = dataclasses.replace(TARGET.block, num_layers=layers, hidden_size=hidden)
    return dataclasses.replace(TARGET, block=block, vocab_size=vocab)


def test_drafter_for_another_target() -> None:
    drafter = RELEASES["amazon/GPT-OSS-120B-P-EAGLE"]
    drafter.check_target(target(36), "here")
    with pytest.raises(InputError) as info:
        drafter.check_target(target(24), "here")
    assert str(info.value) == (
        "here: found a drafter for openai/gpt-oss-120b (num_hidden_layers 36), "
        "expected one for a target with num_hidden_layers 24"
    )
    with pytest.raises(InputError, match="hidden_size 2048"):
        drafter.check_target(target(36, hidden=2048), "here")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format_version": 2}, r"format, format_version: found \('peagle_jax release', 2\)"),
        ({"tensors": None}, "found no .*expected a whole manifest"),
        ({"tensors": [["a", "b"]]}, "found no .*expected a whole manifest"),
    ],
)
def test_manifests_that_are_none(tmp_path: Path, change: dict[str, object], message: str) -> None:
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps({**json.loads(GPT_OSS_20B.path.read_text()), **change}))
    with pytest.raises(InputError, match=message):
        releases.load(path)


def test_size_that_the_config_does_not_have() -> None:
    release = GPT_OSS_20B.scaled(head_dim=None)
    with pytest.raises(InputError, match="head_dim: found None, expected a whole number"):
        release.tensors()
