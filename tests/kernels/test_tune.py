"""The table of tuned sizes, and what tuning writes into it."""

from __future__ import annotations

import json
from typing import Any

import jax.numpy as jnp
import pytest

from pallas_kernels import tune, tuned
from pallas_kernels.cod_attention.shapes import GpuBlocks as TrainingBlocks
from pallas_kernels.cod_attention.shapes import Problem as TrainingProblem
from pallas_kernels.cod_attention.shapes import TpuBlocks as TrainingTpuBlocks
from pallas_kernels.cod_attention.shapes import blocks as training_blocks
from pallas_kernels.mxfp4_matmul import Blocks as PackedBlocks
from pallas_kernels.target import Target, compile_for
from pallas_kernels.verify_attention import GpuBlocks, shapes

PROBLEM = shapes.Problem(8, 8, 32, 8, 128, 8192, 8192, "bfloat16", "bfloat16")


OTHERS = (
    ("verify_sample", "sample"),
    ("verify_sample", "reject"),
    ("mxfp4_matmul", "few/bfloat16"),
    ("mxfp4_matmul", "many/bfloat16"),
    *[("cod_attention", f"d{d}/{t}") for d in (64, 128) for t in ("float32", "bfloat16")],
)


def test_an_entry_replaces_the_fields_that_it_holds(monkeypatch):
    entry = {"verify_attention/verify/d128/bfloat16": {"slots": 128, "warps": 8}}
    monkeypatch.setattr(tuned, "table", lambda: {"NVIDIA H200": entry})
    plain = shapes.blocks(PROBLEM, Target("gpu", "NVIDIA H100"))
    assert plain == GpuBlocks(rows=32, slots=64, splits=4)
    found = shapes.blocks(PROBLEM, Target("gpu", "NVIDIA H200"))
    assert found == GpuBlocks(rows=32, slots=128, splits=4, warps=8)


def test_training_attention_takes_its_entry(monkeypatch):
    entry = {"cod_attention/d64/bfloat16": {"columns": 2048, "scores": 1 << 18}}
    monkeypatch.setattr(tuned, "table", lambda: {"TPU v5": entry})
    problem = TrainingProblem(8, 64, "bfloat16")
    assert training_blocks(problem, Target("tpu", "TPU7x")) == TrainingTpuBlocks(128, 512)
    assert training_blocks(problem, Target("tpu", "TPU v5")) == TrainingTpuBlocks(256, 128)


@pytest.mark.parametrize(("rows", "phase"), [(1, "decode"), (9, "verify"), (64, "prefill")])
def test_each_phase_has_its_entry(rows, phase):
    problem = shapes.Problem(8, rows, 32, 8, 64, 8192, 8192, "bfloat16", "bfloat16")
    assert problem.key == f"verify_attention/{phase}/d64/bfloat16"


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("page", [16, 128, 8192, 2064])
@pytest.mark.parametrize("rows", [1, 8, 64])
def test_tpu_blocks_tile_the_cache_and_fit(dim, page, rows):
    problem = shapes.Problem(1, rows, 32, 8, dim, page, 8256, "bfloat16", "bfloat16")
    if shapes.tpu_limit(problem) is not None:
        return
    found = shapes.blocks(problem, Target("tpu", "TPU v5"))
    assert isinstance(found, shapes.TpuBlocks)
    assert found.cores == 2
    assert found.heads <= 4, "batch 1: each core has half of the heads"
    assert 8 % found.heads == 0
    assert found.slots % found.chunk == 0
    assert page % found.chunk == 0
    assert found.chunk % (128 if dim == 64 else 16) == 0
    assert 4 * found.heads * found.slots * dim * 2 <= 8 * 2**20


def test_tuning_writes_the_fastest(monkeypatch, tmp_path):
    monkeypatch.setattr(tune, "ROWS", {"verify": 8})
    monkeypatch.setattr(tune, "CONTEXT", 64)
    monkeypatch.setattr(tune, "VOCAB", 256)
    monkeypatch.setattr(tune, "EXPERT_WIDTH", 64)
    monkeypatch.setattr(tune, "TEXTS", (64,))

    def time_of(call: Any, blocks: Any) -> int:
        if isinstance(blocks, PackedBlocks):
            tokens = blocks.outputs
        elif isinstance(blocks, TrainingBlocks):
            tokens = blocks.rows + blocks.keys - 64
        else:
            tokens = blocks.slots if isinstance(blocks, GpuBlocks) else blocks.chunk / 32
        return abs(tokens - 64) + abs(blocks.warps - 8)

    monkeypatch.setattr(tune, "time_of", time_of)
    monkeypatch.setattr(tuned, "table", lambda: {"other": {"kept": {"slots": 1}}})
    output = tmp_path / "tuned.json"
    with compile_for(Target("gpu", "a GPU", interpret=True)):
        assert tune.main(["--output", str(output)]) == 0
    written = json.loads(output.read_text())
    assert written["other"] == {"kept": {"slots": 1}}
    assert set(written["a GPU"]) == {
        f"verify_attention/verify/d{dim}/{jnp.dtype(dtype).name}"
        for dim in (64, 128)
        for dtype in (jnp.float32, jnp.bfloat16)
    } | {f"{kernel}/{size}" for kernel, size in OTHERS}
    entry = written["a GPU"]["verify_attention/verify/d128/bfloat16"]
    assert (entry["slots"], entry["warps"]) == (64, 8)
    entry = written["a GPU"]["cod_attention/d64/bfloat16"]
    assert (entry["rows"] + entry["keys"], entry["warps"]) == (128, 8)
    assert written["a GPU"]["verify_sample/reject"] == {"chunk": 2048, "warps": 8}


def test_there_is_nothing_to_tune_on_a_cpu(capsys):
    with compile_for(Target("cpu")):
        assert tune.main([]) == 2
    assert "gpu and tpu only" in capsys.readouterr().err
