"""What `peagle bench` writes besides results.jsonl: a Markdown table, the environment."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

import jax

from peagle_jax.markdown import cell, row

Line = Mapping[str, Any]

COLUMNS = (
    "engine",
    "method",
    "K",
    "batch",
    "tokens/s",
    "spread",
    "speed-up",
    "acceptance length",
    "step ms",
    "draft ms",
    "verify ms",
    "other ms",
    "identical",
)
NOTE = (
    "tokens/s: generated tokens over wall time, prefill included, compilation and loading not; "
    "the median of the repeats, which were interleaved over all rows, and their lowest and "
    "highest. Speed-up: over plain decoding by peagle_jax at the same batch, repeat by repeat, "
    "the median. Step: wall time after prefill over steps; draft and verify: those parts as "
    "programs of their own; other: what is left of the step. Identical: prompts whose answer is "
    "token for token that of plain decoding. A row that is not identical on every prompt "
    "says so in bold and must not be compared."
)


def environment() -> dict[str, Any]:
    """Where figures come from: versions, device, processors."""
    versions = {}
    for name in ("peagle-jax", "jax", "jaxlib", "flax", "numpy"):
        versions[name] = metadata.version(name)
    return {
        "versions": versions,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "device": device_name(),
        "threads": available_threads(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }


def device_name() -> str:
    """Kind and number of the devices."""
    device = jax.devices()[0]
    return f"{device.platform}: {device.device_kind} x {jax.device_count()}"


def available_threads() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cells(line: Line) -> list[str]:
    """A row of the table."""
    head = [line["peer"], line["method"], str(line["num_draft_tokens"] or ""), str(line["batch"])]
    if "error" in line:
        return head + [f"failed: {line['error']}"] + [""] * (len(COLUMNS) - len(head) - 1)
    repeats, prompts = line["tokens_per_second_repeats"], line["prompts"]
    same = line.get("identical")
    identical = "" if same is None else f"{same} of {prompts}"
    return [
        *head,
        f"{line['tokens_per_second']:.1f}",
        f"{min(repeats):.1f} to {max(repeats):.1f}",
        _number(line.get("speedup"), 2, "x"),
        _number(line["acceptance_length"], 2),
        *(_number(line[name], 1) for name in ("step_ms", "draft_ms", "verify_ms", "other_ms")),
        identical if same in (None, prompts) else f"**{identical}**",
    ]


def markdown(lines: Sequence[Line], settings: Mapping[str, Any]) -> str:
    """The page results.md."""
    text = ["# Benchmark", "", "```", settings["command"], "```", ""]
    text += ["| setting | value |", "| --- | --- |"]
    text += [
        f"| {cell(name)} | {cell(_flat(value))} |"
        for name, value in settings.items()
        if name != "command" and value not in (None, "", {}, [])
    ]
    return "\n".join([*text, "", *table(lines), "", NOTE, ""])


def table(lines: Sequence[Line]) -> list[str]:
    """The results as lines of Markdown."""
    rows = [row(COLUMNS), row(["---", "---", *["---:"] * (len(COLUMNS) - 2)])]
    return rows + [row([cell(value) for value in cells(line)]) for line in lines]


def _number(value: float | None, digits: int, unit: str = "") -> str:
    return "" if value is None else f"{value:.{digits}f}{unit}"


def _flat(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {one}" for name, one in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return str(value)
