"""Tables in Markdown, a line a row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def cell(value: Any) -> str:
    """A value as it can stand in a cell."""
    return str(value).replace("|", "\\|").replace("\n", " ")


def row(cells: Sequence[str]) -> str:
    """A row of cells that are text already."""
    return f"| {' | '.join(cells)} |"
