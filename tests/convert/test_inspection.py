"""What `inspect` reports, and that it finds the problems that loading would."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from peagle_jax.convert import shipped
from peagle_jax.convert.conversion import convert
from peagle_jax.convert.inspection import inspect
from peagle_jax.convert.lazy_tensor import LazyTensor
from peagle_jax.errors import InputError
from tests.convert.tiny import BF16, DRAFTER_JSON, TARGET, drafter_tensors, write_checkpoint


def test_shipped_drafter() -> None:
    found = inspect("smollm2", kind="drafter")
    assert (found.kind, found.method, found.layout) == ("drafter", "p-eagle", "vllm")
    assert found.format == "safetensors"
    assert found.dtypes == {"BF16": 23, "I64": 1, "BOOL": 1}
    assert found.num_parameters == 14_677_056
    assert found.problems == ()
    assert found.config is not None
    assert found.config["aux_layer_ids"] == (2, 15, 27)


def test_no_weights_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: LazyTensor, start: int, stop: int) -> np.ndarray:
        raise AssertionError("weights were read")

    monkeypatch.setattr(LazyTensor, "rows", refuse)
    folder = write_checkpoint(tmp_path, DRAFTER_JSON, drafter_tensors())
    assert inspect(folder, target=TARGET).problems == ()


def test_sizes_and_tensors(tmp_path: Path) -> None:
    tensors = {"fc.weight": np.zeros((3, 4), BF16), "d2t": np.zeros(5, np.int64)}
    found = inspect(write_checkpoint(tmp_path, DRAFTER_JSON, tensors))
    assert (found.num_parameters, found.nbytes) == (12, 24 + 40)
    shapes = {tensor.name: (tensor.shape, tensor.dtype, tensor.nbytes) for tensor in found.tensors}
    assert shapes == {"fc.weight": ((3, 4), "BF16", 24), "d2t": ((5,), "I64", 40)}


def test_problems_are_reported_not_raised(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "a", DRAFTER_JSON, drafter_tensors(parallel=False))
    (problem,) = inspect(folder, target=TARGET).problems
    assert "mask_hidden: found no such tensor" in problem
    tensors = drafter_tensors()
    del tensors["norm.weight"]
    found = inspect(write_checkpoint(tmp_path / "b", DRAFTER_JSON, tensors), target=TARGET)
    assert "norm.weight: found no such tensor" in found.problems[0]
    assert found.config is not None  # that much was understood
    assert ("problem", found.problems[0]) in found.summary()


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="found no weights"):
        inspect(tmp_path)


def test_json_and_summary(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "drafter", DRAFTER_JSON, drafter_tensors())
    out = convert(folder, tmp_path / "orbax", target=TARGET)
    found = inspect(out, target=TARGET)
    values = json.loads(json.dumps(found.to_json()))
    assert (values["format"], values["layout"], values["problems"]) == ("orbax", "orbax", [])
    assert values["config"]["mask_token_id"] == 5
    rows = dict(found.summary())
    assert rows["kind"] == "drafter (p-eagle)"
    assert rows["aux_layer_ids"] == "2, 4, 5"
    assert rows["block.rope.kind"] == "default"


def test_shipped_path_of_an_unknown_name() -> None:
    with pytest.raises(InputError, match="nothing-like-it: found no such shipped checkpoint"):
        shipped.path("nothing-like-it")
