"""Batches made ready in a thread while the device trains on the ones before."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from peagle_jax.files import Closing

T = TypeVar("T")
_POLL_SECONDS = 0.1


class Prefetch(Closing, Generic[T]):
    """An iterator over what `make` returns, called ahead of need in a thread of its own.

    `make` ends the iteration by raising StopIteration; another error is raised from `next`
    at its place in the order. A context manager: the thread ends with it.

    Args:
        ahead: results that wait at most.
    """

    def __init__(self, make: Callable[[], T], ahead: int = 2) -> None:
        self._make = make
        self._results: queue.Queue[tuple[T | None, Exception | None]] = queue.Queue(ahead)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._fill, name="prefetch", daemon=True)
        self._thread.start()

    def __iter__(self) -> Prefetch[T]:
        return self

    def __next__(self) -> T:
        result, error = self._results.get()
        if error is not None:
            self._results.put((None, error))  # so that asking again gives the same answer
            raise error
        return result  # type: ignore[return-value]

    def close(self) -> None:
        """Ends the thread; what it had made is dropped."""
        self._stop.set()
        self._thread.join()

    def _fill(self) -> None:
        while not self._stop.is_set():
            entry: tuple[Any, Exception | None]
            try:
                entry = (self._make(), None)
            except Exception as error:  # whatever it is, it is the consumer's to see
                entry = (None, error)
            self._offer(entry)
            if entry[1] is not None:
                return

    def _offer(self, entry: tuple[Any, Exception | None]) -> None:
        while not self._stop.is_set():
            try:
                self._results.put(entry, timeout=_POLL_SECONDS)
                return
            except queue.Full:
                continue
