"""Results of a batch, each on the disk before it counts as done.

Lines are added in groups, each written and synced as one. A process that is killed at any
moment leaves whole lines and perhaps a torn one, which the next process cuts off; what is in the
file need not be computed again. Beside the file stands `<file>.run.json` with the settings
that results depend on: a run with other settings is refused.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from peagle_jax.convert.base_reader import one_line, read_json
from peagle_jax.durable_lines import DurableLines
from peagle_jax.errors import InputError
from peagle_jax.files import replace_file
from peagle_jax.json_values import differences
from peagle_jax.serving.id_set import IdSet
from peagle_jax.serving.result_lines import read_key

FORMAT = 1


class ResultsFile:
    """Adds results to a file; a context manager. One process at a time.

    Attributes:
        path: the file.
        done: keys of the results that are on the disk, those of earlier processes included.
    """

    def __init__(
        self,
        path: Path,
        settings: dict[str, Any],
        *,
        group_size: int = 64,
        group_seconds: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Makes the file or goes on with one that is there.

        settings: names to JSON values. A group is written once it has `group_size` results,
        or when one is added `group_seconds` after its first.

        Raises InputError where the file cannot be written, is another run's, is no file of
        results, or is being written to by another process.
        """
        self.path = path
        self.done = IdSet()
        self._group: list[tuple[str, bytes]] = []
        self._group_size, self._group_seconds = group_size, group_seconds
        self._clock, self._begun = clock, 0.0
        try:
            self._lines = DurableLines(path)
        except OSError as error:
            raise InputError(
                f"{path}: found {one_line(error)}, expected a file that can be written"
            ) from None
        try:
            self._hold_settings(settings)
            self._lines.recover(self._read)
        except BaseException:
            self._lines.close()
            raise

    def add(self, key: str, line: bytes) -> None:
        """Takes a result in; it is done with the end of its group.

        Raises OSError where the disk does not take the group; it is kept then, and `commit`
        may be tried again.
        """
        if not self._group:
            self._begun = self._clock()
        self._group.append((key, line))
        if (
            len(self._group) >= self._group_size
            or self._clock() - self._begun >= self._group_seconds
        ):
            self.commit()

    def commit(self) -> None:
        """Puts every result that was added on the disk. Raises OSError as `add` does."""
        if not self._group:
            return
        self._lines.append(b"".join(line for _, line in self._group))
        for key, _ in self._group:
            self.done.add(key)
        self._group.clear()

    def close(self) -> None:
        """Lets go of the file. What was not committed is not in it."""
        self._lines.close()

    def __enter__(self) -> ResultsFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if not isinstance(error, OSError):  # the disk may be full: it has its say already
                self.commit()
        finally:
            self.close()

    def _read(self, line: bytes, where: str) -> None:
        if not self.done.add(read_key(line, where)):
            raise InputError(f"{where}: found the result of {read_key(line, where)!r} again")

    def _hold_settings(self, settings: dict[str, Any]) -> None:
        """Writes the settings, or compares those of a run that has results."""
        path = settings_path(self.path)
        # Through JSON, so that both sides have lists where one was given tuples.
        expected = json.loads(json.dumps({"format": FORMAT, **settings}))
        if path.exists() and self._lines.size:
            for key, found, wanted in differences(read_json(path), expected):
                raise InputError(
                    f"{path}: {key}: found {found}, expected {wanted}; the results of another run "
                    "need another output file"
                )
        elif self._lines.size:
            raise InputError(
                f"{self.path}: found lines, but no {path.name} that says which run they are of; "
                "expected a new file"
            )
        else:
            try:
                replace_file(path, f"{json.dumps(expected, indent=2)}\n".encode())
            except OSError as error:
                raise InputError(f"{path}: found {one_line(error)}, expected to write it") from None


def settings_path(output: Path) -> Path:
    """Where the settings of an output file's run are."""
    return output.with_name(f"{output.name}.run.json")
