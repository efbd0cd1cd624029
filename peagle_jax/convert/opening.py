"""Checkpoints of any kind opened: what they are, and each parameter still in its file."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from peagle_jax.config import DrafterConfig, ModelConfig
from peagle_jax.convert import configs, drafter_configs, layouts, mxfp4, releases
from peagle_jax.convert.base_reader import MANIFEST, Reader, read_json
from peagle_jax.convert.lazy_tensor import LazyTensor
from peagle_jax.convert.manifest import CONFIGS, config_from_json
from peagle_jax.convert.readers import open_reader
from peagle_jax.convert.releases import Release
from peagle_jax.convert.sources import Kind, locate
from peagle_jax.errors import InputError
from peagle_jax.models import decoder as decoder_model
from peagle_jax.models import drafter as drafter_model

_FLOATS = tuple(np.dtype(d) for d in (np.float32, np.float16, ml_dtypes.bfloat16))


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint: its configuration, and its parameters still in their files.

    `tensors` maps dotted parameter paths ("layers_0.mlp.up_proj.kernel") to tensors.
    `release`: the released checkpoint that it is, by its name; None where it is none.
    """

    kind: Kind
    layout: drafter_configs.Layout
    reader: Reader
    config: ModelConfig | DrafterConfig
    tensors: dict[str, LazyTensor]
    release: Release | None = None


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
    reader = open_source(path)
    found = kind_of(reader)
    if kind not in (None, found):
        raise InputError(f"{path}: found a {found}, expected a {kind}")
    release = releases.find(source, path)
    layout = layout_of(reader, found)
    config = config_of(reader, found, layout, target_config, aux_layer_shift, release)
    return dataclasses.replace(match(reader, found, layout, config, dtype), release=release)


def open_source(path: Path) -> Reader:
    """The reader of a file or folder, its packed tensors as the ones that they stand for."""
    return mxfp4.dequantised(open_reader(path))


def open_config(source: str | os.PathLike[str]) -> ModelConfig:
    """A target's configuration alone: config.json is enough, weights are not fetched."""
    path = locate(source, "target", weights=False)
    if path.is_dir() and (path / "config.json").exists():
        generation = path / "generation_config.json"
        return configs.model_config(
            read_json(path / "config.json"),
            str(path / "config.json"),
            read_json(generation) if generation.exists() else None,
        )
    config = open_checkpoint(path, "target").config
    assert isinstance(config, ModelConfig)
    return config


def kind_of(reader: Reader) -> Kind:
    """Whether the checkpoint is a target or a drafter."""
    if reader.format == "orbax":
        return _manifest_kind(reader)
    return "drafter" if drafter_configs.is_drafter(reader.config, reader.names()) else "target"


def layout_of(reader: Reader, kind: Kind) -> drafter_configs.Layout:
    """The layout whose names the tensors have."""
    if reader.format == "orbax":
        return "orbax"
    if kind == "target":
        return "gguf" if reader.format == "gguf" else "hf"
    return drafter_configs.drafter_layout(_config(reader), reader.names())


def config_of(
    reader: Reader,
    kind: Kind,
    layout: drafter_configs.Layout,
    target_config: ModelConfig | None = None,
    aux_layer_shift: int = 0,
    release: Release | None = None,
) -> ModelConfig | DrafterConfig:
    """The checkpoint's configuration; a drafter's is checked against `target_config`.

    Without one, a drafter that is a known release gets the target that its manifest names.
    """
    raw, where = _config(reader), _config_path(reader)
    if kind == "drafter" and release is not None:
        if target_config is None:
            target_config = _released_target(release)
        else:
            # Of a release that is only described there is no such file.
            named = where if Path(where).exists() else release.repository
            release.check_target(target_config, named)
    if layout == "orbax":
        if aux_layer_shift:
            raise reader.fail("aux_layer_shift: found a converted checkpoint, expected its source")
        config = config_from_json(CONFIGS[kind], raw.get("config"), f"{where}: config")
    elif layout == "gguf":
        shapes = {name: reader.shape(name) for name in reader.names()}
        config = configs.gguf_model_config(raw, shapes, where)
    elif kind == "target":
        config = configs.model_config(raw, where, reader.generation_config)
    else:
        names = list(layouts.canonical(reader, layout))
        config = drafter_configs.drafter_config(raw, names, where, target_config, aux_layer_shift)
    if isinstance(config, DrafterConfig) and target_config is not None:
        drafter_configs.check_pair(config, target_config, where)
    return config


def _released_target(release: Release) -> ModelConfig | None:
    target = releases.find(release.target) if release.target else None
    return None if target is None else configs.model_config(target.config, str(target.path))


def match(
    reader: Reader,
    kind: Kind,
    layout: drafter_configs.Layout,
    config: ModelConfig | DrafterConfig,
    dtype: Any = None,
) -> Checkpoint:
    """Ties every tensor to its parameter. Raises InputError on any that does not fit."""
    resolved = _resolve_dtype(reader, dtype)
    tensors: dict[str, LazyTensor]
    if isinstance(config, ModelConfig):
        abstract = decoder_model.abstract_params(config, resolved)
        tensors = layouts.target_tensors(reader, layout, config, abstract)
    else:
        abstract = drafter_model.abstract_params(config, resolved)
        tensors = layouts.drafter_tensors(reader, layout, config, abstract)
    return Checkpoint(kind, layout, reader, config, tensors)


def _config(reader: Reader) -> dict[str, Any]:
    if reader.config is None:
        raise reader.fail("found no config.json, expected one beside the weights")
    return reader.config


def _config_path(reader: Reader) -> str:
    """The file that error messages about the configuration name."""
    if reader.format == "gguf":
        return str(reader.path)
    if reader.format == "orbax":
        return str(reader.path / MANIFEST)
    return str(reader.path.parent / "config.json")


def _manifest_kind(reader: Reader) -> Kind:
    kind = _config(reader).get("kind")
    if kind not in CONFIGS:
        raise InputError(
            f"{_config_path(reader)}: kind: found {kind!r}, expected one of {', '.join(CONFIGS)}"
        )
    return kind


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
