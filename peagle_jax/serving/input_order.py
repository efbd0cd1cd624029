"""Results put back into the order of the input."""

from __future__ import annotations

import collections
from collections.abc import Callable


class InputOrder:
    """Holds results back until all before them in the input are there.

    What it holds is bounded by how many requests are taken on before the oldest of them is
    answered. Results that are held are not done: a process that is killed loses them.
    """

    def __init__(self, release: Callable[[str, bytes], None]) -> None:
        """`release` is given results in the order of `expect`."""
        self._release = release
        self._order: collections.deque[str] = collections.deque()
        self._held: dict[str, bytes | None] = {}

    @property
    def num_expected(self) -> int:
        """Results that were not given on yet."""
        return len(self._order)

    def expect(self, key: str) -> None:
        """A result will come, after those that were expected before."""
        self._order.append(key)

    def add(self, key: str, line: bytes) -> None:
        """The result that was expected under a key."""
        self._settle(key, line)

    def drop(self, key: str) -> None:
        """There will be no such result."""
        self._settle(key, None)

    def _settle(self, key: str, line: bytes | None) -> None:
        self._held[key] = line
        while self._order and self._order[0] in self._held:
            first = self._order.popleft()
            ready = self._held.pop(first)
            if ready is not None:
                self._release(first, ready)
