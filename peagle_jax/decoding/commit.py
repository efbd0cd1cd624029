"""What was confirmed becomes the state's: arrays in, arrays out."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from peagle_jax.decoding.sampling import RequestArrays
from peagle_jax.decoding.state import DecodeState
from peagle_jax.decoding.verify import Verified


def commit(
    state: DecodeState,
    requests: RequestArrays,
    verified: Verified,
    features: Float[Array, "batch rows raw"],
    asked: Bool[Array, ""],
    eos_token_ids: Sequence[int],
    *,
    keeps_history: bool,
) -> DecodeState:
    """Append confirmed tokens, cut at the end of sequence or at max_new_tokens.

    `features` are the target's of the verified rows, the first at position
    `length`; `length` moves on past all but the newest confirmed token. `asked`: the drafter
    has seen what was pending; otherwise new rows come behind it, where there must be room, but for
    sequences that gave up drafting.

    eos_token_ids: end a sequence that does not ignore them. keeps_history: there is one.
    """
    rows = verified.tokens.shape[1]
    index = jnp.arange(rows)
    ends = jnp.zeros_like(verified.tokens, bool)
    for eos in eos_token_ids:
        ends |= verified.tokens == eos
    ends &= (index < verified.count[:, None]) & ~requests.ignore_eos[:, None]
    until_eos = jnp.where(jnp.any(ends, axis=1), jnp.argmax(ends, axis=1) + 1, rows + 1)
    room = requests.max_new_tokens - state.emitted
    kept = jnp.minimum(jnp.minimum(verified.count, until_eos), room)
    hit_eos = until_eos <= kept
    done = hit_eos | (kept >= room)

    active = ~state.finished
    kept = jnp.where(active, kept, 0)
    # In range: emitted <= max_new_tokens and the buffer has K+1 spare entries.
    output = jax.vmap(lambda o, t, at: jax.lax.dynamic_update_slice(o, t, (at,)))(
        state.output, verified.tokens, state.emitted
    )
    history = state.history
    if keeps_history:
        # In range as the output is. What a finished row writes stays past its text.
        history = jax.vmap(lambda h, t, at: jax.lax.dynamic_update_slice(h, t, (at,)))(
            history, verified.tokens, state.length + 1
        )
    last = jnp.take_along_axis(verified.tokens, verified.count[:, None] - 1, axis=1)[:, 0]
    unseen = jnp.where(asked | state.gave_up, 0, state.pending_count)
    place = jax.vmap(lambda rows, new, at: jax.lax.dynamic_update_slice_in_dim(rows, new, at, 0))
    width = state.pending_features.shape[-1]
    moved = dataclasses.replace(
        state,
        length=state.length + verified.count,
        last_token=last,
        pending_tokens=place(state.pending_tokens, verified.tokens, unseen),
        pending_features=place(state.pending_features, features[..., :width], unseen),
        pending_count=verified.count + unseen,
    )
    # A finished row stands still: its scratch writes stay where there is room.
    frozen = ("length", "last_token", "pending_tokens", "pending_features", "pending_count")
    kept_still: dict[str, Any] = {
        name: _select(active, getattr(moved, name), getattr(state, name)) for name in frozen
    }
    return dataclasses.replace(
        moved,
        **kept_still,
        history=history,
        output=output,
        emitted=state.emitted + kept,
        finished=state.finished | done,
        hit_eos=jnp.where(active, hit_eos, state.hit_eos),
    )


def _select(active: Array, new: Array, old: Array) -> Array:
    return jnp.where(active.reshape(-1, *[1] * (new.ndim - 1)), new, old)
