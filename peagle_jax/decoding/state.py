"""What a speculative step takes and returns."""

from __future__ import annotations

from typing import Any

from flax import struct
from jaxtyping import Array, Bool, Float, Int

from peagle_jax.models.paged_cache import Cache

Params = dict[str, Any]  # {"target": ..., "drafter": ...}; "drafter" absent where none drafts


@struct.dataclass
class DecodeState:
    """Everything a step needs and returns. K = drafts a step, F = raw feature width.

    length: n, tokens in the target's cache = position of `last_token`.
    last_token: x_n, confirmed and not yet seen by the target.
    pending_tokens, pending_features: the drafter's real rows to come; entry i < m
      pairs x_{p+1} with the target's feature of position p = n - m + i.
    pending_count: m, from 1 to as many rows as there are.
    history: the whole text, prompt and confirmed tokens by position, where drafts are looked up
      in it; entries past `length` are scratch. Of width 0 otherwise.
    output: confirmed tokens; entries from `emitted` on are scratch.
    emitted: how many tokens of `output` count.
    finished: rows that are done; a step leaves their counters as they are.
    hit_eos: finished by an end-of-sequence token rather than by length.
    num_drafts: verification steps that had drafts.
    num_draft_tokens: their drafts.
    accepted_per_position: of those steps, how many accepted the draft at each position.
    gave_up: rows whose drafter is not fed any more, see `draft_length`.
    rates, step_costs: what draft lengths are chosen by, see `draft_length`. Of width 0 where
      the length is fixed.
    """

    target_cache: Cache
    draft_cache: Cache | None
    length: Int[Array, "batch"]
    last_token: Int[Array, "batch"]
    pending_tokens: Int[Array, "batch pending"]
    pending_features: Float[Array, "batch pending raw"]
    pending_count: Int[Array, "batch"]
    history: Int[Array, "batch history"]
    output: Int[Array, "batch output"]
    emitted: Int[Array, "batch"]
    finished: Bool[Array, "batch"]
    hit_eos: Bool[Array, "batch"]
    num_drafts: Int[Array, "batch"]
    num_draft_tokens: Int[Array, "batch"]
    accepted_per_position: Int[Array, "batch drafts"]
    gave_up: Bool[Array, "batch"]
    rates: Float[Array, "batch rates"]
    step_costs: Float[Array, "lengths"]
