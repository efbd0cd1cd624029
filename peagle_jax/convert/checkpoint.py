"""Checkpoints of any kind opened, and loaded into JAX arrays."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

from peagle_jax.config import DrafterConfig, ModelConfig
from peagle_jax.convert import configs, layouts
from peagle_jax.convert.layouts import LazyTensor
from peagle_jax.convert.readers import Reader, open_reader
from peagle_jax.convert.sources import Kind, locate
from peagle_jax.errors import InputError
from peagle_jax.models import decoder as decoder_model
from peagle_jax.models import drafter as drafter_model

Params = dict[str, Any]
# One sharding for all, a tree of them like the parameters, or a function from the
# abstract parameters to such a tree.
Shardings = jax.sharding.Sharding | Mapping[str, Any] | Callable[[Any], Any]

_FLOATS = tuple(np.dtype(d) for d in (np.float32, np.float16, ml_dtypes.bfloat16))


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint: its configuration, and its parameters still in their files.

    `tensors` maps dotted parameter paths ("layers_0.mlp.up_proj.kernel") to tensors.
    """

    path: Path
    kind: Kind
    layout: configs.Layout
    reader: Reader
    config: ModelConfig | DrafterConfig
    tensors: dict[str, LazyTensor]


def load_target(
    source: str | os.PathLike[str], dtype: Any = None, sharding: Shardings | None = None
) -> tuple[ModelConfig, Params]:
    """A target's configuration and parameters.

    Args:
        source: a Hugging Face folder, a .gguf or .safetensors file, an Orbax folder made by
            `convert`, "smollm2" or a hub repository.
        dtype: of the parameters; None = the checkpoint's own (float32 if quantised).
        sharding: where they go; None = the default device. Each device is sent its shard
            alone.

    Raises InputError on anything that is not a whole checkpoint of a known target.
    """
    opened = open_checkpoint(source, kind="target", dtype=dtype)
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


def open_checkpoint(
    source: str | os.PathLike[str],
    kind: Kind | None = None,
    target_config: ModelConfig | None = None,
    dtype: Any = None,
    aux_layer_shift: int = 0,
) -> Checkpoint:
    """Reads a checkpoint's metadata and matches every tensor; no weights are read.

    `kind` None takes whatever it is. Raises InputError.
    """
    path = locate(source, kind or "target")
    reader = open_reader(path)
    found: Kind = "drafter" if configs.is_drafter(reader.config, reader.names()) else "target"
    if kind not in (None, found):
        raise InputError(f"{path}: found a {found}, expected a {kind}")
    if found == "target":
        return _open_target(path, reader, dtype)
    return _open_drafter(path, reader, target_config, dtype, aux_layer_shift)


def _open_target(path: Path, reader: Reader, dtype: Any) -> Checkpoint:
    layout: configs.Layout
    if reader.format == "gguf":
        layout = "gguf"
        shapes = {name: reader.shape(name) for name in reader.names()}
        config = configs.gguf_model_config(_config(path, reader), shapes, str(path))
    else:
        layout = "hf"
        where = str(path / "config.json")
        config = configs.model_config(_config(path, reader), where, reader.generation_config)
    abstract = decoder_model.abstract_params(config, _resolve_dtype(reader, dtype))
    tensors = layouts.target_tensors(reader, layout, config, abstract)
    return Checkpoint(path, "target", layout, reader, config, tensors)


def _open_drafter(
    path: Path, reader: Reader, target: ModelConfig | None, dtype: Any, aux_layer_shift: int
) -> Checkpoint:
    raw = _config(path, reader)
    layout = configs.drafter_layout(raw, reader.names())
    names = list(layouts.canonical(reader, layout))
    where = str(path / "config.json")
    config = configs.drafter_config(raw, names, where, target, aux_layer_shift)
    if target is not None:
        configs.check_pair(config, target, where)
    abstract = drafter_model.abstract_params(config, _resolve_dtype(reader, dtype))
    tensors = layouts.drafter_tensors(reader, layout, config, abstract)
    return Checkpoint(path, "drafter", layout, reader, config, tensors)


def to_device(opened: Checkpoint, sharding: Shardings | None = None) -> Params:
    """Reads an opened checkpoint's parameters into JAX arrays, one tensor at a time."""
    if sharding is None:
        return layouts.unflatten(
            {path: jax.device_put(tensor.read()) for path, tensor in opened.tensors.items()}
        )
    placed = resolve_shardings(sharding, abstract_tree(opened))
    return layouts.unflatten(
        {
            path: jax.make_array_from_callback(tensor.shape, placed[path], _shard_reader(tensor))
            for path, tensor in opened.tensors.items()
        }
    )


def abstract_tree(opened: Checkpoint) -> Params:
    """The nested dict of `jax.ShapeDtypeStruct` of an opened checkpoint's parameters."""
    return layouts.unflatten(
        {p: jax.ShapeDtypeStruct(t.shape, t.dtype) for p, t in opened.tensors.items()}
    )


def resolve_shardings(sharding: Shardings, abstract: Params) -> dict[str, Any]:
    """Dotted parameter path -> Sharding."""
    if isinstance(sharding, jax.sharding.Sharding):
        return dict.fromkeys(layouts.flatten(abstract), sharding)
    return layouts.flatten(sharding(abstract) if callable(sharding) else sharding)


def _shard_reader(tensor: LazyTensor) -> Callable[[Any], np.ndarray]:
    """Reads the part of a tensor that one device holds, whatever axes it is cut along."""

    def read(index: tuple[slice, ...]) -> np.ndarray:
        start, stop, _ = index[0].indices(tensor.shape[0])
        part = tensor.rows(start, stop)
        return np.ascontiguousarray(part[(slice(None), *index[1:])])

    return read


def _config(path: Path, reader: Reader) -> dict[str, Any]:
    if reader.config is None:
        raise InputError(f"{path}: found no config.json, expected one beside the weights")
    return reader.config


def _resolve_dtype(reader: Reader, dtype: Any) -> np.dtype:
    """The asked dtype, else the one that most of the checkpoint's bytes are in."""
    if dtype is not None:
        found = np.dtype(dtype)
        if found not in _FLOATS:
            raise InputError(f"dtype: found {found}, expected float32, bfloat16 or float16")
        return found
    sizes = dict.fromkeys(_FLOATS, 0)
    for name in reader.names():
        if reader.dtype(name) in sizes:
            sizes[reader.dtype(name)] += int(np.prod(reader.shape(name), dtype=np.int64))
    return max(sizes, key=lambda d: sizes[d])
