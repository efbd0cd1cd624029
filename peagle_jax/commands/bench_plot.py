"""The pictures of `peagle bench`."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from peagle_jax.bench.cases import AUTO

Line = dict[str, Any]
# Parts of a step, bottom to top, and what they are called.
SPLIT = (("draft_ms", "draft"), ("verify_ms", "verify"), ("other_ms", "other"))
COLORS = mpl.color_sequences["tab10"]


def draw_all(lines: Sequence[Line]) -> dict[str, bytes]:
    """PNGs by name; a picture that has nothing to show is left out."""
    good = [line for line in lines if "error" not in line]
    pictures = {
        "speed": _speed(good),
        "acceptance": _acceptance(good),
        "draft_cost": _draft_cost(good),
        "split": _split(good),
    }
    return {name: picture for name, picture in pictures.items() if picture is not None}


def _speed(lines: Sequence[Line]) -> bytes | None:
    """tokens/s and speed-up by K, a column for each batch size."""
    batches = sorted({line["batch"] for line in lines})
    figure = Figure(figsize=(4.6 * len(batches) + 1, 7), dpi=130, layout="constrained")
    grid = figure.subplots(2, len(batches), squeeze=False, sharex=True)
    for column, batch in enumerate(batches):
        here = [line for line in lines if line["batch"] == batch]
        for row, (key, label) in enumerate(
            (("tokens_per_second", "tokens/s"), ("speedup", "speed-up over plain decoding"))
        ):
            axes = grid[row][column]
            for number, (name, series) in enumerate(_series(here)):
                points = [(one["num_draft_tokens"], one.get(key)) for one in series]
                known = [(k, value) for k, value in points if value is not None]
                if not known:
                    continue
                color = COLORS[number % len(COLORS)]
                if known[0][0] in (0, AUTO):
                    axes.axhline(known[0][1], color=color, linestyle="--", label=name)
                else:
                    axes.plot(*zip(*known, strict=True), "o-", color=color, label=name)
            axes.set_ylabel(label)
            axes.set_ylim(bottom=0)
            _tidy(axes)
        grid[0][column].set_title(f"batch {batch}", loc="left")
        grid[1][column].set_xlabel("K, drafts a step")
    grid[0][-1].legend(fontsize=8, frameon=False, loc="lower left")
    return _png(figure)


def _acceptance(lines: Sequence[Line]) -> bytes | None:
    """Share of drafts accepted at each position, for each method's largest K."""
    drafted = [line for line in lines if line.get("acceptance_per_position")]
    if not drafted:
        return None
    figure = Figure(figsize=(6.5, 4), dpi=130, layout="constrained")
    axes = figure.subplots()
    batch = min(line["batch"] for line in drafted)
    for name, series in _series([line for line in drafted if line["batch"] == batch]):
        shares = series[-1]["acceptance_per_position"]
        label = f"{name}, K = {series[-1]['num_draft_tokens']}"
        axes.plot(range(1, len(shares) + 1), shares, "o-", label=label)
    axes.set_xlabel("position of the draft")
    axes.set_ylabel("share of drafts accepted")
    axes.set_ylim(0, 1)
    axes.legend(fontsize=8, frameon=False)
    _tidy(axes)
    return _png(figure)


def _draft_cost(lines: Sequence[Line]) -> bytes | None:
    """Time to draft by K: flat in one pass, rising in K passes."""
    timed = [line for line in lines if line.get("draft_ms")]
    if not timed:
        return None
    figure = Figure(figsize=(6.5, 4), dpi=130, layout="constrained")
    axes = figure.subplots()
    for batch in sorted({line["batch"] for line in timed}):
        for name, series in _series([line for line in timed if line["batch"] == batch]):
            points = [(one["num_draft_tokens"], one["draft_ms"]) for one in series]
            axes.plot(*zip(*points, strict=True), "o-", label=f"{name}, batch {batch}")
    axes.set_xlabel("K, drafts a step")
    axes.set_ylabel("ms to draft")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8, frameon=False)
    _tidy(axes)
    return _png(figure)


def _split(lines: Sequence[Line]) -> bytes | None:
    """A bar a case: draft, verify and what is left of a step."""
    timed = [line for line in lines if line.get("verify_ms") is not None]
    if not timed:
        return None
    figure = Figure(figsize=(8, 1.2 + 0.32 * len(timed)), dpi=130, layout="constrained")
    axes = figure.subplots()
    names = [
        f"{line['method']}"
        + (f" K={line['num_draft_tokens']}" if line["num_draft_tokens"] else "")
        + f", batch {line['batch']}"
        for line in timed
    ]
    left = [0.0] * len(timed)
    for (key, label), color in zip(SPLIT, COLORS, strict=False):
        widths = [max(line[key], 0.0) for line in timed]
        axes.barh(names, widths, left=left, color=color, label=label)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("ms a step")
    axes.legend(fontsize=8, frameon=False)
    _tidy(axes)
    return _png(figure)


def _series(lines: Sequence[Line]) -> Iterator[tuple[str, list[Line]]]:
    """Results of one engine and method by rising K."""
    groups: dict[tuple[str, str], list[Line]] = {}
    for line in lines:
        groups.setdefault((line["peer"], line["method"]), []).append(line)
    for (peer, method), group in groups.items():
        fixed = [line for line in group if line["num_draft_tokens"] != AUTO]
        if fixed:
            yield f"{peer} {method}", sorted(fixed, key=lambda one: one["num_draft_tokens"])
        for line in group:
            if line["num_draft_tokens"] == AUTO:
                yield f"{peer} {method}, K chosen", [line]


def _tidy(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)


def _png(figure: Figure) -> bytes:
    content = io.BytesIO()
    figure.savefig(content, format="png")
    return content.getvalue()
