#!/usr/bin/env python3
"""Writes docs/benchmarks.md from the results in docs/benchmarks/.

    .venv/bin/python scripts/render_benchmarks.py

Every folder there is one run of `peagle bench` (its results.jsonl and settings.json, as they were
written) with a note.md: a heading and what the run is meant to show.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from peagle_jax.bench import report
from peagle_jax.files import replace_file

DOCS = Path(__file__).resolve().parent.parent / "docs"
HEAD = """# Benchmarks

Written by `scripts/render_benchmarks.py` from the results in [benchmarks/](benchmarks/). Machines
differ and are shared: compare rows of one table, never figures of two.
"""


def page(folder: Path) -> str:
    """The whole document."""
    parts = [HEAD]
    for run in sorted(path.parent for path in folder.glob("*/results.jsonl")):
        lines = [json.loads(line) for line in (run / "results.jsonl").read_text().splitlines()]
        settings = json.loads((run / "settings.json").read_text())
        parts += [
            (run / "note.md").read_text().strip(),
            f"```\n{settings['command']}\n```",
            sentence(settings),
            "\n".join(report.table(lines)),
        ]
    return "\n\n".join([*(part.strip() for part in parts), report.NOTE]) + "\n"


def sentence(settings: dict[str, Any]) -> str:
    """What was run where."""
    versions = ", ".join(f"{name} {one}" for name, one in settings["versions"].items())
    return (
        f"{settings['model']} in {settings['dtype']}, {settings['prompts']} prompts, "
        f"{settings['max_new_tokens']} tokens each, {settings['repeats']} repeats; "
        f"{settings['device']}, {settings['threads']} threads, {settings['system']}; {versions}."
    )


def main() -> int:
    """Writes the page; with --check only says whether it is what would be written."""
    path, text = DOCS / "benchmarks.md", page(DOCS / "benchmarks")
    if sys.argv[1:] == ["--check"]:
        return int(path.read_text() != text)
    replace_file(path, text.encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
