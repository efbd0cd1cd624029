"""What the rest of the package calls: load, convert and inspect checkpoints."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from peagle_jax.config import DrafterConfig, ModelConfig, WeightForm
from peagle_jax.convert import layouts
from peagle_jax.convert.conversion import convert
from peagle_jax.convert.inspection import Inspection, inspect
from peagle_jax.convert.lazy_tensor import LazyTensor
from peagle_jax.convert.opening import Checkpoint, open_checkpoint
from peagle_jax.convert.weight_forms import in_form
from peagle_jax.sharding import by_rows

__all__ = ["Inspection", "convert", "inspect", "load_drafter", "load_target"]

Params = dict[str, Any]
# One sharding for all, a tree of them like the parameters, or a function from the
# configuration and the abstract parameters to either.
Shardings = jax.sharding.Sharding | Mapping[str, Any] | Callable[[Any, Any], Any]


_MAX_THREADS = 8  # a host copy of a tensor each, until it is on the device


def load_target(
    source: str | os.PathLike[str],
    dtype: Any = None,
    sharding: Shardings | None = None,
    weights: WeightForm = "full",
) -> tuple[ModelConfig, Params]:
    """A target's configuration and parameters.

    Args:
        source: a Hugging Face folder, a .gguf or .safetensors file, an Orbax folder made by
            `convert`, "smollm2" or a hub repository.
        dtype: of the parameters; None = the checkpoint's own (float32 if quantised).
        sharding: where they go; None = the default device. Each device is sent its shard
            alone.
        weights: what is kept quantised: "mxfp4", a checkpoint's packed experts as they are;
            "int8", the kernels of linear layers, rounded. Such a kernel is a dict of arrays,
            see models/kernel_forms.py.

    Raises InputError on anything that is not a whole checkpoint of a known target, and on
    "mxfp4" for one without packed experts.
    """
    opened = in_form(open_checkpoint(source, kind="target", dtype=dtype), weights)
    assert isinstance(opened.config, ModelConfig)
    return opened.config, to_device(opened, sharding)


def load_drafter(
    source: str | os.PathLike[str],
    target_config: ModelConfig | None = None,
    dtype: Any = None,
    sharding: Shardings | None = None,
    aux_layer_shift: int = 0,
) -> tuple[DrafterConfig, Params]:
    """A drafter's configuration and parameters, from any of the four layouts or Orbax.

    Args:
        source: as for `load_target`; "smollm2" is the drafter that ships with the package.
        target_config: checked against: vocabulary, width and layer ids must fit. Needed
            where the drafter's config leaves its aux layer ids out.
        dtype, sharding: as for `load_target` (`draft_to_target` stays int32).
        aux_layer_shift: 1 reads the config's aux layer ids in SGLang's sense.

    Raises InputError as `load_target` does, and on a drafter for another target.
    """
    opened = open_checkpoint(
        source,
        kind="drafter",
        target_config=target_config,
        dtype=dtype,
        aux_layer_shift=aux_layer_shift,
    )
    assert isinstance(opened.config, DrafterConfig)
    return opened.config, to_device(opened, sharding)


def to_device(opened: Checkpoint, sharding: Shardings | None = None) -> Params:
    """Reads an opened checkpoint's parameters into JAX arrays, a few tensors at a time."""
    placed = resolve_shardings(sharding, opened) if sharding is not None else {}

    def load(path: str, tensor: LazyTensor) -> jax.Array:
        if path not in placed:
            array = jax.device_put(tensor.part())
        else:
            array = jax.make_array_from_callback(tensor.shape, placed[path], _read_once(tensor))
        return _by_rows(array) if path.endswith(layouts.BY_ROWS) else array

    # Dequantising and first-touch page faults are the cost: both go on beside each other.
    with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as pool:
        arrays = pool.map(load, opened.tensors, opened.tensors.values())
        return layouts.unflatten(dict(zip(opened.tensors, arrays, strict=True)))


def _by_rows(array: jax.Array) -> jax.Array:
    place = by_rows(array.ndim, array.sharding)
    if place is array.sharding:
        return array
    # Over the devices of several processes too, which `device_put` does not reach.
    return jax.jit(lambda x: x, out_shardings=place, donate_argnums=0)(array)


def abstract_tree(opened: Checkpoint) -> Params:
    """The nested dict of `jax.ShapeDtypeStruct` of an opened checkpoint's parameters."""
    return layouts.unflatten(
        {p: jax.ShapeDtypeStruct(t.shape, t.dtype) for p, t in opened.tensors.items()}
    )


def resolve_shardings(sharding: Shardings, opened: Checkpoint) -> dict[str, Any]:
    """Dotted parameter path -> Sharding."""
    if callable(sharding):
        sharding = sharding(opened.config, abstract_tree(opened))
    if isinstance(sharding, jax.sharding.Sharding):
        return dict.fromkeys(opened.tensors, sharding)
    assert isinstance(sharding, Mapping)
    return layouts.flatten(sharding)


def _read_once(tensor: LazyTensor) -> Callable[[Any], np.ndarray]:
    """Boxes of a tensor, of whose rows none is read, and dequantised, twice: what is cut along
    another axis, or goes to several devices, is cut from the same rows."""
    held: dict[Any, np.ndarray] = {}

    def part(index: Any) -> np.ndarray:
        rows, *inner = index
        key = rows.indices(tensor.shape[0])
        if key not in held:
            held[key] = tensor.part((rows,))
        return held[key][:, *inner]

    return part
