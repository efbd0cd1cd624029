"""The file of lines that are no requests, beside a batch's output."""

from __future__ import annotations

from pathlib import Path

from peagle_jax.convert.base_reader import one_line
from peagle_jax.errors import InputError
from peagle_jax.serving.requests_file import BadLine
from peagle_jax.serving.result_lines import json_line


class ErrorsFile:
    """Bad lines, written as they are found: a JSON object a line with `file`, `line`, `id` and
    `reason`. The file is there only if there are any.

    A run reads its input from the start, so that an earlier process's file is begun again:
    open it after the results, which only one process can.

    Attributes:
        path: the file.
        count: bad lines so far.
    """

    def __init__(self, path: Path) -> None:
        """Raises InputError where an earlier file cannot be removed."""
        self.path = path
        self.count = 0
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise InputError(f"{path}: found {one_line(error)}, expected to replace it") from None

    def add(self, bad: BadLine) -> None:
        """Adds a line. Raises OSError where the disk does not take it."""
        value = {"file": bad.file, "line": bad.line, "id": bad.id, "reason": bad.reason}
        with self.path.open("ab") as file:
            file.write(json_line(value))
        self.count += 1


def errors_path(output: Path) -> Path:
    """Where the bad lines of an output file's run are: out.errors.jsonl beside out.jsonl."""
    return output.with_name(f"{output.stem}.errors.jsonl")
