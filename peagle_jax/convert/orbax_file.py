"""Orbax checkpoints: written array by array and resumably, read row by row.

OUT/manifest.json says what the checkpoint is; OUT/params is an ordinary Orbax PyTree
checkpoint (zarr arrays), which Orbax itself restores too.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import tensorstore as ts

from peagle_jax.convert.base_reader import MANIFEST, Reader, one_line, read_json, row_chunks
from peagle_jax.convert.folders import Journal
from peagle_jax.convert.layouts import unflatten
from peagle_jax.convert.lazy_tensor import LazyTensor
from peagle_jax.errors import InputError

FORMAT = "peagle_jax checkpoint"
FORMAT_VERSION = 1
PARAMS = "params"
_ARRAYS = "arrays"  # where they are written, before there is an Orbax checkpoint around them
# Rows are stored, and later read, in pieces of this size: one device's shard of a
# row-sharded tensor touches few pieces beyond its own.
PIECE_BYTES = 16 << 20


def write_params(
    journal: Journal,
    tensors: Mapping[str, LazyTensor],
    advance: Callable[[str, int], None] = lambda path, num_bytes: None,
) -> None:
    """Writes params/ into the journal's folder, as Orbax does: two pieces at most in memory.

    Arrays that the journal has as done are left as they are: the array in hand when a run was
    stopped is the only one that is written again. `advance(path, num_bytes)` is called after
    each piece, and for each array that was there.
    """
    arrays = journal.folder / _ARRAYS
    _recover(journal.folder, arrays)
    for path, tensor in tensors.items():
        if path in journal.done and (arrays / path / ".zarray").is_file():
            advance(path, tensor.nbytes)
            continue
        shutil.rmtree(arrays / path, ignore_errors=True)
        _write_array(arrays / path, tensor, functools.partial(advance, path))
        journal.add(path)
    _gather(journal.folder / PARAMS, arrays, tensors)


def _write_array(folder: Path, tensor: LazyTensor, advance: Callable[[int], None]) -> None:
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
    try:
        store = ts.open(spec).result()
        written = None
        for start, stop in ranges:
            rows = tensor.rows(start, stop)
            if written is not None:  # the one before was on its way meanwhile
                written.result()
            written = store[start:stop].write(rows)
            advance(rows.nbytes)
        if written is not None:
            written.result()
    except InputError:
        raise
    except ValueError as error:  # tensorstore's own kind, for a full disk among others
        raise OSError(errno.EIO, _detail(error)) from None


def _gather(params: Path, arrays: Path, tensors: Mapping[str, LazyTensor]) -> None:
    """Makes an Orbax checkpoint of the arrays, which are moved into it."""
    import orbax.checkpoint as ocp

    class WrittenHandler(ocp.type_handlers.TypeHandler):
        """Saves a LazyTensor by moving the array that was written of it into place."""

        def typestr(self) -> str:
            return "jax.Array"  # what Orbax is to restore it as

        async def metadata(self, infos: Sequence[Any]) -> Sequence[Any]:
            raise NotImplementedError("only written")

        async def deserialize(self, infos: Sequence[Any], args: Any = None) -> Sequence[Any]:
            raise NotImplementedError("only written")

        async def serialize(
            self, values: Sequence[LazyTensor], infos: Sequence[Any], args: Any = None
        ) -> Sequence[Any]:
            for info in infos:
                await info.await_path_creation()
                (arrays / info.name).rename(Path(info.parent_dir) / info.name)
            return []

    registry = ocp.type_handlers.create_type_handler_registry((LazyTensor, WrittenHandler()))
    with _quiet_orbax():
        handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, type_handler_registry=registry)
        with ocp.Checkpointer(handler) as checkpointer:
            checkpointer.save(params.absolute(), unflatten(tensors))
    arrays.rmdir()


def _recover(folder: Path, arrays: Path) -> None:
    """Takes arrays back that a run had begun to move when it was stopped."""
    arrays.mkdir(exist_ok=True)
    for begun in folder.glob(f"{PARAMS}*"):
        for array in begun.iterdir():
            if (array / ".zarray").is_file():
                array.rename(arrays / array.name)
        shutil.rmtree(begun)


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
