"""What a scheduler asks of an engine: the device side of continuous batching.

The device runs calls in the order in which they are made. So a page or slot that is given
from one sequence to another between two calls is safe, although calls before are still running:
whatever they write there is written before the new owner writes, and a new owner reads only
what it has written.

Calls return at once and take effect later; only `fetch` waits. Arrays that are handed over are
never changed afterwards.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Int

from peagle_jax.config import SamplingParams
from peagle_jax.prospects import Experience


@dataclasses.dataclass(frozen=True)
class EngineShape:
    """Fixed sizes of an engine.

    num_slots: sequences that decode at a time, over all groups.
    num_pages: pages of one group, the null page (page 0) among them.
    page_size: positions a page.
    context: most tokens that prompt and answer have together.
    num_draft_tokens: K, the most drafts that a step may make.
    pending_rows: most tokens that are confirmed between two drafts; None = K+1, as where every
      step drafts.
    num_groups: data-parallel parts, each with its own pages and an equal, consecutive share
      of the slots. Page numbers count within a group.
    """

    num_slots: int
    num_pages: int
    page_size: int
    context: int
    num_draft_tokens: int
    num_groups: int = 1
    pending_rows: int | None = None

    def __post_init__(self) -> None:
        if self.num_slots % self.num_groups:
            raise ValueError(f"{self.num_slots} slots in {self.num_groups} equal groups")

    @property
    def slots_a_group(self) -> int:
        """Slots of one group."""
        return self.num_slots // self.num_groups

    @property
    def scratch_rows(self) -> int:
        """Positions past the newest token that a step may write and read within itself.

        A verification writes K+1 positions from the newest token's own on, a draft of P pending
        rows up to P + K - 1 from the one before it.
        """
        k = self.num_draft_tokens
        return (k + 1 if self.pending_rows is None else self.pending_rows) + k - 1

    @property
    def pages_a_slot(self) -> int:
        """Width of a block table: no position that a step writes lies past it.

        A sequence that its last step took up to K tokens past the context stands still there,
        and steps still write its rows: onto the null page, as its pages end before.
        """
        return -(-(self.context + self.num_draft_tokens + self.scratch_rows + 1) // self.page_size)


@dataclasses.dataclass(frozen=True, eq=False)
class PrefillChunk:
    """Part of a prompt, for the caches of both networks.

    tokens: int32, at positions `start`, `start + 1`, ..; `start` is a multiple of the page size.
    following: the token after the last of them, None where the prompt ends here; the
      drafter pairs each position with the token after it.
    pages: the slot's row of the block tables, int32.
    drafts: the sequence will draft; else only the target sees it.
    """

    slot: int
    start: int
    tokens: Int[np.ndarray, "rows"]
    following: int | None
    pages: Int[np.ndarray, "pages"]
    drafts: bool = True


@dataclasses.dataclass(frozen=True)
class Insertion:
    """A sequence whose whole prompt is in its pages: it decodes from the next step on.

    length: tokens of the prompt, at positions 0 .. length - 1. After a preemption these are
      the prompt and the tokens of the answer so far.
    max_new_tokens: how many more may come, the one drawn at insertion included; the context
      has room for them.
    seed: of its noise, which is keyed by (seed, position) and so is the same after a
      preemption.
    pages, drafts: as in PrefillChunk.
    anew: what was found of drafts in this slot is forgotten.
    """

    slot: int
    length: int
    max_new_tokens: int
    params: SamplingParams
    seed: int
    pages: Int[np.ndarray, "pages"]
    drafts: bool = True
    anew: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class StepResults:
    """What one call of `step` made of every slot, int32 and bool.

    tokens: confirmed tokens; the first `counts[slot]` of a row count. They begin with the
      token drawn at insertion where the slot was inserted since the last call.
    finished: the sequence has ended: by an end-of-sequence token (`hit_eos`; it is among the
      tokens) or at its max_new_tokens.
    num_drafts, num_draft_tokens, accepted: of these steps alone: verifications with drafts,
      their drafts, and how many verifications accepted the draft at each position.
    gave_up: the sequence drafts no more.
    """

    tokens: Int[np.ndarray, "slots tokens"]
    counts: Int[np.ndarray, "slots"]
    finished: Bool[np.ndarray, "slots"]
    hit_eos: Bool[np.ndarray, "slots"]
    num_drafts: Int[np.ndarray, "slots"]
    num_draft_tokens: Int[np.ndarray, "slots"]
    accepted: Int[np.ndarray, "slots drafts"]
    gave_up: Bool[np.ndarray, "slots"]


@runtime_checkable
class Engine(Experience, Protocol):
    """Slots over a paged cache. Slots are 0 .. num_slots - 1."""

    @property
    def shape(self) -> EngineShape:
        """Fixed sizes."""

    def prefill(self, chunks: Sequence[PrefillChunk]) -> None:
        """Computes parts of prompts, of different slots."""

    def insert(self, insertions: Sequence[Insertion]) -> None:
        """Draws the first token of prefilled sequences and lets them decode."""

    def step(
        self, num_steps: int, tables: Int[np.ndarray, "slots pages"], *, drafts: bool = True
    ) -> Any:
        """Speculative steps of all sequences that decode; what `fetch` takes.

        Every sequence that has not ended is confirmed 1 to K+1 tokens a step. `tables` has the
        pages of slots that decode, and the null page for all others. A sequence that ended
        is left as it is until its slot is freed. drafts: False where no sequence drafts any
        more: steps of plain decoding.
        """

    def fetch(self, pending: Any) -> StepResults:
        """Waits for what a step has made. Called once a step, in their order."""

    def free(self, slots: Sequence[int]) -> None:
        """These slots no longer have a sequence; one that still decodes is dropped."""
