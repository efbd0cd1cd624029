"""What `peagle bench` shows and writes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from peagle_jax.bench import report, session
from peagle_jax.commands.tables import print_whole
from peagle_jax.files import replace_file


def print_table(lines: Sequence[dict[str, Any]]) -> None:
    """The results on stdout, below them why what failed did."""
    table = Table()
    for index, name in enumerate(report.COLUMNS):
        table.add_column(name, justify="right" if index > 1 else "left", no_wrap=True)
    failures = []
    for line in lines:
        cells = [cell.replace("**", "") for cell in report.cells(line)]
        if "error" in line:
            where = " ".join(part for part in (*cells[:2], cells[2] and f"K = {cells[2]}") if part)
            failures.append(f"{where}, batch {cells[3]}: {cells[4]}")
            cells[4] = "failed"
        table.add_row(*cells)
    print_whole(table)
    for failure in failures:
        print(failure)


def write_files(
    folder: Path, lines: Sequence[dict[str, Any]], settings: dict[str, Any], *, plots: bool
) -> None:
    """results.jsonl, settings.json, results.md and the pictures."""
    replace_file(folder / "results.jsonl", session.to_jsonl(lines))
    replace_file(folder / "settings.json", (json.dumps(settings, indent=2) + "\n").encode())
    replace_file(folder / "results.md", report.markdown(lines, settings).encode())
    if plots:
        from peagle_jax.commands import bench_plot

        for name, picture in bench_plot.draw_all(lines).items():
            replace_file(folder / f"{name}.png", picture)
