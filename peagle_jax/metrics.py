"""What speculation gained: acceptance and speed. NumPy only."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np


@dataclasses.dataclass(frozen=True)
class GenerationStats:
    """Counters of one request, or of several added up (`GenerationStats.total`).

    num_drafts: verifications that had drafts. accepted_per_position[j]: of those,
    how many accepted the draft at position j. seconds: wall time of generation,
    prefill included and compilation not; a batch's time counts for each request in
    it, and once in a total. compile_seconds: likewise.
    """

    tokens: int
    num_drafts: int
    num_draft_tokens: int
    accepted_per_position: tuple[int, ...]
    seconds: float
    compile_seconds: float

    @property
    def num_accepted(self) -> int:
        """Drafted tokens that the target confirmed."""
        return sum(self.accepted_per_position)

    @property
    def acceptance_length(self) -> float:
        """Tokens a verification yields on average: 1 + accepted / drafts; 1.0 without drafts."""
        return 1.0 + self.num_accepted / self.num_drafts if self.num_drafts else 1.0

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens over wall time without compilation."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def acceptance_rates(self) -> np.ndarray:
        """Share of drafts accepted at each position, float64 `[K]`."""
        return np.asarray(self.accepted_per_position, np.float64) / max(self.num_drafts, 1)

    @staticmethod
    def total(
        parts: Iterable[GenerationStats], seconds: float, compile_seconds: float
    ) -> GenerationStats:
        """Sum of requests that took `seconds` of wall time together."""
        parts = list(parts)
        width = max((len(p.accepted_per_position) for p in parts), default=0)
        accepted = np.zeros(width, np.int64)
        for part in parts:
            counts = np.asarray(part.accepted_per_position, np.int64)
            accepted[: len(counts)] += counts
        return GenerationStats(
            tokens=sum(p.tokens for p in parts),
            num_drafts=sum(p.num_drafts for p in parts),
            num_draft_tokens=sum(p.num_draft_tokens for p in parts),
            accepted_per_position=tuple(int(a) for a in accepted),
            seconds=seconds,
            compile_seconds=compile_seconds,
        )

    def line(self) -> str:
        """One readable line."""
        text = (
            f"{self.tokens} tokens in {self.seconds:.2f} s, {self.tokens_per_second:.1f} tokens/s"
        )
        if self.num_drafts:
            rates = " ".join(f"{rate:.2f}" for rate in self.acceptance_rates)
            text += (
                f", acceptance length {self.acceptance_length:.2f} "
                f"({self.num_drafts} drafts; accepted by position {rates})"
            )
        return text + f", compiled in {self.compile_seconds:.1f} s"
