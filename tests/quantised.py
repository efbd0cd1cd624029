"""Parameters in the forms that stay quantised, made from full ones, and back, in NumPy."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from peagle_jax.config import WeightForm
from peagle_jax.convert.mxfp4 import dequantize
from peagle_jax.models import kernel_forms
from peagle_jax.models.kernel_forms import Int8Kernel, Mxfp4Kernel

MAGNITUDES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def packed(kernel: np.ndarray) -> dict[str, np.ndarray]:
    """The nearest MXFP4 elements of `[experts, out, in]`; the largest of a block is 4 to 6."""
    experts, out, inner = kernel.shape
    blocks = kernel.reshape(experts, out, inner // 32, 32).astype(np.float64)
    codes = np.floor(np.log2(abs(blocks).max(axis=-1) + 1e-30)) - 2 + 127
    scaled = blocks / 2.0 ** (codes[..., None] - 127)
    nearest = abs(abs(scaled)[..., None] - MAGNITUDES).argmin(axis=-1) + 8 * (scaled < 0)
    pairs = (nearest[..., ::2] | nearest[..., 1::2] << 4).astype(np.uint8)
    return {
        "packed": pairs.reshape(experts, out, inner // 2).swapaxes(1, 2).copy(),
        "scales": codes.astype(np.uint8).swapaxes(1, 2).copy(),
    }


def unpacked(parts: Any) -> np.ndarray:
    """`[experts, out, in]` as conversion dequantises it, bfloat16."""
    pairs, codes = (np.asarray(parts[name]).swapaxes(1, 2) for name in ("packed", "scales"))
    return dequantize(np.ascontiguousarray(pairs.reshape(*codes.shape, 16)), codes.copy())


def in_form(params: Any, weights: WeightForm) -> Any:
    """Full parameters with the kernels that `--weights` names quantised."""

    def leaf(path: Any, array: Any) -> Any:
        form = kernel_forms.form_of(tuple(key.key for key in path), weights)
        if form is Mxfp4Kernel:
            return packed(np.asarray(array))
        if form is Int8Kernel:
            values, scales = kernel_forms.quantise_int8(np.asarray(array))
            return {"values": values, "scales": scales}
        return array

    return jax.tree_util.tree_map_with_path(leaf, params)


def full(params: Any) -> Any:
    """The float32 parameters that quantised ones stand for."""
    if not isinstance(params, dict):
        return params
    if set(params) == {"packed", "scales"}:
        return unpacked(params).astype(np.float32)
    if set(params) == {"values", "scales"}:
        return np.float32(params["values"]) * np.asarray(params["scales"])[..., None]
    return {name: full(part) for name, part in params.items()}
