"""What `peagle eval` shows and writes: tables, one line a K, JSON, Markdown."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from rich.table import Table

import peagle_jax
from peagle_jax.bench.report import device_name
from peagle_jax.commands.prompts import Record
from peagle_jax.commands.tables import print_whole
from peagle_jax.files import replace_file
from peagle_jax.markdown import cell, row
from peagle_jax.metrics import GenerationStats
from peagle_jax.runner import Output
from peagle_jax.training.evaluate import Acceptance, AcceptanceReport, first_difference

ALL = "all prompts"
NOTE = (
    "Acceptance length: tokens that a verification yields on average, 1 + accepted drafts / "
    "drafts, pooled over prompts, ± its standard error over prompts. pos j: share of drafts "
    "whose token at position j was accepted."
)


@dataclasses.dataclass(frozen=True)
class Plain:
    """The same prompts answered without drafts, and the total of it."""

    outputs: Sequence[Output]
    total: GenerationStats


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """What was measured: how (`settings`), on what, a report for each K, and the answers
    without drafts if they were asked for."""

    settings: Mapping[str, Any]
    records: Sequence[Record]
    reports: Mapping[int, AcceptanceReport]
    plain: Plain | None

    def differences(self, depth: int) -> list[int | None] | None:
        """For each prompt the first token that differs from plain decoding, None = none does."""
        if self.plain is None:
            return None
        return [
            first_difference(plain.token_ids, drafted.token_ids)
            for plain, drafted in zip(self.plain.outputs, self.reports[depth].outputs, strict=True)
        ]

    def to_json(self) -> dict[str, Any]:
        """One object in plain Python values."""
        plain = None
        if self.plain is not None:
            total = self.plain.total
            plain = {
                "tokens": total.tokens,
                "seconds": total.seconds,
                "tokens_per_second": total.tokens_per_second,
                "compile_seconds": total.compile_seconds,
            }
        return {
            "settings": dict(self.settings),
            "results": [self._result(depth) for depth in self.reports],
            "plain": plain,
        }

    def _result(self, depth: int) -> dict[str, Any]:
        report, differences = self.reports[depth], self.differences(depth)
        by_prompt = [
            {
                "id": record.id,
                "category": record.category,
                "tokens": output.stats.tokens,
                "drafts": output.stats.num_drafts,
                "accepted_per_position": list(output.stats.accepted_per_position),
            }
            for record, output in zip(self.records, report.outputs, strict=True)
        ]
        result = {"num_draft_tokens": depth, **report.to_json()}
        if differences is not None:
            result["identical"] = differences.count(None)
            for entry, difference in zip(by_prompt, differences, strict=True):
                entry["first_difference"] = difference
        return {**result, "by_prompt": by_prompt}

    def summary(self) -> list[str]:
        """A readable line for each K."""
        lines = []
        for depth, report in self.reports.items():
            rates = " ".join(map(_rate, report.per_position))
            line = (
                f"K = {depth}, {report.prompts} prompts: acceptance length {length(report)} "
                f"({report.drafts} drafts; accepted by position {rates}), "
                f"{report.tokens_per_second:.1f} tokens/s"
            )
            differences = self.differences(depth)
            if self.plain is not None and differences is not None:
                line += (
                    f" against {self.plain.total.tokens_per_second:.1f} without drafts, "
                    f"{differences.count(None)} of {report.prompts} answers token-identical"
                )
            lines.append(line)
        return lines


def environment() -> dict[str, str]:
    """Where a figure comes from: versions and device."""
    return {
        "peagle_jax": peagle_jax.__version__,
        "jax": jax.__version__,
        "device": device_name(),
    }


def groups(report: AcceptanceReport) -> Iterator[tuple[str, Acceptance]]:
    """The categories, if there are any, then all prompts."""
    yield from report.by_category.items()
    yield ALL, report


def length(acceptance: Acceptance) -> str:
    """The acceptance length and its standard error."""
    error = acceptance.standard_error
    spread = "" if error is None else f" ± {error:.3f}"
    return f"{acceptance.acceptance_length:.3f}{spread}"


def table_rows(report: AcceptanceReport) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the table for one K."""
    depth = len(report.per_position)
    header = ["category", "prompts", "tokens", "acceptance length"]
    header += [f"pos {position}" for position in range(1, depth + 1)]
    rows = [
        [name, str(part.prompts), str(part.tokens), length(part), *map(_rate, part.per_position)]
        for name, part in groups(report)
    ]
    return header, rows


def print_tables(evaluation: Evaluation) -> None:
    """A table for each K on stdout."""
    for depth, report in evaluation.reports.items():
        header, rows = table_rows(report)
        table = Table()
        for column, name in enumerate(header):
            table.add_column(name, justify="right" if column else "left", no_wrap=True)
        for values in rows[:-1]:
            table.add_row(*values)
        table.add_section()
        table.add_row(*rows[-1], style="bold")
        print_whole(f"K = {depth}", table)


def markdown(evaluation: Evaluation) -> str:
    """The page results.md."""
    lines = ["# Acceptance", ""]
    lines += ["| setting | value |", "| --- | --- |"]
    lines += [
        f"| {name} | {cell(value)} |"
        for name, value in evaluation.settings.items()
        if value is not None
    ]
    for (depth, report), summary in zip(
        evaluation.reports.items(), evaluation.summary(), strict=True
    ):
        header, rows = table_rows(report)
        lines += ["", f"## K = {depth}", "", f"{summary}.", ""]
        lines += [row(header), row(["---"] + ["---:"] * (len(header) - 1))]
        lines += [row([cell(value) for value in values]) for values in rows]
    lines += ["", NOTE, ""]
    return "\n".join(lines)


def write_files(evaluation: Evaluation, folder: Path) -> None:
    """results.json and results.md."""
    text = json.dumps(evaluation.to_json(), ensure_ascii=False, indent=2) + "\n"
    replace_file(folder / "results.json", text.encode())
    replace_file(folder / "results.md", markdown(evaluation).encode())


def _rate(share: float) -> str:
    return f"{share:.3f}"
