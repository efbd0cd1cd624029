"""Sequences in slots, and their pages: who is where, and who could be."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from jaxtyping import Int

from peagle_jax.serving.engine_protocol import EngineShape
from peagle_jax.serving.pages import NULL_PAGE, BlockTables
from peagle_jax.serving.sequence import Tracked


class Slots:
    """The slots of all groups. A sequence in a slot has pages in its group's pool."""

    def __init__(self, shape: EngineShape) -> None:
        self._shape = shape
        self._groups = [
            BlockTables(shape.slots_a_group, shape.pages_a_slot, shape.num_pages, shape.page_size)
            for _ in range(shape.num_groups)
        ]
        self._held: list[Tracked | None] = [None] * shape.num_slots

    def __iter__(self) -> Iterator[Tracked]:
        """Sequences in slots, the oldest first."""
        held = [tracked for tracked in self._held if tracked is not None]
        return iter(sorted(held, key=lambda tracked: tracked.arrival))

    def __len__(self) -> int:
        """Slots, with and without a sequence."""
        return len(self._held)

    def decoding(self) -> list[Tracked]:
        """Sequences that decode, the oldest first."""
        return [tracked for tracked in self if tracked.inserted]

    def newest_beside(self, tracked: Tracked) -> Tracked:
        """The newest sequence of the same group, which may be this one itself."""
        group = self._place(tracked)[0]
        return [one for one in self if self._place(one)[0] is group][-1]

    # --- coming and going ---------------------------------------------------------

    def admit(self, tracked: Tracked, positions: int) -> bool:
        """Gives a sequence a slot, and pages for so many positions; False = there is no room.

        It is taken in by the group that has most pages left. One page for each sequence that
        is there stays free: it will soon ask for it.
        """
        size = self._shape.slots_a_group
        best, most = None, -1
        for index, group in enumerate(self._groups):
            slots = range(index * size, (index + 1) * size)
            empty = [slot for slot in slots if self._held[slot] is None]
            free = group.pool.num_free
            enough = free >= group.pages_for(positions) + size - len(empty)
            if empty and enough and free > most:
                best, most = empty[0], free
        if best is None:
            return False
        self._held[best], tracked.slot = tracked, best
        return self.reserve(tracked, positions)

    def vacate(self, tracked: Tracked) -> int:
        """Takes a sequence out of its slot, which is returned, and its pages from it."""
        slot = tracked.slot
        assert slot is not None
        group, row = self._place(tracked)
        group.release(row)
        self._held[slot] = None
        tracked.leave()
        return slot

    # --- pages --------------------------------------------------------------------

    def pages_for(self, positions: int) -> int:
        """Pages that so many positions take."""
        return self._groups[0].pages_for(positions)

    @property
    def free_pages(self) -> list[int]:
        """Pages that nobody holds, of each group."""
        return [group.pool.num_free for group in self._groups]

    def reserve(self, tracked: Tracked, positions: int) -> bool:
        """Makes a sequence's pages cover so many positions; False = too few are free."""
        group, row = self._place(tracked)
        return group.reserve(row, positions)

    def trim(self, tracked: Tracked, positions: int) -> None:
        """Takes back pages past so many positions."""
        group, row = self._place(tracked)
        group.trim(row, positions)

    def pages(self, tracked: Tracked) -> Int[np.ndarray, "pages"]:
        """A copy of a sequence's row of the block tables."""
        group, row = self._place(tracked)
        return group.row(row)

    def step_tables(self) -> Int[np.ndarray, "slots pages"]:
        """Pages of the sequences that decode, int32; the null page for every other slot.

        A step writes something for every slot. It must not reach pages of a sequence whose
        prompt is still being prefilled.
        """
        tables = np.concatenate([group.rows() for group in self._groups])
        others = [slot for slot, one in enumerate(self._held) if one is None or not one.inserted]
        tables[others] = NULL_PAGE
        return tables

    def _place(self, tracked: Tracked) -> tuple[BlockTables, int]:
        """The block tables of a sequence's group, and its row there."""
        assert tracked.slot is not None
        group, row = divmod(tracked.slot, self._shape.slots_a_group)
        return self._groups[group], row

    def check(self) -> None:
        """Raises AssertionError where slots and pages do not fit together."""
        for group in self._groups:
            group.check()
        for slot, tracked in enumerate(self._held):
            index, row = divmod(slot, self._shape.slots_a_group)
            if tracked is None:
                assert self._groups[index].count(row) == 0, f"slot {slot} holds pages of nobody"
            else:
                assert tracked.slot == slot, f"slot {slot} and its sequence disagree"
