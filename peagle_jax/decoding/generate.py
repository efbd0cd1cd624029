"""Prefill and the compiled loop. `generate_tokens` is one `jax.jit`: prefill, every
speculative step and the end conditions run on the device without a host visit.
Streaming and stop strings drive the same step from Python, a few steps a visit.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from peagle_jax.decoding import sampling
from peagle_jax.decoding.sampling import RequestArrays
from peagle_jax.decoding.speculate import Speculator
from peagle_jax.decoding.state import DecodeState, Params
from peagle_jax.decoding.verify import Verified

PREFILL_CHUNK = 512


@struct.dataclass
class TokenStats:
    """Per request. Accepted drafts past an end of sequence or past max_new_tokens count, as in
    vLLM: they were verified. rates: what was learnt of acceptance, see `DecodeState`."""

    hit_eos: Bool[Array, "batch"]
    num_drafts: Int[Array, "batch"]
    num_draft_tokens: Int[Array, "batch"]
    accepted_per_position: Int[Array, "batch drafts"]
    rates: Float[Array, "batch rates"]

    @classmethod
    def of(cls, state: DecodeState) -> TokenStats:
        """A state's counters."""
        return cls(
            state.hit_eos,
            state.num_drafts,
            state.num_draft_tokens,
            state.accepted_per_position,
            state.rates,
        )


def generate_tokens(
    params: Params,
    prompts: Int[Array, "batch prompt"],
    prompt_lengths: Int[Array, "batch"],
    requests: RequestArrays,
    step_costs: Float[Array, "lengths"] | None = None,
    rates: Float[Array, "rates"] | None = None,
    *,
    speculator: Speculator,
    max_new_tokens: int,
    prefill_chunk: int = PREFILL_CHUNK,
) -> tuple[Int[Array, "batch new"], Int[Array, "batch"], TokenStats]:
    """Generate for a batch: the whole draft-verify loop in one compiled call.

    Args:
      params: {"target": tree, "drafter": tree}.
      prompts: token ids, padded on the right with anything.
      prompt_lengths: 1 .. prompt.
      requests: sampling parameters, an entry a row.
      step_costs, rates: see `Speculator.init_state`.
      speculator: networks and method (static).
      max_new_tokens: size of the output (static); a row's own limit may be lower.
      prefill_chunk: prompts longer than this are prefilled in pieces of it (static);
        the padded prompt size must then be a multiple of it.

    Returns:
      tokens: int32, entries past `lengths` are 0.
      lengths: confirmed tokens of each row, the end-of-sequence token included.
      stats: TokenStats.
    """
    state = prefill(
        params,
        prompts,
        prompt_lengths,
        requests,
        step_costs,
        rates,
        speculator=speculator,
        max_new_tokens=max_new_tokens,
        prefill_chunk=prefill_chunk,
    )
    requests = clip_to_context(requests, prompt_lengths, speculator, max_new_tokens)
    state = jax.lax.while_loop(
        lambda s: ~jnp.all(s.finished), lambda s: speculator.step(params, s, requests), state
    )
    tokens = state.output[:, :max_new_tokens]
    tokens = jnp.where(jnp.arange(max_new_tokens) < state.emitted[:, None], tokens, 0)
    return tokens, state.emitted, TokenStats.of(state)


