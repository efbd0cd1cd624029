"""The picture of `peagle plan`: tokens/s by batch, with drafts and without."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from peagle_jax.plan.batches import Curve
from peagle_jax.plan.estimate import MeshPlan

COLORS = mpl.color_sequences["tab10"]


def draw(curves: Sequence[Curve], chosen: MeshPlan, model: str, assumed: bool) -> bytes:
    """A PNG: tokens/s over the batch, and what drafting gains; dashed where nothing fits.

    curves: of the job and of plain decoding, or of plain decoding alone. chosen: the plan of the
    batch that was asked for. model: its name. assumed: the acceptance length is no measurement.
    """
    job, mesh = chosen.job, chosen.mesh
    drafts = len(curves) > 1
    figure = Figure(figsize=(8, 7.5 if drafts else 5), dpi=130, layout="constrained")
    grid = figure.subplots(
        1 + drafts, 1, squeeze=False, sharex=True, height_ratios=(5, 3)[: 1 + drafts]
    )
    top = grid[0][0]
    figure.suptitle(
        f"{model} on {job.topology.name}, --mesh {mesh}, requests of {job.context} tokens\n"
        "Upper bounds from published rates, no predictions",
        fontsize=11,
    )
    for curve, color in zip(curves, COLORS, strict=False):
        speculator = curve.plans[0].job.speculator
        name = "plain decoding"
        if speculator.drafts:
            name = f"{speculator.method}, K = {speculator.num_draft_tokens}, acceptance length "
            name += f"{job.acceptance_length:g}{', an assumption' if assumed else ''}"
        rates = [plan.tokens_per_second for plan in curve.plans]
        _line(top, curve, rates, color, name)
    top.set_yscale("log")
    top.set_ylabel("tokens/s")
    count = job.topology.num_chips
    right = top.secondary_yaxis("right", functions=(lambda y: y / count, lambda y: y * count))
    right.set_ylabel("tokens a chip-second")
    if drafts:
        bottom = grid[1][0]
        gains = [plan.tokens_per_second / plan.plain_tokens_per_second for plan in curves[0].plans]
        _line(bottom, curves[0], gains, COLORS[0], None)
        bottom.axhline(1.0, color=COLORS[1])
        bottom.set_ylabel("speed-up over plain decoding")
        bottom.set_ylim(bottom=0)
    for axes in grid[:, 0]:
        axes.axvline(job.slots, color="0.4", linestyle=":", label=f"--batch {job.slots}")
        axes.spines["top"].set_visible(False)
        axes.grid(alpha=0.3)
        axes.set_axisbelow(True)
    last = grid[-1][0]
    last.set_xscale("log", base=2)
    last.xaxis.set_major_formatter("{x:.0f}")
    last.set_xlabel("batch, requests at a time; ringed: the largest that fits; dashed: too large")
    top.legend(fontsize=8, frameon=False, loc="upper left")
    content = io.BytesIO()
    figure.savefig(content, format="png")
    return content.getvalue()


def _line(axes: Axes, curve: Curve, values: Sequence[float], color: Any, label: str | None) -> None:
    """One curve, its largest batch that fits ringed and named."""
    sizes = [plan.job.slots for plan in curve.plans]
    fitting = sum(size <= curve.largest for size in sizes)
    axes.plot(sizes[:fitting], values[:fitting], "o-", color=color, markersize=4, label=label)
    beyond = max(fitting - 1, 0)  # dashed from the last that fits
    axes.plot(sizes[beyond:], values[beyond:], "--", color=color, label="" if fitting else label)
    if fitting:
        at = (curve.largest, values[fitting - 1])
        axes.plot(*at, "o", color=color, markersize=11, fillstyle="none")
        axes.annotate(
            str(curve.largest), at, (0, -16), textcoords="offset points", color=color, ha="center"
        )
