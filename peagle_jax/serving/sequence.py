"""A request on its way through a scheduler: what is known of it, and what is in flight."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Literal

import numpy as np

from peagle_jax.config import SamplingParams
from peagle_jax.serving.engine_protocol import EngineShape, StepResults

FinishReason = Literal["stop", "length", "cancelled"]

# Given the tokens that were just confirmed: None, or how many tokens of the whole answer
# stand where the text has ended among them (at a stop string).
Watch = Callable[[Sequence[int]], int | None]


@dataclasses.dataclass(frozen=True)
class Request:
    """One prompt as token ids. `seed` is drawn by the caller: a preempted request starts
    again with it. `params.seed` and `params.stop` are not looked at (see `Watch`)."""

    key: Hashable
    token_ids: Sequence[int]
    params: SamplingParams
    seed: int


@dataclasses.dataclass
class Times:
    """When things happened to a request, in seconds of the scheduler's clock."""

    submitted: float
    started: float = 0.0
    first_token: float = 0.0
    finished: float = 0.0


@dataclasses.dataclass(frozen=True)
class Finished:
    """A request's end.

    reason: "stop" (end of sequence or its watch), "length" (max_new_tokens or the end of
      the context) or "cancelled".
    num_drafts, num_draft_tokens, accepted_per_position: as in metrics.GenerationStats; what
      was verified past the end counts.
    preemptions: how often it lost its pages and was prefilled again.
    """

    key: Hashable
    prompt_tokens: int
    token_ids: tuple[int, ...]
    reason: FinishReason
    num_drafts: int
    num_draft_tokens: int
    accepted_per_position: tuple[int, ...]
    preemptions: int
    times: Times


class Tracked:
    """What a scheduler keeps of a request.

    Attributes:
        arrival: its place in the order of arrival.
        limit: most tokens of its answer: max_new_tokens, or what the context has room for.
        generated: its confirmed tokens, as far as results were fetched.
        slot: where it is, None while it waits.
        prefilled: prompt positions whose computation was asked for, in this slot.
        drafts, anew: as in engine_protocol.Insertion.
        inserted: it decodes.
        fresh: the next step's results begin with the token drawn at insertion.
        over: it has finished; results still in flight are not its own any more.
        most_ahead, least_ahead: tokens that steps in flight may and must confirm.
    """

    def __init__(
        self, request: Request, arrival: int, shape: EngineShape, watch: Watch | None, now: float
    ) -> None:
        self.request = request
        self.arrival = arrival
        self.shape = shape
        self.watch = watch
        self.limit = min(
            request.params.max_new_tokens, max(0, shape.context - len(request.token_ids))
        )
        self.generated: list[int] = []
        self.slot: int | None = None
        self.prefilled = 0
        self.inserted = self.fresh = self.over = False
        self.drafts, self.anew = True, False
        self.most_ahead = self.least_ahead = 0
        self.preemptions = 0
        self.num_drafts = self.num_draft_tokens = 0
        self.accepted = np.zeros(shape.num_draft_tokens, np.int64)
        self.times = Times(submitted=now)

    @property
    def length(self) -> int:
        """Tokens known: prompt and answer."""
        return len(self.request.token_ids) + len(self.generated)

    @property
    def most_positions(self) -> int:
        """Positions that it ever needs at a time."""
        return len(self.request.token_ids) + self.limit + self.shape.scratch_rows

    def positions_for(self, num_steps: int) -> int:
        """Positions that it needs for so many steps after those in flight."""
        ahead = self.most_ahead + self.gain(num_steps)
        return min(self.length + ahead + self.shape.scratch_rows, self.most_positions)

    def gain(self, num_steps: int) -> int:
        """Most tokens that the next `num_steps` steps may confirm."""
        first = self.fresh or not self.inserted
        return num_steps * (self.shape.num_draft_tokens + 1) + first

    @property
    def surely_over(self) -> bool:
        """Whether steps in flight reach the limit, whatever is accepted."""
        return len(self.generated) + self.least_ahead >= self.limit

    def tokens(self, start: int, stop: int) -> np.ndarray:
        """Tokens at positions start .. stop - 1, int32."""
        prompt = self.request.token_ids
        ids = list(prompt[start:stop])
        ids += self.generated[max(0, start - len(prompt)) : max(0, stop - len(prompt))]
        return np.asarray(ids, np.int32)

    def take(self, results: StepResults, slot: int) -> list[int]:
        """Adds a step's results. Returns the new tokens."""
        count = int(results.counts[slot])
        new: list[int] = results.tokens[slot, :count].tolist()
        if len(self.generated) + count > self.limit:
            raise RuntimeError(f"slot {slot}: {count} tokens past a limit of {self.limit}")
        self.generated += new
        self.num_drafts += int(results.num_drafts[slot])
        self.num_draft_tokens += int(results.num_draft_tokens[slot])
        self.accepted += results.accepted[slot]
        self.drafts &= not results.gave_up[slot]
        return new

    def leave(self) -> None:
        """It is in no slot any more."""
        self.slot = None
        self.prefilled = 0
        self.inserted = self.fresh = False

    def finish(self, reason: FinishReason, now: float) -> Finished:
        """It has ended."""
        self.over = True
        self.times.finished = now
        return Finished(
            key=self.request.key,
            prompt_tokens=len(self.request.token_ids),
            token_ids=tuple(self.generated),
            reason=reason,
            num_drafts=self.num_drafts,
            num_draft_tokens=self.num_draft_tokens,
            accepted_per_position=tuple(self.accepted.tolist()),
            preemptions=self.preemptions,
            times=self.times,
        )
