"""Checkpoints of random values: whole, repeatable, of the size asked for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from peagle_jax.convert import releases, synthetic
from peagle_jax.convert.opening import open_source
from peagle_jax.convert.readers import open_reader
from peagle_jax.convert.releases import Release
from tests.convert.tiny import BF16

ROOT = Path(__file__).resolve().parents[2]
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 32,
    "vocab_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


def small(name: str, **values: int) -> Release:
    found = releases.find(name)
    assert found is not None
    return found.scaled(**{**SMALL, "num_hidden_layers": 2, **values})


def test_files_hold_what_the_release_says(tmp_path: Path) -> None:
    release = small("openai/gpt-oss-20b", num_local_experts=3)
    synthetic.write_release(tmp_path, release, shard_bytes=30_000)
    reader = open_reader(tmp_path)
    expected = release.tensors()
    assert sorted(reader.names()) == sorted(expected)
    for name, spec in expected.items():
        assert (reader.shape(name), reader.storage(name)) == (spec.shape, spec.dtype)
    assert len(reader.files) > 2
    assert all(path.stat().st_size < 60_000 for path in reader.files)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(map(synthetic.tensor_bytes, expected.values()))
    assert json.loads((tmp_path / "config.json").read_text()) == release.config


def test_values_are_usable_and_repeat_with_their_seed(tmp_path: Path) -> None:
    release = small("openai/gpt-oss-20b", num_local_experts=3)
    folders = [tmp_path / str(number) for number in range(3)]
    for folder, seed in zip(folders, (0, 0, 1), strict=True):
        synthetic.write_release(folder, release, seed)
    contents = [(folder / "model.safetensors").read_bytes() for folder in folders]
    assert contents[0] == contents[1] != contents[2]
    reader = open_source(folders[0])
    experts = reader.read("model.layers.0.mlp.experts.gate_up_proj").astype(np.float32)
    assert experts.shape == (3, 64, 64)
    assert 0.001 < experts.std() < 0.1
    tensors = load_file(folders[0] / "model.safetensors")
    norm = tensors["model.norm.weight"].astype(np.float32)
    assert abs(norm.mean() - 1) < 0.05
    assert tensors["model.layers.0.self_attn.q_proj.weight"].dtype == BF16
    q, k = (tensors[f"model.layers.0.self_attn.{n}_proj.weight"].ravel()[:99] for n in "qk")
    assert not np.array_equal(q, k)


def test_large_tensors_repeat_their_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release = small("amazon/gpt-oss-20b-p-eagle")
    whole = synthetic.write_release(tmp_path / "whole", release)
    monkeypatch.setattr(synthetic, "_CHUNK", synthetic._POOL // 16)
    parts = synthetic.write_release(tmp_path / "parts", release)
    for name, value in load_file(whole / "model.safetensors").items():
        other = load_file(parts / "model.safetensors")[name]
        assert value.shape == other.shape
        assert value.ravel()[:9].tolist() == other.ravel()[:9].tolist()


def test_more_layers_than_the_release_has() -> None:
    from scripts.make_large_checkpoint import with_layers

    release = releases.find("openai/gpt-oss-20b")
    assert release is not None
    grown = with_layers(release, 31).config
    kinds = ["sliding_attention", "full_attention"]
    assert (grown["num_hidden_layers"], grown["layer_types"]) == (31, (kinds * 16)[:31])


@pytest.mark.parametrize("style", ["gpt-oss", "qwen3-moe"])
def test_script(tmp_path: Path, style: str) -> None:
    experts = "num_local_experts" if style == "gpt-oss" else "num_experts"
    settings = {**SMALL, experts: 4, "moe_intermediate_size": 32}
    out = tmp_path / "out"
    command = [sys.executable, str(ROOT / "scripts" / "make_large_checkpoint.py"), str(out)]
    command += ["--style", style, "--bytes", "1MiB", "--shard-bytes", "200KiB"]
    command += [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    reader = open_source(out)
    size = sum(reader.nbytes(name) for name in reader.names())
    assert abs(size - (1 << 20)) < 100_000
    assert len(reader.files) > 4
    layers = json.loads((out / "config.json").read_text())["num_hidden_layers"]
    assert f"{style}, {layers} layers, {size:,} bytes of tensors" in done.stdout
    again = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert again.returncode != 0
    assert again.stderr.startswith("make_large_checkpoint: error: ")
