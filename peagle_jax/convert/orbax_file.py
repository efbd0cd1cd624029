"""Orbax checkpoints: written tensor by tensor, read row by row.

OUT/manifest.json says what the checkpoint is; OUT/params is an ordinary Orbax PyTree
checkpoint (zarr arrays), which Orbax itself restores too.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import tensorstore as ts

from peagle_jax.convert.base_reader import MANIFEST, Reader, one_line, read_json, row_chunks
from peagle_jax.convert.layouts import LazyTensor, unflatten
from peagle_jax.errors import InputError

FORMAT = "peagle_jax checkpoint"
FORMAT_VERSION = 1
PARAMS = "params"
# Rows are stored, and later read, in pieces of this size: one device's shard of a
# row-sharded tensor touches few pieces beyond its own.
PIECE_BYTES = 16 << 20


def write_params(
    folder: Path,
    tensors: Mapping[str, LazyTensor],
    progress: Callable[[str, int, int], None] | None = None,
) -> None:
    """Writes `folder`/params through Orbax; no more than one piece of a tensor is in memory.

    `progress(path, done, total)` is called after each tensor, counts in tensors.
    """
    import orbax.checkpoint as ocp

    class LazyTensorHandler(ocp.type_handlers.TypeHandler):
        """Saves a LazyTensor as the array that it stands for."""

        def typestr(self) -> str:
            return "jax.Array"  # what Orbax is to restore it as

        async def metadata(self, infos: Sequence[Any]) -> Sequence[Any]:
            raise NotImplementedError("only written")

        async def deserialize(self, infos: Sequence[Any], args: Any = None) -> Sequence[Any]:
            raise NotImplementedError("only written")

        async def serialize(
            self, values: Sequence[LazyTensor], infos: Sequence[Any], args: Any = None
        ) -> Sequence[Any]:
            for done, (value, info) in enumerate(zip(values, infos, strict=True), start=1):
                await info.await_path_creation()
                await _write_tensor(Path(info.parent_dir) / info.name, value)
                if progress is not None:
                    progress(info.name, done, len(values))
            return []

    registry = ocp.type_handlers.create_type_handler_registry((LazyTensor, LazyTensorHandler()))
    with _quiet_orbax():
        handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, type_handler_registry=registry)
        with ocp.Checkpointer(handler) as checkpointer:
            checkpointer.save((folder / PARAMS).absolute(), unflatten(tensors))


async def _write_tensor(folder: Path, tensor: LazyTensor) -> None:
    ranges = row_chunks(tensor.shape, tensor.dtype, PIECE_BYTES)
    spec = {
        **_spec(folder),
        "dtype": tensor.dtype.name,
        "create": True,
        "store_data_equal_to_fill_value": True,  # so that a lost piece is not read as zeros
        "metadata": {
            "shape": list(tensor.shape),
            "chunks": [ranges[0][1], *tensor.shape[1:]],
            "compressor": None,
        },
    }
    store = await ts.open(spec)
    for start, stop in ranges:
        await store[start:stop].write(tensor.rows(start, stop))


def write_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Writes `folder`/manifest.json, with the format's name and version in front."""
    whole = {"format": FORMAT, "format_version": FORMAT_VERSION, **manifest}
    (folder / MANIFEST).write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")


class OrbaxReader(Reader):
    """A checkpoint folder made by this package. Tensor names are dotted parameter paths.

    `config` is the manifest.
    """

    format = "orbax"
    chunk_bytes = PIECE_BYTES

    def __init__(self, path: Path):
        self.path = path
        self.config = manifest = read_json(path / MANIFEST)
        version = manifest.get("format_version")
        if (manifest.get("format"), version) != (FORMAT, FORMAT_VERSION):
            raise InputError(
                f"{path / MANIFEST}: format, format_version: found {manifest.get('format')!r}, "
                f"{version!r}, expected {FORMAT!r}, {FORMAT_VERSION}"
            )
        entries = manifest.get("tensors")
        if not isinstance(entries, dict):
            raise InputError(f"{path / MANIFEST}: tensors: found {entries!r}, expected an object")
        self._stores: dict[str, Any] = {}
        for name, entry in entries.items():
            try:
                store = ts.open(_spec(path / PARAMS / name), read=True).result()
            except ValueError as error:
                raise self.fail(f"{name}: found {_detail(error)}, expected a whole array") from None
            self._stores[name] = store
            found = {"shape": list(store.shape), "dtype": _dtype(store).name}
            if found != entry:
                raise self.fail(f"{name}: found {found}, expected {entry} (manifest)")
        self.files = [path / MANIFEST]

    def names(self) -> list[str]:
        return list(self._stores)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._stores[name].shape)

    def dtype(self, name: str) -> np.dtype:
        return _dtype(self._stores[name])

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        try:
            return self._stores[name][start:stop].read().result()
        except ValueError as error:
            raise self.fail(f"{name}: found {_detail(error)}, expected a whole array") from None


def _spec(folder: Path) -> dict[str, Any]:
    return {
        "driver": "zarr",
        "kvstore": {"driver": "file", "path": str(folder.absolute())},
        "fill_missing_data_reads": False,
    }


def _detail(error: Exception) -> str:
    return one_line(error).split(" [")[0]  # tensorstore appends its source locations


@contextlib.contextmanager
def _quiet_orbax() -> Iterator[None]:
    """Orbax warns that arrays and OCDBT, which are not used here, are not set up."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _dtype(store: Any) -> np.dtype:
    name = store.dtype.name
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)
