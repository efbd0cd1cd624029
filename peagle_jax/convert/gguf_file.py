"""GGUF files (llama.cpp's format) as named tensors, dequantised to float32."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, dequantize

from peagle_jax.convert.base_reader import Reader, one_line
from peagle_jax.errors import InputError

_PLAIN: dict[GGMLQuantizationType, np.dtype[Any]] = {
    GGMLQuantizationType.F32: np.dtype(np.float32),
    GGMLQuantizationType.F16: np.dtype(np.float16),
    GGMLQuantizationType.BF16: np.dtype(ml_dtypes.bfloat16),
}
_QUANTISED = tuple(GGMLQuantizationType[name] for name in ("Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K"))
_MAGIC = b"GGUF"
# What the library's parser raises on a file that is damaged or cut short.
_PARSE_ERRORS = (ValueError, LookupError, OSError, OverflowError, MemoryError, struct.error)
# llama.cpp stores the q and k rows of these architectures reordered for its own RoPE.
_PERMUTED_ARCHITECTURES = ("llama",)


class _FastGGUFReader(GGUFReader):
    """GGUFReader, but an array (the vocabulary, the merges) is walked in one plain loop.

    The library makes several NumPy views an element: seconds for a 50,000-token
    vocabulary. If it ever stops calling this method, reading is slower and still right.
    """

    def _get_field_parts(self, orig_offs: int, raw_type: Any) -> Any:
        if GGUFValueType(raw_type) != GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        element_type = self._get(orig_offs, np.uint32)
        length = self._get(orig_offs + 4, np.uint64)
        parts: list[np.ndarray] = [element_type, length]
        kind = GGUFValueType(element_type[0])
        offset = orig_offs + 12
        if kind == GGUFValueType.STRING:
            data = np.asarray(self.data)  # plain views: a memmap makes each slice slow
            size_of = struct.Struct("<Q" if self.byte_order == "I" else ">Q").unpack_from
            for _ in range(int(length[0])):
                (size,) = size_of(data.data, offset)
                parts.append(data[offset + 8 : offset + 8 + size])
                offset += 8 + size
        elif kind in self.gguf_scalar_to_np:
            parts.append(self._get(offset, self.gguf_scalar_to_np[kind], int(length[0])))
            offset += parts[-1].nbytes
        else:
            return super()._get_field_parts(orig_offs, raw_type)
        types = [GGUFValueType.ARRAY, kind]
        return offset - orig_offs, parts, list(range(2, len(parts))), types


class GGUFFileReader(Reader):
    """One GGUF file. Tensors keep llama.cpp's names; q and k rows are in Hugging Face's order."""

    format = "gguf"

    def __init__(self, path: Path):
        self.path = path
        self.files = [path]
        try:
            self._gguf = _FastGGUFReader(path)
            self.config = {
                key: field.contents()
                for key, field in self._gguf.fields.items()
                if len(field.data) < 1000  # not the vocabulary
            }
        except _PARSE_ERRORS as error:
            raise InputError(
                f"{path}: found {_damage(path, error)}, expected a whole GGUF file"
            ) from None
        self._tensors = {tensor.name: tensor for tensor in self._gguf.tensors}
        if self.metadata("split.count", 1) != 1:
            raise self.fail("split.count: found more than one part, expected a single file")
        for name, tensor in self._tensors.items():
            if tensor.tensor_type not in (*_PLAIN, *_QUANTISED):
                expected = ", ".join(kind.name for kind in (*_PLAIN, *_QUANTISED))
                raise self.fail(
                    f"{name}: found type {tensor.tensor_type.name}, expected one of {expected}"
                )

    def metadata(self, key: str, default: Any = None) -> Any:
        """A metadata value, the long arrays (tokens, merges) included."""
        field = self._gguf.fields.get(key)
        return default if field is None else field.contents()

    def names(self) -> list[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(int(size) for size in reversed(self._tensors[name].shape))

    def dtype(self, name: str) -> np.dtype:
        kind = self._tensors[name].tensor_type
        return _PLAIN[kind] if kind in _PLAIN else np.dtype(np.float32)

    def storage(self, name: str) -> str:
        return str(self._tensors[name].tensor_type.name)

    def nbytes(self, name: str) -> int:
        return int(self._tensors[name].n_bytes)

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        tensor = self._tensors[name]
        heads = self._permuted_heads(name)
        if heads:
            stored = _interleaved_rows(self.shape(name)[0], heads)[start:stop]
            first = int(stored.min())
            raw = self._raw_rows(name, first, int(stored.max()) + 1)[stored - first]
        else:
            raw = self._raw_rows(name, start, stop)
        if tensor.tensor_type in _PLAIN:
            flat = raw.view(_PLAIN[tensor.tensor_type])
        else:  # as one row: the library loops in Python over groups of rows
            flat = dequantize(raw.reshape(1, -1), tensor.tensor_type)
        return flat.reshape(stop - start, *self.shape(name)[1:])

    def _raw_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Bytes `[rows, bytes a row]` as stored; read, as pages of a map would count as ours."""
        tensor = self._tensors[name]
        row = int(tensor.n_bytes) // self.shape(name)[0]
        offset = int(tensor.data_offset) + start * row
        return np.fromfile(self.path, np.uint8, (stop - start) * row, offset=offset).reshape(
            stop - start, row
        )

    def _permuted_heads(self, name: str) -> int:
        """Heads whose rows are reordered in this tensor; 0 = none."""
        architecture = self.metadata("general.architecture")
        if architecture not in _PERMUTED_ARCHITECTURES:
            return 0
        heads = self.metadata(f"{architecture}.attention.head_count")
        per_tensor = {
            "attn_q": heads,
            "attn_k": self.metadata(f"{architecture}.attention.head_count_kv", heads),
        }
        return int(per_tensor.get(name.split(".")[2], 0)) if name.startswith("blk.") else 0


def _damage(path: Path, error: Exception) -> str:
    """What is wrong with a file that the library does not parse."""
    try:
        with path.open("rb") as file:
            start = file.read(4)
    except OSError:
        return one_line(error)
    if start != _MAGIC:
        return f"{start!r} at its start"
    return f"{path.stat().st_size} bytes, cut short or damaged ({one_line(error)})"


def _interleaved_rows(rows: int, heads: int) -> np.ndarray:
    """Where each Hugging Face row of a q or k projection lies in the GGUF tensor.

    Within a head of size d Hugging Face rotates row j with row j + d/2; llama.cpp
    rotates neighbours, so it stores them as 2j and 2j + 1.
    """
    head_rows = np.arange(rows).reshape(heads, -1, 2)
    return head_rows.swapaxes(1, 2).reshape(-1)
