"""What a batch run has done: counted as requests end, summed up at the end."""

from __future__ import annotations

import array
import dataclasses
from typing import Any

import numpy as np

from peagle_jax.metrics import GenerationStats
from peagle_jax.serving.scheduler import Counters
from peagle_jax.serving.sequence import Finished

_QUANTILES = (50, 90, 99)


class Tally:
    """Sums over the requests that have ended; 16 bytes a request."""

    def __init__(self, num_draft_tokens: int) -> None:
        self.answered = self.skipped = 0
        self.prompt_tokens = self.tokens = 0
        self._num_drafts = self._num_draft_tokens = 0
        self._accepted = np.zeros(num_draft_tokens, np.int64)
        self._latencies, self._first_tokens = array.array("d"), array.array("d")

    def add(self, end: Finished) -> None:
        """Counts a request."""
        self.answered += 1
        self.prompt_tokens += end.prompt_tokens
        self.tokens += len(end.token_ids)
        self._num_drafts += end.num_drafts
        self._num_draft_tokens += end.num_draft_tokens
        self._accepted += np.asarray(end.accepted_per_position, np.int64)
        self._latencies.append(end.times.finished - end.times.started)
        self._first_tokens.append(end.times.first_token - end.times.started)

    def stats(self, seconds: float, compile_seconds: float) -> GenerationStats:
        """All requests as one, which took so long."""
        return GenerationStats(
            tokens=self.tokens,
            num_drafts=self._num_drafts,
            num_draft_tokens=self._num_draft_tokens,
            accepted_per_position=tuple(self._accepted.tolist()),
            seconds=seconds,
            compile_seconds=compile_seconds,
        )

    def report(
        self, stats: GenerationStats, counters: Counters, bad_lines: int, wait_seconds: float
    ) -> BatchReport:
        """The run's end."""
        return BatchReport(
            answered=self.answered,
            skipped=self.skipped,
            bad_lines=bad_lines,
            prompt_tokens=self.prompt_tokens,
            stats=stats,
            latency=_quantiles(self._latencies),
            first_token=_quantiles(self._first_tokens),
            counters=counters,
            wait_seconds=wait_seconds,
        )


@dataclasses.dataclass(frozen=True)
class Status:
    """How far a run is, of this process alone. Counts of tokens and drafts are those of
    requests that have ended.

    done: lines whose results are on the disk, or that have none.
    waiting, running: requests that were read, without a slot and with one; slots: of these at
      most so many run.
    used_pages, pages: of the cache, the null page in neither.
    Others are as in BatchReport.
    """

    done: int
    answered: int
    skipped: int
    bad_lines: int
    prompt_tokens: int
    stats: GenerationStats
    waiting: int
    running: int
    slots: int
    used_pages: int
    pages: int
    counters: Counters
    wait_seconds: float

    def __str__(self) -> str:
        return (
            f"{self.stats.tokens_per_second:.0f} tokens/s, "
            f"acceptance length {self.stats.acceptance_length:.2f}"
        )


def _quantiles(values: array.array[float]) -> dict[str, float]:
    if not values:
        return {}
    found = np.percentile(np.frombuffer(values), _QUANTILES).tolist()
    return {f"p{quantile}": value for quantile, value in zip(_QUANTILES, found, strict=True)}


@dataclasses.dataclass(frozen=True)
class BatchReport:
    """A run's statistics, of this process alone.

    answered: requests whose results were written; skipped: those that were in the output before.
    prompt_tokens: tokens in. stats: tokens out, acceptance; its seconds are the run's without
      compilation.
    latency, first_token: percentiles in seconds, from a request's slot on: to its end, and
      until its first token was seen. Empty where nothing was answered.
    wait_seconds: how long the host waited for the device; it had work of its own in the rest.
    """

    answered: int
    skipped: int
    bad_lines: int
    prompt_tokens: int
    stats: GenerationStats
    latency: dict[str, float]
    first_token: dict[str, float]
    counters: Counters
    wait_seconds: float

    @property
    def occupancy(self) -> float:
        """Share of slots that decoded, over all steps."""
        busy = self.counters.slot_steps
        return busy / max(1, busy + self.counters.idle_slot_steps)

    @property
    def host_seconds(self) -> float:
        """How long the host did not wait for the device. The device may have worked meanwhile."""
        return max(0.0, self.stats.seconds - self.wait_seconds)

    @property
    def input_tokens_per_second(self) -> float:
        """Prompt tokens over the run's time."""
        return self.prompt_tokens / self.stats.seconds if self.stats.seconds > 0 else 0.0

    def to_json(self) -> dict[str, Any]:
        """Plain values, under the names that docs/batch.md explains."""
        stats = self.stats
        return {
            "answered": self.answered,
            "skipped": self.skipped,
            "bad_lines": self.bad_lines,
            "seconds": stats.seconds,
            "compile_seconds": stats.compile_seconds,
            "prompt_tokens": self.prompt_tokens,
            "tokens": stats.tokens,
            "input_tokens_per_second": self.input_tokens_per_second,
            "tokens_per_second": stats.tokens_per_second,
            "num_drafts": stats.num_drafts,
            "num_draft_tokens": stats.num_draft_tokens,
            "num_accepted": stats.num_accepted,
            "accepted_per_position": list(stats.accepted_per_position),
            "acceptance_length": stats.acceptance_length,
            "latency": self.latency,
            "first_token": self.first_token,
            "occupancy": self.occupancy,
            "wait_seconds": self.wait_seconds,
            "host_seconds": self.host_seconds,
            **dataclasses.asdict(self.counters),
        }

    def lines(self) -> list[str]:
        """A readable summary."""
        stats, counters = self.stats, self.counters
        head = f"{self.answered} answered"
        if self.skipped:
            head += f", {self.skipped} were there before"
        if self.bad_lines:
            head += f", {self.bad_lines} bad lines"
        lines = [
            f"{head}; {stats.seconds:.1f} s, and {stats.compile_seconds:.1f} s of compilation",
            f"tokens in    {self.prompt_tokens} ({self.input_tokens_per_second:.1f}/s)",
            f"tokens out   {stats.tokens} ({stats.tokens_per_second:.1f}/s)",
        ]
        if stats.num_drafts:
            rates = " ".join(f"{rate:.2f}" for rate in stats.acceptance_rates)
            lines.append(
                f"acceptance   length {stats.acceptance_length:.2f}, by position {rates} "
                f"({stats.num_drafts} drafts)"
            )
        for name, values in (("latency", self.latency), ("first token", self.first_token)):
            if values:
                shown = ", ".join(f"{key} {value:.2f} s" for key, value in values.items())
                lines.append(f"{name:<12} {shown}")
        if stats.seconds > 0:
            lines.append(
                f"host         {self.host_seconds:.1f} s busy, waited {self.wait_seconds:.1f} s "
                "for the device"
            )
        if counters.steps:
            lines.append(
                f"slots        {100 * self.occupancy:.0f} % occupied over {counters.steps} steps; "
                f"{counters.preemptions} preemptions, {counters.recomputed_tokens} tokens "
                f"recomputed, at least {counters.least_free_pages} pages free"
            )
        return lines
