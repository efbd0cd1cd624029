"""Pages of a cache: which are free, and which hold the positions of which slot.

A page has room for `page_size` consecutive positions of one sequence. Every network has
arrays of its own, indexed by the same page numbers. Page 0 is nobody's: entries of a table
that stand for no page hold it, so that a write past a sequence's pages, or of a slot without a
sequence, lands where nothing is ever read.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Int

NULL_PAGE = 0


class PagePool:
    """Page numbers 1 .. num_pages - 1, each free or taken."""

    def __init__(self, num_pages: int) -> None:
        """`num_pages` counts the null page."""
        if num_pages < 2:
            raise ValueError(f"a pool of {num_pages} pages has none besides the null page")
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, 0, -1))  # taken from the end: low numbers first
        self._taken = np.zeros(num_pages, bool)

    @property
    def num_free(self) -> int:
        """Pages that can be allocated."""
        return len(self._free)

    @property
    def capacity(self) -> int:
        """Pages that there are, without the null page."""
        return self.num_pages - 1

    def allocate(self, count: int) -> list[int]:
        """Takes `count` pages. Raises ValueError where fewer are free: callers ask first."""
        if count > len(self._free):
            raise ValueError(f"{count} pages wanted, {len(self._free)} free")
        pages = [self._free.pop() for _ in range(count)]
        self._taken[pages] = True
        return pages

    def free(self, pages: list[int]) -> None:
        """Gives pages back. Raises ValueError where one is not taken."""
        for page in pages:
            if not (0 < page < self.num_pages and self._taken[page]):
                raise ValueError(f"page {page} is freed, but nobody holds it")
            self._taken[page] = False
        self._free.extend(reversed(pages))


class BlockTables:
    """The pages of every slot, in the order of their positions.

    Entry i of a slot's row is the page of positions `i * page_size` to
    `(i + 1) * page_size - 1`. Rows are filled from the left; the rest is the null page.
    """

    def __init__(self, num_slots: int, pages_a_slot: int, num_pages: int, page_size: int) -> None:
        """All slots share one pool of `num_pages` pages, the null page among them."""
        if page_size < 1:
            raise ValueError(f"a page of {page_size} positions")
        self.page_size = page_size
        self.pool = PagePool(num_pages)
        self._rows = np.full((num_slots, pages_a_slot), NULL_PAGE, np.int32)
        self._counts = [0] * num_slots

    def pages_for(self, positions: int) -> int:
        """Pages that hold positions 0 .. positions - 1."""
        return -(-positions // self.page_size)

    def count(self, slot: int) -> int:
        """Pages that a slot holds."""
        return self._counts[slot]

    def row(self, slot: int) -> Int[np.ndarray, "pages"]:
        """A copy of a slot's row."""
        return self._rows[slot].copy()

    def rows(self) -> Int[np.ndarray, "slots pages"]:
        """A copy of all rows, int32."""
        return self._rows.copy()

    def reserve(self, slot: int, positions: int) -> bool:
        """Gives a slot the pages that positions 0 .. positions - 1 need and it lacks.

        False where so many are not free; then nothing has changed.
        """
        needed, held = self.pages_for(positions), self._counts[slot]
        if needed > self._rows.shape[1]:
            raise ValueError(f"{positions} positions in a row of {self._rows.shape[1]} pages")
        if needed - held > self.pool.num_free:
            return False
        if needed > held:
            self._rows[slot, held:needed] = self.pool.allocate(needed - held)
            self._counts[slot] = needed
        return True

    def trim(self, slot: int, positions: int) -> None:
        """Takes back pages that hold none of positions 0 .. positions - 1."""
        kept, held = self.pages_for(positions), self._counts[slot]
        if kept < held:
            self.pool.free(self._rows[slot, kept:held].tolist())
            self._rows[slot, kept:held] = NULL_PAGE
            self._counts[slot] = kept

    def release(self, slot: int) -> None:
        """Takes back all pages of a slot."""
        self.trim(slot, 0)

    def check(self) -> None:
        """Raises AssertionError where a page is lost, shared, or both free and held."""
        held = [
            page
            for row, count in zip(self._rows.tolist(), self._counts, strict=True)
            for page in row[:count]
        ]
        assert sorted(held + self.pool._free) == list(range(1, self.pool.num_pages)), "pages"
        assert sorted(held) == np.flatnonzero(self.pool._taken).tolist(), "taken pages"
        for row, count in zip(self._rows, self._counts, strict=True):
            assert (row[count:] == NULL_PAGE).all(), "a row past its count"
