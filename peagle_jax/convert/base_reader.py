"""What every checkpoint reader is: named tensors, read a few rows at a time.

Every reader answers the same questions about tensors and hands out rows of one tensor
as NumPy arrays, so that no caller ever needs a whole checkpoint, nor a second copy of
a tensor, in memory. The readers are in safetensors_file.py, gguf_file.py, torch_file.py
and orbax_file.py; readers.py picks one.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from peagle_jax.errors import InputError

MANIFEST = "manifest.json"  # what marks a folder written by `convert`
# A chunk of this size stays in a core's own cache while it is converted (measured on
# SmolLM2's Q4_1 GGUF: 1.0 s, against 1.7 s with chunks of 1 MiB).
CHUNK_BYTES = 1 << 18

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
        chunk_bytes: how much is best read at a time.
    """

    path: Path
    format: str
    files: list[Path]
    config: dict[str, Any] | None = None
    generation_config: dict[str, Any] | None = None
    chunk_bytes: int = CHUNK_BYTES

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

    def rows_at(self, name: str, start: int, stop: int, last: slice) -> np.ndarray:
        """`rows(name, start, stop)[..., last]`: one half of what a checkpoint keeps fused.

        A reader that computes its values computes no others.
        """
        return self.rows(name, start, stop)[..., last]

    def stored(self) -> Reader:
        """The tensors as the files have them: this reader, unless it makes others of them."""
        return self

    def read(self, name: str) -> np.ndarray:
        """One whole tensor as stored."""
        return self.rows(name, 0, self.shape(name)[0])

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


def row_chunks(
    shape: tuple[int, ...], dtype: np.dtype, chunk_bytes: int = CHUNK_BYTES
) -> list[tuple[int, int]]:
    """(start, stop) of consecutive row ranges of about `chunk_bytes` each.

    Half-precision rows are counted at four bytes, so that a cast keeps the ranges.
    """
    row_bytes = max(1, int(np.prod(shape[1:], dtype=np.int64)) * max(dtype.itemsize, 4))
    step = max(1, chunk_bytes // row_bytes)
    return [(start, min(start + step, shape[0])) for start in range(0, shape[0], step)]


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises InputError where it is not one, or has a key twice."""
    try:
        return parse_json(path.read_bytes(), path)
    except OSError as error:
        raise InputError(f"{path}: found {one_line(error)}, expected a JSON object") from None


def parse_json(text: bytes, path: Path) -> dict[str, Any]:
    """A JSON object from text that `path` holds; errors as in `read_json`."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise InputError(f"{path}: {twice}: found twice, expected once")
        return found

    try:
        value = json.loads(text, object_pairs_hook=unique)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: found {one_line(error)}, expected a JSON object") from None
    if not isinstance(value, dict):
        raise InputError(f"{path}: found a {type(value).__name__}, expected a JSON object")
    return value


def one_line(error: Exception) -> str:
    """An exception's message on one line, its type where it has none."""
    return " ".join(str(error).split()) or type(error).__name__
