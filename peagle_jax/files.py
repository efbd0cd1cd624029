"""Files that are whole or not there, locked, and closed at the end of a block."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from types import TracebackType
from typing import TypeVar


def replace_file(path: Path, content: bytes) -> None:
    """Writes `content` to `path`: readers see the old file or the new one, never a part.

    Safe with several writers of one path, and on the disk when the call returns. Raises
    OSError as `open` does; then nothing is left behind.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def lock(handle: int) -> bool:
    """Locks an open file until it is closed; False where another process has it.

    True also where nothing can be locked: on some network file systems, and on Windows.
    """
    try:
        import fcntl
    except ImportError:
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


T = TypeVar("T")


class Closing:
    """A context manager that ends with `close`."""

    def close(self) -> None:
        """Lets go of what is open."""
        raise NotImplementedError

    def __enter__(self: T) -> T:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def sync_folder(folder: Path) -> None:
    """Puts the names in a folder on the disk, as a new file's name is not with the file."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