def prefill(
    params: Params,
    prompts: Int[Array, "batch prompt"],
    prompt_lengths: Int[Array, "batch"],
    requests: RequestArrays,
    step_costs: Float[Array, "lengths"] | None = None,
    rates: Float[Array, "rates"] | None = None,
    *,
    speculator: Speculator,
    max_new_tokens: int,
    prefill_chunk: int = PREFILL_CHUNK,
) -> DecodeState:
    """Run the prompts through target and drafter and sample the first token."""
    batch, size = prompts.shape
    chunk = min(size, prefill_chunk)
    if size % chunk:
        raise ValueError(f"prompt size {size} is not a multiple of the chunk {chunk}")
    state = speculator.init_state(batch, size, max_new_tokens, step_costs, rates)
    if state.history.shape[1]:
        state = dataclasses.replace(state, history=state.history.at[:, :size].set(prompts))
    # Row p of the drafter holds x_{p+1}; what row n-1 holds is not known yet, and the
    # first draft step writes that row again.
    following = jnp.pad(prompts[:, 1:], ((0, 0), (0, 1)))
    width = speculator.target.block.hidden_size
    last_hidden = jnp.zeros((batch, width), speculator.dtype)

    def run(index: Array | int, carry: tuple[DecodeState, Array]) -> tuple[DecodeState, Array]:
        state, last_hidden = carry
        begin = index * chunk
        start = jnp.full((batch,), begin, jnp.int32)
        tokens = jax.lax.dynamic_slice_in_dim(prompts, begin, chunk, axis=1)
        after = jax.lax.dynamic_slice_in_dim(following, begin, chunk, axis=1)
        counts = jnp.clip(prompt_lengths - begin, 0, chunk)
        out, draft_cache = speculator.prefill_chunk(
            params, state.target_cache, state.draft_cache, tokens, after, start, counts
        )
        at = prompt_lengths - 1 - begin
        here = ((at >= 0) & (at < chunk))[:, None]
        row = jnp.clip(at, 0, chunk - 1)[:, None, None]

        def last(values: Array, before: Array) -> Array:
            return jnp.where(here, jnp.take_along_axis(values, row, axis=1)[:, 0], before)

        pending = state.pending_features
        if speculator.drafter:
            pending = pending.at[:, 0].set(last(out.features, pending[:, 0]))
        state = dataclasses.replace(
            state, target_cache=out.cache, draft_cache=draft_cache, pending_features=pending
        )
        return state, last(out.hidden, last_hidden)

    with jax.named_scope("prefill"):
        if size == chunk:
            state, last_hidden = run(0, (state, last_hidden))
        else:
            num_chunks = -(-jnp.max(prompt_lengths) // chunk)
            state, last_hidden = jax.lax.fori_loop(0, num_chunks, run, (state, last_hidden))
        drawn = sampling.draws(requests, prompt_lengths[:, None], speculator.target.vocab_size)
        first = speculator.choose(params, last_hidden[:, None], requests, drawn)
        # As if the prompt's last token had just been verified with no drafts.
        state = dataclasses.replace(state, length=prompt_lengths - 1)
        return speculator.commit(
            state,
            clip_to_context(requests, prompt_lengths, speculator, max_new_tokens),
            Verified(first, jnp.ones((batch,), jnp.int32)),
            state.pending_features[:, :1],
            jnp.bool_(True),
        )


def advance(
    params: Params,
    state: DecodeState,
    requests: RequestArrays,
    prompt_lengths: Int[Array, "batch"],
    *,
    speculator: Speculator,
    max_new_tokens: int,
    num_steps: int,
) -> DecodeState:
    """At most `num_steps` speculative steps, fewer when every row is finished."""
    requests = clip_to_context(requests, prompt_lengths, speculator, max_new_tokens)
    return run_steps(params, state, requests, speculator, num_steps)


def run_steps(
    params: Params,
    state: DecodeState,
    requests: RequestArrays,
    speculator: Speculator,
    num_steps: int,
) -> DecodeState:
    """At most `num_steps` speculative steps under limits that the output has room for."""

    def going(carry: tuple[Array, DecodeState]) -> Array:
        return (carry[0] < num_steps) & ~jnp.all(carry[1].finished)

    def once(carry: tuple[Array, DecodeState]) -> tuple[Array, DecodeState]:
        return carry[0] + 1, speculator.step(params, carry[1], requests)

    return jax.lax.while_loop(going, once, (jnp.int32(0), state))[1]


def clip_to_context(
    requests: RequestArrays,
    prompt_lengths: Int[Array, "batch"],
    speculator: Speculator,
    max_new_tokens: int,
) -> RequestArrays:
    """Lower each row's max_new_tokens to what the output and the context have room for."""
    room = jnp.minimum(max_new_tokens, speculator.target.max_positions - prompt_lengths)
    limit = jnp.minimum(requests.max_new_tokens, room)
    return dataclasses.replace(requests, max_new_tokens=limit)


_STATIC = ("speculator", "max_new_tokens", "prefill_chunk")
jit_generate_tokens = jax.jit(generate_tokens, static_argnames=_STATIC)
jit_prefill = jax.jit(prefill, static_argnames=_STATIC)
# The caches are written in place: without donation every visit would copy them.
jit_advance = jax.jit(
    advance,
    static_argnames=("speculator", "max_new_tokens", "num_steps"),
    donate_argnames=("state",),
)
