"""A progress bar on stderr, where someone is there to see it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Protocol


class Report(Protocol):
    """Shows how far it is; `total` None where it is not known, `detail` goes beside it."""

    def __call__(self, done: int, total: int | None, detail: str = "") -> None: ...


@contextlib.contextmanager
def progress_bar(label: str, *, in_bytes: bool = False) -> Iterator[Report | None]:
    """Gives a function to call as progress goes, or None where stderr is no terminal.

    `in_bytes`: what is counted are bytes, and their rate is shown too.
    """
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    counts = (DownloadColumn(), TransferSpeedColumn()) if in_bytes else (MofNCompleteColumn(),)
    detail = TextColumn("{task.fields[detail]}")
    columns = (label, BarColumn(), *counts, detail, TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=None, detail="")

        def report(done: int, total: int | None, detail: str = "") -> None:
            bar.update(task, completed=done, total=total, detail=detail)

        yield report
