"""A file to which whole lines are only ever added: on the disk before they count."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from pathlib import Path

from peagle_jax.errors import InputError
from peagle_jax.files import lock, sync_folder


class DurableLines:
    """Adds lines to a file that one process at a time can write to.

    Opening makes the file, or locks one that is there and leaves it as it is. `recover` comes
    next: whatever is not a whole line at the end is what a stopped process left, and is cut
    off. Then lines can be added.

    Attributes:
        path: the file.
        size: bytes in it.
    """

    def __init__(self, path: Path) -> None:
        """Raises InputError where another process has the file open for writing, OSError
        where it cannot be opened."""
        self.path = path
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        self._close = weakref.finalize(self, os.close, self._handle)
        try:
            if not lock(self._handle):
                raise InputError(f"{path}: found another process that writes to it, expected none")
            self.size = os.fstat(self._handle).st_size
            sync_folder(path.parent)
        except BaseException:
            self.close()
            raise

    def recover(self, read: Callable[[bytes, str], None]) -> None:
        """Hands every whole line, its end included, to `read`, and cuts off a torn one.

        `read` is also given "path:line", and refuses a line by raising InputError; then
        the file stays as it is.
        """
        size = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    os.ftruncate(self._handle, size)  # one call: the cut is whole or not made
                    os.fsync(self._handle)
                    break
                read(line, f"{self.path}:{number}")
                size += len(line)
        self.size = size

    def append(self, lines: bytes) -> None:
        """Adds whole lines; when this returns they are on the disk.

        Raises OSError where the disk does not take them; then none of them is in the file.
        """
        try:
            rest = memoryview(lines)
            while rest:
                rest = rest[os.write(self._handle, rest) :]
            os.fsync(self._handle)
        except OSError:
            os.ftruncate(self._handle, self.size)
            raise
        self.size += len(lines)

    def close(self) -> None:
        """Closes the file and lets others write to it."""
        self._close()
