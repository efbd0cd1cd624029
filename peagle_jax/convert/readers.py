"""Checkpoint files as named tensors, read a few rows at a time.

Every reader answers the same questions about tensors and hands out rows of one tensor
as NumPy arrays, so that no caller ever needs a whole checkpoint, nor a second copy of
a tensor, in memory. GGUF lives in gguf_file.py.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from peagle_jax.errors import InputError

CHUNK_BYTES = 1 << 20  # rows are read in chunks of about this size: they stay in the CPU's cache

_SAFETENSORS_DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "BOOL": np.dtype(np.bool_),
}
# Bits that are all set exactly in Inf and NaN, by dtype.
_EXPONENT_BITS: dict[np.dtype, np.unsignedinteger] = {
    np.dtype(np.float32): np.uint32(0x7F80_0000),
    np.dtype(np.float16): np.uint16(0x7C00),
    np.dtype(ml_dtypes.bfloat16): np.uint16(0x7F80),
}


class Reader(ABC):
    """Named tensors of one checkpoint.

    Attributes:
        path: the file or folder, as error messages name it.
        format: "safetensors", "gguf", "pytorch" or "orbax".
        files: every file that the tensors come from.
        config: the parsed config.json, or the GGUF metadata; None where there is none.
        generation_config: the parsed generation_config.json, None where there is none.
    """

    path: Path
    format: str
    files: list[Path]
    config: dict[str, Any] | None = None
    generation_config: dict[str, Any] | None = None

    @abstractmethod
    def names(self) -> list[str]:
        """Names of all tensors."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, row-major as in PyTorch."""

    @abstractmethod
    def dtype(self, name: str) -> np.dtype:
        """Dtype that `rows` gives (float32 for block-quantised tensors)."""

    def storage(self, name: str) -> str:
        """How the file stores the tensor, e.g. "BF16" or "Q4_1"."""
        return self.dtype(name).name

    def nbytes(self, name: str) -> int:
        """Bytes the tensor takes in the file."""
        return int(np.prod(self.shape(name), dtype=np.int64)) * self.dtype(name).itemsize

    @abstractmethod
    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows start..stop of the leading axis, `[stop - start, ...]`; not for scalars."""

    def read(
        self, name: str, dtype: np.dtype | None = None, out: np.ndarray | None = None
    ) -> np.ndarray:
        """One whole tensor, cast to `dtype` (None = as stored), chunk by chunk.

        `out` receives it where given. Raises InputError on a NaN or an Inf, those that
        the cast makes included.
        """
        shape = self.shape(name)
        if out is None:
            out = np.empty(shape, dtype or self.dtype(name))
        for start, stop in row_chunks(shape, max(out.itemsize, 4)):
            out[start:stop] = self.rows(name, start, stop)
            self.check_finite(name, out[start:stop])
        return out

    def check_finite(self, name: str, array: np.ndarray) -> None:
        """Raises InputError if `array`, part of tensor `name`, holds a NaN or an Inf."""
        exponent = _EXPONENT_BITS.get(array.dtype)
        if exponent is None or not array.size:
            return
        bits = np.ascontiguousarray(array).view(exponent.dtype)
        if np.max(bits & exponent) == exponent:
            raise InputError(f"{self.path}: {name}: found NaN or Inf, expected finite numbers")

    def fail(self, problem: str) -> InputError:
        """An InputError that names this checkpoint."""
        return InputError(f"{self.path}: {problem}")


def row_chunks(shape: tuple[int, ...], itemsize: int) -> list[tuple[int, int]]:
    """(start, stop) of consecutive row ranges of about CHUNK_BYTES each."""
    row_bytes = max(1, int(np.prod(shape[1:], dtype=np.int64)) * itemsize)
    step = max(1, CHUNK_BYTES // row_bytes)
    return [(start, min(start + step, shape[0])) for start in range(0, shape[0], step)]


class SafetensorsReader(Reader):
    """One .safetensors file, or the shards that an index names."""

    format = "safetensors"

    def __init__(self, path: Path, shards: list[Path], index: Mapping[str, str] | None = None):
        self.path = path
        self.files = shards
        self._slices: dict[str, Any] = {}
        self._handles = []
        home: dict[str, Path] = {}
        for shard in shards:
            handle = self._open(shard)
            self._handles.append(handle)
            for name in list(handle.keys()):
                if name in home:
                    raise InputError(
                        f"{path}: {name}: found in both {home[name].name} and {shard.name}, "
                        "expected once"
                    )
                home[name] = shard
                self._slices[name] = handle.get_slice(name)
        for name, shard_name in (index or {}).items():
            if name not in home or home[name].name != Path(shard_name).name:
                raise InputError(
                    f"{path}: {name}: the index places it in {shard_name}, "
                    f"found {home[name].name if name in home else 'no such tensor'}"
                )
        for name, view in self._slices.items():
            if view.get_dtype() not in _SAFETENSORS_DTYPES:
                raise self.fail(
                    f"{name}: found dtype {view.get_dtype()}, "
                    f"expected one of {', '.join(_SAFETENSORS_DTYPES)}"
                )

    @staticmethod
    def _open(shard: Path) -> Any:
        from safetensors import SafetensorError, safe_open

        try:
            return safe_open(shard, framework="np")
        except (SafetensorError, OSError) as error:
            raise InputError(
                f"{shard}: found {_one_line(error)}, expected a whole safetensors file"
            ) from None

    def names(self) -> list[str]:
        return list(self._slices)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slices[name].get_shape())

    def dtype(self, name: str) -> np.dtype:
        return _SAFETENSORS_DTYPES[self.storage(name)]

    def storage(self, name: str) -> str:
        return str(self._slices[name].get_dtype())

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        return self._slices[name][start:stop]


class PyTorchReader(Reader):
    """pytorch_model.bin files, through torch with `weights_only=True` alone.

    A pickle can run any code when it is loaded: without torch, or where torch's
    restricted unpickler refuses the file, so does this reader.
    """

    format = "pytorch"

    def __init__(self, path: Path, shards: list[Path], index: Mapping[str, str] | None = None):
        self.path = path
        self.files = shards
        self._tensors: dict[str, Any] = {}
        for shard in shards:
            for name, tensor in self._load(shard).items():
                if name in self._tensors:
                    raise self.fail(f"{name}: found in two files, expected once")
                self._tensors[name] = tensor
        for name in index or {}:
            if name not in self._tensors:
                raise self.fail(f"{name}: found in the index alone, expected it in a file")

    @staticmethod
    def _load(shard: Path) -> dict[str, Any]:
        try:
            import torch
        except ImportError:
            raise InputError(
                f"{shard}: found a PyTorch pickle and no torch to read it safely, "
                "expected safetensors, or torch installed"
            ) from None
        try:
            state = torch.load(shard, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:  # torch raises many kinds here, all meaning "not loadable"
            raise InputError(
                f"{shard}: found a file that torch.load(weights_only=True) refuses "
                f"({type(error).__name__}), expected plain tensors"
            ) from None
        if not isinstance(state, dict) or not all(
            isinstance(tensor, torch.Tensor) for tensor in state.values()
        ):
            raise InputError(f"{shard}: found no plain state dict, expected names to tensors")
        return state

    def names(self) -> list[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def dtype(self, name: str) -> np.dtype:
        torch_name = str(self._tensors[name].dtype).removeprefix("torch.")
        try:
            return np.dtype(ml_dtypes.bfloat16 if torch_name == "bfloat16" else torch_name)
        except TypeError:
            raise self.fail(f"{name}: found dtype {torch_name}, expected a plain one") from None

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        import torch

        rows = self._tensors[name][start:stop].contiguous()
        if rows.dtype == torch.bfloat16:  # NumPy has none: carry the bits over
            return rows.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        return rows.numpy()


def open_reader(path: Path) -> Reader:
    """The reader of a checkpoint file or folder (a folder: safetensors, then GGUF, then .bin)."""
    if path.is_file():
        return _open_file(path)
    reader = _open_folder(path)
    reader.config = (
        read_json(path / "config.json") if (path / "config.json").exists() else (reader.config)
    )
    if (path / "generation_config.json").exists():
        reader.generation_config = read_json(path / "generation_config.json")
    return reader


def _open_file(path: Path) -> Reader:
    if path.suffix == ".gguf":
        from peagle_jax.convert.gguf_file import GGUFFileReader

        return GGUFFileReader(path)
    kinds: dict[str, Any] = {".safetensors": SafetensorsReader, ".bin": PyTorchReader}
    if path.suffix not in kinds:
        raise InputError(f"{path}: found suffix {path.suffix!r}, expected .safetensors or .gguf")
    reader: Reader = kinds[path.suffix](path, [path])
    config = path.parent / "config.json"
    reader.config = read_json(config) if config.exists() else None
    return reader


def _open_folder(path: Path) -> Reader:
    for stem, suffix, kind in (
        ("model", ".safetensors", SafetensorsReader),
        ("pytorch_model", ".bin", PyTorchReader),
    ):
        index_path = path / f"{stem}{suffix}.index.json"
        if index_path.exists():
            return kind(index_path, *_index_shards(index_path))
        if (path / f"{stem}{suffix}").exists():
            return kind(path / f"{stem}{suffix}", [path / f"{stem}{suffix}"])
        lone = sorted(path.glob("*.gguf" if suffix == ".bin" else f"*{suffix}"))
        if len(lone) > 1:
            raise InputError(
                f"{path}: found {len(lone)} {lone[0].suffix} files and no index, expected one"
            )
        if lone:
            return _open_file(lone[0])
    raise InputError(
        f"{path}: found no weights, expected model.safetensors (or its index), a .gguf file "
        "or pytorch_model.bin"
    )


def _index_shards(index_path: Path) -> tuple[list[Path], dict[str, str]]:
    weight_map = read_json(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError(f"{index_path}: weight_map: found none, expected tensor names to files")
    shards = sorted({index_path.parent / name for name in weight_map.values()})
    for shard in shards:
        if not shard.is_file():
            raise InputError(f"{index_path}: {shard.name}: found no such shard, expected the file")
    return shards, weight_map


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises InputError where it is not one, or has a key twice."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise InputError(f"{path}: {twice}: found twice, expected once")
        return found

    try:
        value = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=unique)
    except (json.JSONDecodeError, UnicodeDecodeError, OSError) as error:
        raise InputError(f"{path}: found {_one_line(error)}, expected a JSON object") from None
    if not isinstance(value, dict):
        raise InputError(f"{path}: found a {type(value).__name__}, expected a JSON object")
    return value


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
