"""Safetensors files as named tensors."""

from __future__ import annotations

import dataclasses
import json
import os
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from peagle_jax.convert.base_reader import Reader, one_line, parse_json
from peagle_jax.errors import InputError

DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}


@dataclasses.dataclass(frozen=True)
class _Entry:
    """Where a tensor lies: `offset` bytes into `shard`."""

    shard: Path
    storage: str
    shape: tuple[int, ...]
    offset: int


class SafetensorsReader(Reader):
    """One .safetensors file, or the shards that an index names.

    The library checks the files and this class reads them: a memory map, which the library
    uses, would count every page that was ever touched as this process's memory.
    """

    format = "safetensors"

    def __init__(self, path: Path, shards: list[Path], index: Mapping[str, str] | None = None):
        self.path = path
        self.files = shards
        self._entries: dict[str, _Entry] = {}
        for shard in shards:
            for name, entry in _entries(shard).items():
                if name in self._entries:
                    other = self._entries[name].shard.name
                    raise self.fail(
                        f"{name}: found in both {other} and {shard.name}, expected once"
                    )
                self._entries[name] = entry
        for name, shard_name in (index or {}).items():
            found = self._entries[name].shard.name if name in self._entries else "no such tensor"
            if found != Path(shard_name).name:
                raise self.fail(f"{name}: found {found}, expected it in {shard_name} (the index)")

    def names(self) -> list[str]:
        return list(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entries[name].shape

    def dtype(self, name: str) -> np.dtype:
        return DTYPES[self.storage(name)]

    def storage(self, name: str) -> str:
        return self._entries[name].storage

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        entry, dtype = self._entries[name], self.dtype(name)
        row = int(np.prod(entry.shape[1:], dtype=np.int64))
        offset = entry.offset + start * row * dtype.itemsize
        flat = np.fromfile(entry.shard, dtype, (stop - start) * row, offset=offset)
        return flat.reshape(stop - start, *entry.shape[1:])


def _entries(shard: Path) -> dict[str, _Entry]:
    try:
        with safe_open(shard, framework="np"):
            pass
        with shard.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            header = parse_json(file.read(size), shard)
    except SafetensorError as error:
        raise InputError(
            f"{shard}: found {_damage(shard, error)}, expected a whole safetensors file"
        ) from None
    except OSError as error:
        raise InputError(
            f"{shard}: found {one_line(error)}, expected a whole safetensors file"
        ) from None
    header.pop("__metadata__", None)
    for name, entry in header.items():
        if entry["dtype"] not in DTYPES:
            raise InputError(
                f"{shard}: {name}: found dtype {entry['dtype']}, "
                f"expected one of {', '.join(DTYPES)}"
            )
    return {
        name: _Entry(shard, e["dtype"], tuple(e["shape"]), 8 + size + e["data_offsets"][0])
        for name, e in header.items()
    }


def _damage(shard: Path, error: SafetensorError) -> str:
    """What is wrong with a file that the library refuses; its own words where nothing else is."""
    size = shard.stat().st_size
    with shard.open("rb") as file:
        start = file.read(8)
        header_size = int.from_bytes(start, "little")
        if len(start) < 8 or header_size > size - 8:
            return f"{size} bytes, which end within the header"
        try:
            header = json.loads(file.read(header_size))
            header.pop("__metadata__", None)
            whole = 8 + header_size + max(entry["data_offsets"][1] for entry in header.values())
        except (ValueError, LookupError, TypeError, AttributeError):
            whole = size
    if whole != size:
        return f"{size} bytes, where the header speaks of {whole}"
    return f"a damaged header ({one_line(error)})"


@dataclasses.dataclass(frozen=True)
class Output:
    """One tensor to be written: `chunks` give its values in order, cut anywhere."""

    shape: tuple[int, ...]
    dtype: np.dtype
    chunks: Iterable[np.ndarray]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


def in_shards(outputs: Mapping[str, Output], limit: int) -> dict[str, dict[str, Output]]:
    """Outputs by file, in order: model.safetensors, or several of at most `limit` bytes, or of
    one tensor, called as transformers calls them."""
    shards: list[dict[str, Output]] = [{}]
    size = 0
    for name, output in outputs.items():
        if shards[-1] and size + output.nbytes > limit:
            shards.append({})
            size = 0
        shards[-1][name] = output
        size += output.nbytes
    if len(shards) == 1:
        return {"model.safetensors": shards[0]}
    count = len(shards)
    return {f"model-{i + 1:05}-of-{count:05}.safetensors": one for i, one in enumerate(shards)}


def write_index(path: Path, shards: Mapping[str, Mapping[str, Output]]) -> None:
    """Which file has which tensor, as transformers and vLLM read it."""
    total = sum(output.nbytes for shard in shards.values() for output in shard.values())
    where = {name: file for file, shard in shards.items() for name in shard}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
    path.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def write_safetensors(path: Path, outputs: Mapping[str, Output]) -> None:
    """Writes a safetensors file, one chunk of one tensor in memory at a time; it is on the disk
    when this returns.

    The library writes tensors that are all in memory. The order is the library's, widest
    dtype first and then by name, so that the same tensors give the same bytes.
    """
    names = {dtype: name for name, dtype in DTYPES.items()}
    rank = {"I64": 0, "F32": 1, "I32": 2, "BF16": 3, "F16": 4, "U8": 5, "BOOL": 6}
    order = sorted(outputs, key=lambda name: (rank[names[outputs[name].dtype]], name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in order:
        output = outputs[name]
        header[name] = {
            "dtype": names[output.dtype],
            "shape": list(output.shape),
            "data_offsets": [offset, offset + output.nbytes],
        }
        offset += output.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in order:
            for chunk in outputs[name].chunks:
                file.write(np.ascontiguousarray(chunk).tobytes())
        file.flush()
        os.fsync(file.fileno())
