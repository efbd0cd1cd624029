"""Tables on stdout that lose no column where it is narrow, or no terminal at all."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table


def print_whole(*parts: str | Table) -> None:
    """Prints parts one below the other; a table wider than the terminal, or a file, wraps there
    instead of losing columns."""
    console = Console()
    whole = console.options.update(width=10_000)
    console.width = max(
        console.width, *(console.measure(part, options=whole).maximum for part in parts)
    )
    console.print(*parts, sep="\n", highlight=False, markup=False)
