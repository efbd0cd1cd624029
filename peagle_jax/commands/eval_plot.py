"""The picture of `peagle eval`: acceptance by position and acceptance length, by category."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from peagle_jax.commands.eval_output import groups
from peagle_jax.training.evaluate import Acceptance, AcceptanceReport

# More bars than this in a row are too thin to tell apart.
MAX_POSITIONS = 8
BAND = 0.8  # of a row's height is bars


def draw(reports: Mapping[int, AcceptanceReport]) -> bytes:
    """A PNG: a row of bars for each category and for all prompts.

    Left, the share of drafts accepted at each position, for the largest K; right, the
    acceptance length for every K with its standard error.
    """
    largest = max(reports)
    names = [name for name, _ in groups(reports[largest])]
    parts = [part for _, part in groups(reports[largest])]
    positions = min(largest, MAX_POSITIONS)
    bars = max(positions, len(reports))
    height = 1.9 + len(names) * max(0.42, 0.1 * bars)
    figure = Figure(figsize=(11, height), dpi=130, layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(1.15, 1))

    shown = "" if positions == largest else f", the first {positions}"
    left.set_xlabel("share of drafts whose token at this position was accepted")
    colors = _shades("viridis", positions, 0.0, 0.85)
    for position in range(positions):
        shares = [part.per_position[position] for part in parts]
        _bars(left, shares, position, positions, colors[position], str(position + 1))
    left.set_xlim(0, min(1.0, max(0.1, *(part.per_position[0] for part in parts)) * 1.08))
    _head(left, f"Drafts accepted by position (K = {largest}{shown})", positions, MAX_POSITIONS)

    right.set_xlabel("tokens per verification; lines: ± standard error over prompts")
    colors = _shades("Blues_r", len(reports), 0.3, 0.8)
    for series, (depth, report) in enumerate(reports.items()):
        lengths = [part for _, part in groups(report)]
        _lengths(right, lengths, series, len(reports), colors[series], f"K = {depth}")
    right.margins(x=0.12)
    _head(right, "Acceptance length", len(reports), 6)

    left.set_yticks(
        range(len(names)),
        [f"{name} ({part.prompts})" for name, part in zip(names, parts, strict=True)],
    )
    left.get_yticklabels()[-1].set_fontweight("bold")
    left.set_ylim(len(names) - 0.5, -0.5)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="x", alpha=0.3)
        axes.set_axisbelow(True)
        axes.tick_params(axis="y", length=0)
        if len(names) > 1:
            axes.axhline(len(names) - 1.5, color="0.4", linewidth=0.8)
    content = io.BytesIO()
    figure.savefig(content, format="png")
    return content.getvalue()


def _lengths(
    axes: Axes, parts: Sequence[Acceptance], series: int, count: int, color: Any, label: str
) -> None:
    """Bars from 1, the length without drafts, with standard errors and the figures."""
    gains = [part.acceptance_length - 1.0 for part in parts]
    errors = [part.standard_error or 0.0 for part in parts]
    rows = _bars(axes, gains, series, count, color, label, left=1.0)
    axes.errorbar(
        [1.0 + gain for gain in gains], rows, xerr=errors, fmt="none", ecolor="black", elinewidth=1
    )
    for row, gain, error in zip(rows, gains, errors, strict=True):
        axes.annotate(
            f"{1.0 + gain:.2f}",
            (1.0 + gain + error, row),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8 if count < 4 else 7,
        )


def _bars(
    axes: Axes,
    values: Sequence[float],
    series: int,
    count: int,
    color: Any,
    label: str,
    left: float = 0.0,
) -> list[float]:
    """Bars of one of `count` series, one in each row; returns where they are."""
    rows = [row - BAND / 2 + BAND * (series + 0.5) / count for row in range(len(values))]
    axes.barh(rows, values, height=BAND / count, left=left, color=color, label=label)
    return rows


def _head(axes: Axes, text: str, count: int, columns: int) -> None:
    """The title, and under it the names of `count` series, where they hide no bar."""
    axes.set_title(text, loc="left", pad=10 + 16 * -(-count // columns))
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(-0.01, 0.995),
        ncols=columns,
        fontsize=9,
        frameon=False,
        handlelength=1,
        handletextpad=0.4,
        columnspacing=1.1,
        borderaxespad=0.2,
    )


def _shades(name: str, count: int, start: float, end: float) -> list[Any]:
    """`count` colours in the order of a colour map, between two places of it."""
    step = (end - start) / max(count - 1, 1)
    return [mpl.colormaps[name](start + step * index) for index in range(count)]
