"""Output folders: there when they are whole, and, for long work, gone on with after a stop."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from peagle_jax.durable_lines import DurableLines
from peagle_jax.errors import InputError
from peagle_jax.files import Closing, lock

_JOURNAL, _LOCK = "journal.jsonl", "lock"
_SLACK = 16 << 20  # bytes for metadata, and a hundredth of the data for the file system


class NotEnoughSpace(InputError):
    """The disk is too full to begin; what an earlier run has done is kept."""


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """A folder to fill beside `folder`, which it becomes when all went well."""
    partial = _beside(folder, "partial")
    with _as_input_error(folder):
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            yield partial
            _publish(partial, folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


class Journal(Closing):
    """What a resumable piece of work has done, one line a step, in the folder it fills.

    Attributes:
        folder: to be filled.
        done: what was finished, by an earlier run too, and what came of it.
    """

    def __init__(self, folder: Path, plan: Any):
        self.folder = folder
        self.done: dict[str, Any] = {}
        path = folder / _JOURNAL
        head = {"plan": hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()}
        if not _begins_with(path, _line(head)):
            _clear(folder)
        self._lines = DurableLines(path)
        self._lines.recover(lambda line, where: self.done.update(json.loads(line)))
        self.done.pop("plan", None)
        if not self._lines.size:
            self._lines.append(_line(head))

    def add(self, step: str, result: Any = True) -> None:
        """Notes that `step` is finished, safely so when this returns."""
        self.done[step] = result
        self._lines.append(_line({step: result}))

    def close(self) -> None:
        """Closes the file."""
        self._lines.close()


@contextmanager
def resumable_folder(folder: Path, plan: Any) -> Iterator[Journal]:
    """A journal and its folder beside `folder`, which it becomes when all went well.

    Where the work is stopped (killed, interrupted, the disk full), the folder stays under its
    hidden name, and the next call with the same plan finds there what is done; with another
    plan it begins anew. Bad input leaves nothing. Raises InputError where another process is
    at work on the same folder.
    """
    partial = _beside(folder, "partial")
    with _as_input_error(folder):
        partial.mkdir(parents=True, exist_ok=True)
        with _locked(partial / _LOCK, folder):
            try:
                with Journal(partial, plan) as journal:
                    yield journal
            except NotEnoughSpace:
                if not journal.done:
                    shutil.rmtree(partial, ignore_errors=True)
                raise
            except InputError:
                shutil.rmtree(partial, ignore_errors=True)
                raise
            (partial / _JOURNAL).unlink()
            (partial / _LOCK).unlink()
            _publish(partial, folder)


def check_space(folder: Path, num_bytes: int) -> None:
    """Raises NotEnoughSpace unless `num_bytes` more fit on the disk of `folder`."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    free, needed = shutil.disk_usage(there).free, num_bytes + num_bytes // 100 + _SLACK
    if free < needed:
        raise NotEnoughSpace(
            f"{folder}: found {free / 1e9:,.2f} GB free on the disk, "
            f"expected {needed / 1e9:,.2f} GB for what is to be written"
        )


def _beside(folder: Path, what: str) -> Path:
    return folder.with_name(f".{folder.name}.{what}")


def _publish(partial: Path, folder: Path) -> None:
    replaced = _beside(folder, "replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if folder.exists():
        folder.rename(replaced)
    partial.rename(folder)
    shutil.rmtree(replaced, ignore_errors=True)


def _clear(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != _LOCK:
            path.unlink()


def _line(value: dict[str, Any]) -> bytes:
    return f"{json.dumps(value)}\n".encode()


def _begins_with(path: Path, line: bytes) -> bool:
    if not path.exists():
        return False
    with path.open("rb") as file:
        return file.readline() == line


@contextmanager
def _as_input_error(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(
            f"{folder}: found {error.strerror or error}, expected a folder that can be written"
        ) from None


@contextmanager
def _locked(path: Path, folder: Path) -> Iterator[None]:
    with path.open("w") as file:
        if not lock(file.fileno()):
            raise InputError(f"{folder}: found another conversion at work, expected none")
        yield
