"""Scripts that only run where their tools are still fit the library: their programs are traced."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import jax
import pytest

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"


def load(name: str):
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[name]
    return module


@pytest.fixture
def step_script(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("JAX_PLATFORMS", "TPU_SKIP_MDS_QUERY", "ALLOW_MULTIPLE_LIBTPU_LOAD"):
        monkeypatch.setenv(name, "")  # taken back after the test
    return load("check_tpu_step")


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("verify 8 rows", (2, 8)),
        ("draft K=8", (2, 8)),
        ("eagle3 K=8", (2, 8)),
        ("step K=8", (2,)),
        ("step tree K=8", (2,)),
    ],
)
def test_the_programs_of_check_tpu_step_can_be_traced(step_script, name, shape) -> None:
    function, arguments = step_script.PROGRAMS[name](step_script.llama(8), 2)
    out = jax.eval_shape(function, *arguments)
    tokens = {"verify": 1, "draft": 0, "eagle3": 0}.get(name.split()[0])
    found = out.num_drafts if tokens is None else out[tokens]
    assert (found.shape, found.dtype) == (shape, "int32")


def test_floors_of_check_tpu_step_by_hand(step_script) -> None:
    pair = step_script.llama(8)
    a_layer = 4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 14336 + 2 * 4096
    cache = 2 * 8 * 128 * 4096
    target = 8 * (a_layer + cache) + 4096 * 128256 + 4096
    assert step_script.floor(pair, "verify 9 rows", 1) == step_script.Floor(2 * target)
    one, eight = (step_script.floor(pair, name, 1).read for name in ("draft K=8", "eagle3 K=8"))
    assert eight == 8 * one


def test_floors_of_experts_count_those_that_rows_reach(step_script) -> None:
    pair = step_script.gpt_oss()
    # Four bits an element, eight for each 32 of them, and sixteen of a bias.
    experts = 24 * 3 * 32 * 2880 * (2880 * 17 / 32 + 2)
    plain, verify = (step_script.floor(pair, f"verify {rows}", 1) for rows in ("1 row", "9 rows"))
    assert plain.experts == pytest.approx(experts / 8)
    assert plain.doubted == 0
    assert verify.experts == pytest.approx(experts * (1 - (7 / 8) ** 9))
    assert verify.experts + verify.doubted == pytest.approx(experts)
