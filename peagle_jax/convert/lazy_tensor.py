"""Parameters that are still in their files: read row by row, in the parameters' own form."""

from __future__ import annotations

import dataclasses

import numpy as np

from peagle_jax.convert.base_reader import Reader, row_chunks


@dataclasses.dataclass(frozen=True)
class LazyTensor:
    """One parameter, still in its file: `shape` and `dtype` are the parameter's."""

    reader: Reader
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the parameter."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    def chunks(self) -> list[tuple[int, int]]:
        """(start, stop) row ranges that cover the tensor, small enough for the cache."""
        return row_chunks(self.shape, self.dtype, self.reader.chunk_bytes)

    def rows(self, start: int, stop: int) -> np.ndarray:
        """Rows `[start, stop)` in the parameter's dtype. Raises InputError on NaN or Inf."""
        rows = self.reader.rows(self.name, start, stop).astype(self.dtype, copy=False)
        self.reader.check_finite(self.name, rows)
        return rows

    def part(self, index: tuple[slice, ...] | None = None) -> np.ndarray:
        """A box of the parameter (all of it by default), read chunk by chunk.

        It lies in memory that JAX on CPU adopts without a copy.
        """
        outer, *inner = index or (slice(None),)
        start, stop, _ = outer.indices(self.shape[0])
        shape = [len(range(*s.indices(n))) for s, n in zip(inner, self.shape[1:], strict=False)]
        out = aligned_empty((stop - start, *shape, *self.shape[1 + len(inner) :]), self.dtype)
        for first, last in self.chunks():
            first, last = max(first, start), min(last, stop)
            if first < last:
                out[first - start : last - start] = self.rows(first, last)[:, *inner]
        return out


class MaskHidden(LazyTensor):
    """`mask_hidden` without its leading axes of one: `[n_aux * H_t]`."""

    def rows(self, start: int, stop: int) -> np.ndarray:
        leading = self.reader.shape(self.name)[0]
        flat = self.reader.rows(self.name, 0, leading).reshape(-1)[start:stop]
        self.reader.check_finite(self.name, flat)
        return flat.astype(self.dtype)


class DraftToTarget(LazyTensor):
    """`d2t` as absolute target ids: the checkpoint stores offsets, target id - draft id."""

    def rows(self, start: int, stop: int) -> np.ndarray:
        offsets = self.reader.rows(self.name, start, stop).astype(np.int64)
        return (offsets + np.arange(start, stop)).astype(self.dtype)


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An uninitialised array at a 64-byte boundary: JAX on CPU adopts it without a copy."""
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    buffer = np.empty(size + 64, np.uint8)
    offset = -buffer.ctypes.data % 64
    return buffer[offset : offset + size].view(dtype).reshape(shape)


def check_stored(
    reader: Reader,
    name: str,
    expected: tuple[int, ...],
    dtype: np.dtype,
    compared: tuple[int, ...] | None = None,
) -> None:
    """Raises InputError unless a stored tensor's shape, and its kind of number, fit.

    `compared` takes the place of the stored shape in the comparison."""
    found = reader.shape(name)
    if (found if compared is None else compared) != expected:
        raise reader.fail(f"{name}: found shape {list(found)}, expected {list(expected)}")
    if (reader.dtype(name).kind in "biu") != (dtype.kind in "iu"):
        raise reader.fail(f"{name}: found dtype {reader.dtype(name)}, expected {dtype}")
