"""A target's parameters in the form that `--weights` asks for, still in their files.

mxfp4   experts as the checkpoint packs them: bytes are moved, none is unpacked
int8    kernels of linear layers rounded to int8, one scale an output, as they are read
"""

from __future__ import annotations

import dataclasses
import functools
from typing import get_args

import numpy as np

from peagle_jax.config import WeightForm
from peagle_jax.convert import mxfp4
from peagle_jax.convert.expert_tensors import InterleavedExperts
from peagle_jax.convert.lazy_tensor import LazyTensor
from peagle_jax.convert.opening import Checkpoint
from peagle_jax.errors import InputError
from peagle_jax.models import kernel_forms


def in_form(opened: Checkpoint, weights: WeightForm) -> Checkpoint:
    """The checkpoint with each quantised kernel as the arrays of models/kernel_forms.py.

    Raises InputError for a form that is not known, and for mxfp4 where the experts are not packed
    in the file, or there are none.
    """
    if weights not in get_args(WeightForm):
        raise InputError(
            f"weights: found {weights!r}, expected one of {', '.join(get_args(WeightForm))}"
        )
    if weights == "full":
        return opened
    tensors: dict[str, LazyTensor] = {}
    for path, tensor in opened.tensors.items():
        form = kernel_forms.form_of(tuple(path.split(".")), weights)
        if form is None:
            tensors[path] = tensor
        else:
            parts = _packed(tensor) if form is kernel_forms.Mxfp4Kernel else _rounded(tensor)
            tensors |= {f"{path}.{name}": part for name, part in parts.items()}
    if len(tensors) == len(opened.tensors):
        raise opened.reader.fail(
            f"weights: found {weights!r} and no experts, which alone are packed; expected 'full' "
            "or 'int8'"
        )
    return dataclasses.replace(opened, tensors=tensors)


def _packed(tensor: LazyTensor) -> dict[str, LazyTensor]:
    reader = tensor.reader
    if (
        not isinstance(tensor, InterleavedExperts)
        or not isinstance(reader, mxfp4.Mxfp4Reader)
        or reader.storage(tensor.name) != mxfp4.STORAGE
    ):
        raise reader.fail(
            f"{tensor.name}: found {reader.storage(tensor.name)} and weights 'mxfp4', expected "
            "experts that the checkpoint has packed (*_blocks and *_scales)"
        )
    experts, out, inner = tensor.shape
    make = functools.partial(PackedExperts, reader.stored(), turn=tensor.turn, dtype=_UINT8)
    blocks, scales = mxfp4.packed_names(tensor.name)
    return {
        "packed": make(name=blocks, shape=(experts, inner // 2, out)),
        "scales": make(name=scales, shape=(experts, inner // mxfp4.BLOCK, out)),
    }


def _rounded(tensor: LazyTensor) -> dict[str, LazyTensor]:
    make = functools.partial(RoundedKernel, tensor.reader, tensor.name, whole=tensor)
    return {
        "values": make(shape=tensor.shape, dtype=np.dtype(np.int8), scales=False),
        "scales": make(shape=tensor.shape[:-1], dtype=np.dtype(np.float32), scales=True),
    }


_UINT8 = np.dtype(np.uint8)


@dataclasses.dataclass(frozen=True)
class PackedExperts(LazyTensor):
    """`[experts, bytes or scales along the input, out]` from `[experts, out, ..]`, of whose
    outputs every second one is taken, from `turn` on; None = all."""

    turn: int | None = None

    def rows(self, start: int, stop: int) -> np.ndarray:
        """Raises InputError on a scale that stands for NaN."""
        stored = self.reader.rows(self.name, start, stop)
        if self.turn is not None:
            stored = stored[:, self.turn :: 2]
        if stored.ndim == 3 and (stored == mxfp4.SCALE_NAN).any():
            raise self.reader.fail(f"{self.name}: found a scale of NaN, expected finite values")
        flat = stored.reshape(*stored.shape[:2], -1)
        return np.ascontiguousarray(flat.swapaxes(1, 2))


@dataclasses.dataclass(frozen=True)
class RoundedKernel(LazyTensor):
    """The int8 values of a kernel `[.., out, in]`, or their scales `[.., out]`."""

    whole: LazyTensor | None = None
    scales: bool = False

    def chunks(self) -> list[tuple[int, int]]:
        assert self.whole is not None
        return self.whole.chunks()

    def rows(self, start: int, stop: int) -> np.ndarray:
        assert self.whole is not None
        return kernel_forms.quantise_int8(self.whole.rows(start, stop))[self.scales]
