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
    [("verify 8 rows", (2, 8)), ("draft K=8", (2, 8)), ("step K=8", (2,)), ("step tree K=8", (2,))],
)
def test_the_programs_of_check_tpu_step_can_be_traced(step_script, name, shape) -> None:
    function, arguments = step_script.PROGRAMS[name](2)
    out = jax.eval_shape(function, *arguments)
    tokens = {"verify": 1, "draft": 0}.get(name.split()[0])
    found = out.num_drafts if tokens is None else out[tokens]
    assert (found.shape, found.dtype) == (shape, "int32")
