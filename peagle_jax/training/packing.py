"""Which documents share a row: a plan made once from their lengths alone."""

from __future__ import annotations

import dataclasses

import numpy as np
from jaxtyping import Int


@dataclasses.dataclass(frozen=True, eq=False)
class PackingPlan:
    """Documents in the order in which rows hold them.

    documents: int64, every document once, row after row.
    row_starts: int64, where in `documents` a row starts; its last entry is their number.
    """

    documents: Int[np.ndarray, "documents"]
    row_starts: Int[np.ndarray, "rows_and_one"]

    @property
    def num_rows(self) -> int:
        return len(self.row_starts) - 1

    def row(self, index: int) -> Int[np.ndarray, "row_documents"]:
        """The documents of a row, in order."""
        return self.documents[self.row_starts[index] : self.row_starts[index + 1]]


def plan_packing(lengths: Int[np.ndarray, "documents"], length: int, seed: int) -> PackingPlan:
    """Places documents of `lengths` tokens, 1 to `length` each, whole into rows of `length`.

    Best fit: documents come in random order (by `seed`), each into the row with the least room
    that is enough, or a new row. All rows stay open to the end, which leaves little padding
    (a few documents' worth at most rows); and unlike best fit over documents sorted by length,
    short and long documents meet in a row, so that every batch has some of both.
    """
    if len(lengths) and not 1 <= lengths.min() <= lengths.max() <= length:
        raise ValueError(f"document lengths: found {lengths.min()} to {lengths.max()}")
    order = np.random.default_rng(seed).permutation(len(lengths))
    rows = np.empty(len(lengths), np.int64)
    # Rows by the room they have left; bit r of `rooms` says that there are rows with room r.
    open_rows: list[list[int]] = [[] for _ in range(length + 1)]
    rooms = 0
    num_rows = 0
    for document, size in zip(order.tolist(), lengths[order].tolist(), strict=True):
        enough = rooms >> size
        if enough:
            room = size + (enough & -enough).bit_length() - 1  # the lowest bit that is set
            row = open_rows[room].pop()
            if not open_rows[room]:
                rooms ^= 1 << room
        else:
            room, row = length, num_rows
            num_rows += 1
        rows[document] = row
        left = room - size
        if left:
            if not open_rows[left]:
                rooms |= 1 << left
            open_rows[left].append(row)
    # Within a row in random order too; a stable sort keeps it.
    by_row = order[np.argsort(rows[order], kind="stable")]
    starts = np.zeros(num_rows + 1, np.int64)
    np.cumsum(np.bincount(rows, minlength=num_rows), out=starts[1:])
    return PackingPlan(by_row.astype(np.int64), starts)
