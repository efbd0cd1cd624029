"""What an engine computes on the device: prefill, insert, step and free, pure functions.

Over a mesh these are one data group's; programs.py makes programs of them.

Every slot has a row in `SlotState`. A slot that does not decode is a finished row: the step
leaves it as it is and writes its rows wherever its table points, which is the null page.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from peagle_jax.decoding import sampling
from peagle_jax.decoding.draft_length import FIRST_RATE, HOPED_RATE, worth_drafting
from peagle_jax.decoding.generate import run_steps
from peagle_jax.decoding.sampling import RequestArrays
from peagle_jax.decoding.speculate import Speculator
from peagle_jax.decoding.state import DecodeState, Params
from peagle_jax.decoding.verify import Verified
from peagle_jax.models.cache import KVCache
from peagle_jax.models.paged_cache import LayerPages, PagedKVCache, init_pages
from peagle_jax.serving.engine_protocol import StepResults
from peagle_jax.sharding import MODEL


@struct.dataclass
class Pools:
    """The pages of both networks; no drafter, no layers."""

    target: tuple[LayerPages, ...]
    drafter: tuple[LayerPages, ...]


@struct.dataclass
class SlotState:
    """A row for each slot; K = drafts a step. Fields up to `step_costs` are DecodeState's.

    fresh: `last_token` was drawn at insertion and is in no results yet.
    last_hidden: of the last position that was prefilled; a prompt's last gives the first token.
    requests: `max_new_tokens` counts those that are in no results yet.
    """

    length: Int[Array, "slots"]
    last_token: Int[Array, "slots"]
    pending_tokens: Int[Array, "slots pending"]
    pending_features: Float[Array, "slots pending raw"]
    pending_count: Int[Array, "slots"]
    history: Int[Array, "slots history"]
    finished: Bool[Array, "slots"]
    hit_eos: Bool[Array, "slots"]
    gave_up: Bool[Array, "slots"]
    rates: Float[Array, "slots rates"]
    step_costs: Float[Array, "lengths"]
    fresh: Bool[Array, "slots"]
    last_hidden: Float[Array, "slots hidden"]
    requests: RequestArrays


_SHARED = (
    "length",
    "last_token",
    "pending_tokens",
    "pending_features",
    "pending_count",
    "history",
    "finished",
    "hit_eos",
    "gave_up",
    "rates",
    "step_costs",
)


# What plain decoding does not know of.
_OF_DRAFTS = (
    "pending_tokens",
    "pending_features",
    "pending_count",
    "history",
    "gave_up",
    "rates",
    "step_costs",
)


@struct.dataclass
class ChunkArrays:
    """Parts of prompts, several of one prompt among them. Of one that fills the batch up, `slot` is
    past all slots.

    following: the token after each, 0 where it is not known.
    counts: how many rows are real.
    ends: the part ends with the last position that is known of its sequence.
    """

    slot: Int[Array, "batch"]
    tokens: Int[Array, "batch rows"]
    following: Int[Array, "batch rows"]
    start: Int[Array, "batch"]
    counts: Int[Array, "batch"]
    ends: Bool[Array, "batch"]
    tables: Int[Array, "batch pages"]


@struct.dataclass
class InsertionArrays:
    """Sequences that begin to decode, in the rows of their slots; other rows hold anything.

    length: tokens of the prompt. drafts, anew: as in `Insertion`.
    """

    mask: Bool[Array, "slots"]
    length: Int[Array, "slots"]
    drafts: Bool[Array, "slots"]
    anew: Bool[Array, "slots"]
    requests: RequestArrays


def init(
    speculator: Speculator, num_slots: int, num_pages: int, page_size: int, context: int
) -> Any:
    """(Pools, SlotState) without a sequence; `context` is the most tokens of one."""
    k, dtype = speculator.num_draft_tokens, jnp.dtype(speculator.dtype)
    drafter = speculator.drafter
    pools = Pools(
        init_pages(speculator.target.block, num_pages, page_size, dtype),
        init_pages(drafter.block, num_pages, page_size, dtype) if drafter else (),
    )

    def zeros(*shape: int, dtype: Any = jnp.int32) -> Array:
        return jnp.zeros((num_slots, *shape), dtype)

    requests = RequestArrays(
        temperature=zeros(dtype=jnp.float32),
        top_k=zeros(),
        top_p=zeros(dtype=jnp.float32),
        min_p=zeros(dtype=jnp.float32),
        seed=zeros(dtype=jnp.uint32),
        max_new_tokens=zeros(),
        ignore_eos=zeros(dtype=bool),
    )
    slots = SlotState(
        length=zeros(),
        last_token=zeros(),
        pending_tokens=zeros(speculator.pending_rows),
        pending_features=zeros(
            speculator.pending_rows, drafter.feature_size if drafter else 0, dtype=dtype
        ),
        pending_count=zeros(),
        history=zeros(speculator.history_size(context)),
        finished=zeros(dtype=bool),
        hit_eos=zeros(dtype=bool),
        gave_up=zeros(dtype=bool),
        rates=FIRST_RATE + zeros(k if speculator.lengths else 0, dtype=jnp.float32),
        step_costs=jnp.ones(len(speculator.lengths)),
        fresh=zeros(dtype=bool),
        last_hidden=zeros(speculator.target.block.hidden_size, dtype=dtype),
        requests=requests,
    )
    return pools, free(slots, jnp.ones(num_slots, bool))


@jax.named_scope("prefill")
def prefill(
    params: Params,
    pools: Pools,
    slots: SlotState,
    chunks: ChunkArrays,
    *,
    speculator: Speculator,
    drafts: bool,
) -> tuple[Pools, SlotState]:
    """Parts of prompts through both networks, or without `drafts` through the target."""
    target = PagedKVCache(pools.target, chunks.tables, MODEL)
    drafter = PagedKVCache(pools.drafter, chunks.tables)
    with_drafter = drafts and speculator.drafter is not None
    used = speculator if with_drafter else speculator.without_drafts
    out, drafted = used.prefill_chunk(
        params, target, drafter, chunks.tokens, chunks.following, chunks.start, chunks.counts
    )
    row = jnp.maximum(chunks.counts - 1, 0)[:, None, None]

    def last(values: Array) -> Array:
        return jnp.take_along_axis(values, row, axis=1)[:, 0]

    pending = slots.pending_features
    ending = jnp.where(chunks.ends, chunks.slot, slots.length.shape[0])
    if with_drafter:
        pending = pending.at[ending, 0].set(last(out.features), mode="drop")
    hidden = slots.last_hidden.at[ending].set(last(out.hidden), mode="drop")
    history = slots.history
    if history.shape[1]:
        place = chunks.start[:, None] + jnp.arange(chunks.tokens.shape[1])
        history = history.at[chunks.slot[:, None], place].set(chunks.tokens, mode="drop")
    slots = dataclasses.replace(
        slots, pending_features=pending, history=history, last_hidden=hidden
    )
    return _pools(pools, out.cache, drafted), slots


@jax.named_scope("insert")
def insert(
    params: Params, slots: SlotState, new: InsertionArrays, *, speculator: Speculator
) -> SlotState:
    """Draws the first token of prefilled sequences."""
    mask = new.mask
    requests = jax.tree.map(
        lambda one, other: jnp.where(mask, one, other), new.requests, slots.requests
    )
    # Rows that are not inserted are greedy here: what they would draw is not looked at.
    asked = dataclasses.replace(requests, temperature=jnp.where(mask, requests.temperature, 0))
    drawn = sampling.draws(asked, new.length[:, None], speculator.target.vocab_size)
    first = speculator.choose(params, slots.last_hidden[:, None], asked, drawn)
    # As if the prompt's last token had just been verified with no drafts.
    state = dataclasses.replace(
        _decode_state(slots, KVCache(()), None, 1, speculator.num_draft_tokens),
        length=jnp.where(mask, new.length - 1, slots.length),
        finished=~mask,
        gave_up=jnp.where(mask, ~new.drafts, slots.gave_up),
        emitted=jnp.zeros_like(slots.length),
    )
    state = speculator.commit(
        state,
        requests,
        Verified(first, jnp.ones_like(slots.length)),
        slots.pending_features[:, :1],
        jnp.bool_(True),
    )
    return dataclasses.replace(
        _slot_state(slots, state),
        finished=jnp.where(mask, state.finished, slots.finished),
        fresh=slots.fresh | mask,
        rates=jnp.where((mask & new.anew)[:, None], HOPED_RATE, slots.rates),
        requests=requests,
    )


def step(
    params: Params,
    pools: Pools,
    slots: SlotState,
    tables: Int[Array, "slots pages"],
    *,
    speculator: Speculator,
    num_steps: int,
    drafts: bool,
) -> tuple[Pools, SlotState, Int[Array, "slots packed"]]:
    """At most `num_steps` speculative steps, fewer once every row is finished; without `drafts`
    steps of plain decoding, which leave what the drafter has as it is.

    The last result is all that the host is told, in one array; see `unpack`.
    """
    used, before = speculator, slots
    if not drafts:
        used, slots = speculator.without_drafts, _without_drafts(slots)
    k = used.num_draft_tokens
    state = _decode_state(
        slots,
        PagedKVCache(pools.target, tables, MODEL),
        PagedKVCache(pools.drafter, tables) if used.drafts else None,
        1 + num_steps * (k + 1),
        k,
    )
    state = run_steps(params, state, slots.requests, used, num_steps)
    left = slots.requests.max_new_tokens - state.emitted
    slots = dataclasses.replace(
        _slot_state(slots, state),
        fresh=jnp.zeros_like(slots.fresh),
        requests=dataclasses.replace(slots.requests, max_new_tokens=left),
    )
    if not drafts:
        kept: dict[str, Any] = {name: getattr(before, name) for name in _OF_DRAFTS}
        slots = dataclasses.replace(slots, **kept)
    worth = jnp.bool_(True)
    if speculator.lengths:
        worth = worth_drafting(slots.rates, slots.step_costs, speculator.lengths)
    columns = (
        state.emitted,
        state.finished,
        state.hit_eos,
        state.num_drafts,
        state.num_draft_tokens,
        state.gave_up,
        jnp.broadcast_to(worth, state.emitted.shape),
    )
    accepted = state.accepted_per_position
    packed = jnp.concatenate(
        [
            *(column[:, None].astype(jnp.int32) for column in columns),
            jnp.pad(accepted, ((0, 0), (0, speculator.num_draft_tokens - k))),
            state.output,
        ],
        axis=1,
    )
    return _pools(pools, state.target_cache, state.draft_cache), slots, packed


def unpack(packed: Any, num_draft_tokens: int) -> tuple[StepResults, bool]:
    """What `step` packed, on the host, and whether new sequences should draft."""
    counts, finished, hit_eos, num_drafts, drafted, gave_up, worth = packed[:, :7].T
    accepted, tokens = np.split(packed[:, 7:], [num_draft_tokens], axis=1)
    results = StepResults(
        tokens, counts, finished != 0, hit_eos != 0, num_drafts, drafted, accepted, gave_up != 0
    )
    return results, bool(worth.any())


def free(slots: SlotState, mask: Bool[Array, "slots"]) -> SlotState:
    """Slots without a sequence: finished, greedy, their next write at position 0 or 1."""
    return dataclasses.replace(
        slots,
        length=jnp.where(mask, 1, slots.length),
        pending_count=jnp.where(mask, 1, slots.pending_count),
        finished=slots.finished | mask,
        hit_eos=slots.hit_eos & ~mask,
        fresh=slots.fresh & ~mask,
        requests=dataclasses.replace(
            slots.requests, temperature=jnp.where(mask, 0.0, slots.requests.temperature)
        ),
    )


def _decode_state(
    slots: SlotState,
    target_cache: KVCache | PagedKVCache,
    draft_cache: PagedKVCache | None,
    width: int,
    num_draft_tokens: int,
) -> DecodeState:
    """What a step takes, its output `width` tokens wide and begun with what is fresh."""
    num_slots = slots.length.shape[0]
    shared: dict[str, Any] = {name: getattr(slots, name) for name in _SHARED}
    return DecodeState(
        target_cache=target_cache,
        draft_cache=draft_cache,
        **shared,
        output=jnp.zeros((num_slots, width), jnp.int32).at[:, 0].set(slots.last_token),
        emitted=slots.fresh.astype(jnp.int32),
        num_drafts=jnp.zeros(num_slots, jnp.int32),
        num_draft_tokens=jnp.zeros(num_slots, jnp.int32),
        accepted_per_position=jnp.zeros((num_slots, num_draft_tokens), jnp.int32),
    )


def _slot_state(slots: SlotState, state: DecodeState) -> SlotState:
    """`slots` after what has happened in `state`."""
    shared: dict[str, Any] = {name: getattr(state, name) for name in _SHARED}
    return dataclasses.replace(slots, **shared)


def _pools(before: Pools, target: Any, drafter: Any) -> Pools:
    """What networks have left; without a drafter's its pages are those before."""
    return Pools(target.pages, before.drafter if drafter is None else drafter.pages)


def _without_drafts(slots: SlotState) -> SlotState:
    """As plain decoding has them."""
    num_slots = slots.length.shape[0]
    return dataclasses.replace(
        slots,
        pending_tokens=jnp.zeros((num_slots, 1), jnp.int32),
        pending_features=slots.pending_features[:, :1, :0],
        history=slots.history[:, :0],
        rates=slots.rates[:, :0],
        step_costs=slots.step_costs[:0],
    )
