"""`--weights`: what is read of a checkpoint, and what is refused before anything is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from peagle_jax.convert.checkpoint import load_target
from peagle_jax.convert.layouts import flatten
from peagle_jax.errors import InputError
from peagle_jax.models import decoder, kernel_forms
from tests.convert import test_expert_tensors as checkpoints
from tests.convert.tiny import write_checkpoint
from tests.kernels.contract import unchecked
from tests.quantised import full

GPT_OSS = {
    **checkpoints.GPT_OSS,
    "hidden_size": 32,
    "intermediate_size": 64,
    "quantization_config": {"quant_method": "mxfp4"},
}


def gpt_oss(folder: Path, changes: dict[str, np.ndarray] | None = None) -> Path:
    """A checkpoint of random experts, packed as the released ones are."""
    rng = np.random.default_rng(0)
    tensors = checkpoints.stored(checkpoints.GPT_OSS)
    made: dict[str, np.ndarray] = {}
    for name, array in tensors.items():
        sizes = {"gate_up_proj": (128, 1), "down_proj": (32, 2)}
        found = next((sizes[end] for end in sizes if name.endswith(end)), None)
        if found is None:
            made[name] = _widened(name, array, rng)
            continue
        out, blocks = found
        shape = (checkpoints.EXPERTS, out, blocks)
        made[f"{name}_blocks"] = rng.integers(0, 256, (*shape, 16)).astype(np.uint8)
        made[f"{name}_scales"] = rng.integers(118, 124, shape).astype(np.uint8)
    return write_checkpoint(folder, GPT_OSS, made | (changes or {}))


def _widened(name: str, array: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Random values in the array's shape, but with a hidden size of 32 and experts of 64."""
    shape = list(array.shape)
    if name.endswith("gate_up_proj_bias"):
        shape[-1] = 128
    elif name.endswith("o_proj.weight"):
        shape[0] = 32
    elif shape[-1] == checkpoints.HIDDEN and "q_proj.bias" not in name:
        shape[-1] = 32
    return rng.normal(size=shape).astype(np.float32)


STEM = "model.layers.1.mlp.experts."


def test_packed_experts_stay_packed(tmp_path: Path) -> None:
    folder = gpt_oss(tmp_path)
    config, params = load_target(folder, "float32", weights="mxfp4")
    _, dequantised = load_target(folder, "float32")
    kernel = params["layers_1"]["mlp"]["experts"]["gate_proj"]["kernel"]
    assert {name: (a.shape, str(a.dtype)) for name, a in kernel.items()} == {
        "packed": ((3, 16, 64), "uint8"),
        "scales": ((3, 1, 64), "uint8"),
    }
    found, expected = flatten(full(params)), flatten(dequantised)
    assert set(found) == set(expected)
    for path, array in expected.items():
        assert np.array_equal(found[path], array), path
    described = flatten(kernel_forms.abstract(decoder.abstract_params(config), "mxfp4"))
    assert {p: (a.shape, a.dtype) for p, a in flatten(params).items()} == {
        p: (a.shape, a.dtype) for p, a in described.items()
    }


@pytest.mark.parametrize("form", checkpoints.CONFIGS)
def test_int8_of_any_family(tmp_path: Path, form: str) -> None:
    config = checkpoints.CONFIGS[form]
    folder = write_checkpoint(tmp_path, config, checkpoints.stored(config))
    _, params = load_target(folder, weights="int8")
    _, plain = load_target(folder)
    found, expected = flatten(full(params)), flatten(plain)
    assert set(found) == set(expected)
    for path, array in expected.items():
        if not path.endswith("kernel") or "router" in path:
            assert np.array_equal(found[path], array), path
            continue
        assert str(flatten(params)[f"{path}.values"].dtype) == "int8"
        step = abs(np.asarray(array)).max(axis=-1, keepdims=True) / 127
        assert (abs(found[path] - array) <= 0.501 * step).all(), path
        assert not np.array_equal(found[path], array), path


WRONG: dict[str, tuple[dict[str, Any], str, str]] = {
    "unpacked": (checkpoints.GPT_OSS, "mxfp4", r"down_proj: found F32 and weights 'mxfp4'"),
    "separate": (checkpoints.QWEN3_MOE, "mxfp4", "expected experts that the checkpoint has packed"),
    "no such form": (checkpoints.GPT_OSS, "int4", "weights: found 'int4', expected one of full"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_refused(tmp_path: Path, case: str) -> None:
    config, weights, message = WRONG[case]
    folder = write_checkpoint(tmp_path, config, checkpoints.stored(config))
    with unchecked(), pytest.raises(InputError, match=message):
        load_target(folder, weights=weights)  # type: ignore[arg-type]


def test_a_dense_target_has_no_experts(tmp_path: Path) -> None:
    dense = {**checkpoints.SIZES, "architectures": ["LlamaForCausalLM"]}
    tensors = checkpoints.stored(checkpoints.QWEN3_MOE)
    kept = {
        name.replace("layers.0", f"layers.{i}"): array
        for i in range(2)
        for name, array in tensors.items()
        if "layers.1" not in name and "_norm" not in name
    }
    dense["intermediate_size"] = 24
    folder = write_checkpoint(tmp_path, dense, kept)
    with pytest.raises(InputError, match="weights: found 'mxfp4' and no experts"):
        load_target(folder, weights="mxfp4")


def test_a_scale_of_nan_is_refused(tmp_path: Path) -> None:
    scales = np.full((checkpoints.EXPERTS, 32, 2), 120, np.uint8)
    scales[1, 3, 1] = 255
    folder = gpt_oss(tmp_path, {f"{STEM}down_proj_scales": scales})
    with pytest.raises(InputError, match=r"down_proj_scales: found a scale of NaN"):
        load_target(folder, weights="mxfp4")
