"""A run at a glance: report.png, and report.html that shows it with the figures as text."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from peagle_jax.files import replace_file
from peagle_jax.training.metrics_log import read_metrics

_SMOOTHED = 200  # curves are means over about this many points


def write_report(folder: Path, title: str) -> list[Path]:
    """Writes RUN/report.png and RUN/report.html from RUN/metrics.jsonl; gives their paths.

    Raises ImportError where matplotlib is not installed.
    """
    steps = read_metrics(folder, "step")
    evaluations = read_metrics(folder, "evaluation")
    image = _figure(steps, evaluations, title)
    replace_file(folder / "report.png", image)
    page = _page(image, steps, evaluations, title)
    replace_file(folder / "report.html", page.encode("utf-8"))
    return [folder / "report.png", folder / "report.html"]


def smoothed(values: Sequence[float], points: int = _SMOOTHED) -> tuple[np.ndarray, np.ndarray]:
    """(centres, means) of runs of neighbours: at most about `points` of them, so that a curve
    of thousands of noisy steps can be read. Centres are indices into `values`."""
    series = np.asarray(values, np.float64)
    size = max(1, -(-len(series) // points))
    edges = np.arange(0, len(series), size)
    counts = np.diff(np.append(edges, len(series)))
    if not len(series):
        return np.zeros(0), np.zeros(0)
    return edges + (counts - 1) / 2, np.add.reduceat(series, edges) / counts


def _figure(steps: list[dict[str, Any]], evaluations: list[dict[str, Any]], title: str) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    (loss, accuracy), (acceptance, speed) = figure.subplots(2, 2)

    def curve(axes: Any, values: list[float], label: str | None = None) -> None:
        centres, means = smoothed(values)
        at = np.interp(centres, np.arange(len(steps)), [line["step"] for line in steps])
        axes.plot(at, means, label=label)

    if steps:
        curve(loss, [line["loss"] for line in steps])
        for depth in range(len(steps[0]["accuracy_per_depth"])):
            curve(accuracy, [line["accuracy_per_depth"][depth] for line in steps], str(depth))
        accuracy.legend(title="depth")
        curve(speed, [line["tokens_per_second"] for line in steps])
    if evaluations:
        acceptance.plot(
            [line["step"] for line in evaluations],
            [line["acceptance_length"] for line in evaluations],
            marker="o",
        )
    for axes, name in (
        (loss, "loss"),
        (accuracy, "accuracy"),
        (acceptance, "decoded acceptance length"),
        (speed, "tokens/s"),
    ):
        axes.set_title(name)
        axes.set_xlabel("step")
        axes.grid(visible=True, alpha=0.3)
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=110)
    return out.getvalue()


def _page(
    image: bytes, steps: list[dict[str, Any]], evaluations: list[dict[str, Any]], title: str
) -> str:
    heads = "<tr><th>step</th><th>acceptance length</th><th>accepted by position</th></tr>"
    rows = "".join(
        f"<tr><td>{line['step']}</td><td>{line['acceptance_length']:.3f}</td>"
        f"<td>{' '.join(f'{rate:.2f}' for rate in line['per_position'])}</td></tr>"
        for line in evaluations
    )
    last = ""
    if steps:
        line = steps[-1]
        rates = " ".join(f"{rate:.2f}" for rate in line["accuracy_per_depth"])
        last = (
            f"<p>Step {line['step']}: loss {line['loss']:.4f}, accuracy by depth {rates}, "
            f"{line['tokens_per_second']:.0f} tokens/s.</p>"
        )
    encoded = base64.b64encode(image).decode()
    name = html.escape(title)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{name}</title>'
        "<style>body{font:15px sans-serif;margin:2em;max-width:75em}img{max-width:100%}"
        "td,th{padding:.2em .8em;text-align:right}</style>"
        f"<h1>{name}</h1>{last}"
        f'<img alt="loss, accuracy, acceptance length and speed" '
        f'src="data:image/png;base64,{encoded}">'
        f"<table>{heads}{rows}</table></html>\n"
    )
