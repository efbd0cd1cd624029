"""Plain-JAX sampling and verification: the meaning every kernel is tested against.

Filters apply in the order temperature, top-k, top-p, min-p, each on the
distribution that the one before left. They are found by threshold search, not by
sorting: a bisection over the 2**32 float values takes 32 cheap passes over the
vocabulary whatever its size, and every token tied with the threshold is kept, so
the result does not depend on an order among equals.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from pallas_kernels.verify_sample import noise
from pallas_kernels.verify_sample.filters import Filters, middle_of, sortable

MASKED = -jnp.inf


def sample_tokens(
    logits: Float[Array, "batch rows vocab"],
    filters: Filters,
    keys: UInt32[Array, "batch rows 2"],
    token_ids: Int[Array, "vocab"] | None,
) -> Int[Array, "batch rows"]:
    """See `pallas_kernels.verify_sample.sample_tokens`."""
    drawn = gumbel_noise(filters, keys, logits.shape[-1], token_ids)
    return choose(process_logits(logits, filters), drawn)


def reject_drafts(
    logits: Float[Array, "batch rows vocab"],
    filters: Filters,
    keys: UInt32[Array, "batch rows 2"],
    drafts: Int[Array, "batch drafts"],
    draft_logits: Float[Array, "batch rows vocab"] | None,
    accept_noise: Float[Array, "batch drafts"],
) -> tuple[Bool[Array, "batch drafts"], Int[Array, "batch rows"]]:
    """See `pallas_kernels.verify_sample.reject_drafts`."""
    if draft_logits is not None:
        draft_logits = draft_logits[:, : drafts.shape[1]]
    drawn = gumbel_noise(filters, keys, logits.shape[-1], None)
    processed = process_logits(logits, filters)
    return reject(drafts, draft_logits, processed, filters.greedy, accept_noise, drawn)


def gumbel_noise(
    filters: Filters,
    keys: UInt32[Array, "batch rows 2"],
    vocab_size: int,
    token_ids: Int[Array, "vocab"] | None,
) -> Float[Array, "batch rows vocab"]:
    """Noise of each row's key at the tokens' ids; zero in greedy sequences."""
    ids = jnp.arange(vocab_size, dtype=jnp.int32) if token_ids is None else token_ids
    words = jax.lax.bitcast_convert_type(keys, jnp.int32)
    counter = jnp.broadcast_to(ids, (*keys.shape[:2], vocab_size))
    drawn = noise.gumbel(words[..., :1], words[..., 1:], counter)
    return jnp.where(filters.greedy[:, None, None], 0.0, drawn)


def choose(
    processed: Float[Array, "*batch vocab"], noise: Float[Array, "*batch vocab"]
) -> Int[Array, "*batch"]:
    """The sampled (or, with zero noise, greedy) token of each row."""
    return jnp.argmax(processed + noise, axis=-1).astype(jnp.int32)


def process_logits(
    logits: Float[Array, "batch rows vocab"], filters: Filters
) -> Float[Array, "batch rows vocab"]:
    """The logits that a sequence samples from: scaled by its temperature, -inf where filtered.

    Greedy sequences come back as they are. Float32 in and out.
    """
    temperature = jnp.where(filters.greedy, 1.0, filters.temperature)
    scaled = logits / temperature[:, None, None]
    return jax.lax.cond(jnp.any(filters.filtered), lambda: _filter(scaled, filters), lambda: scaled)


def reject(
    drafts: Int[Array, "batch drafts"],
    draft_logits: Float[Array, "batch drafts vocab"] | None,
    target_logits: Float[Array, "batch rows vocab"],
    greedy: Bool[Array, "batch"],
    accept_noise: Float[Array, "batch drafts"],
    recover_noise: Float[Array, "batch rows vocab"],
) -> tuple[Bool[Array, "batch drafts"], Int[Array, "batch rows"]]:
    """Which drafts stand, and every row's token where the draft before it does not.

    Logits are processed. `draft_logits` None: the drafts' distribution is one-hot.
    """
    k = drafts.shape[1]
    p = jax.nn.softmax(target_logits, axis=-1)
    one_hot = jax.nn.one_hot(drafts, p.shape[-1], dtype=p.dtype)
    q = one_hot if draft_logits is None else jax.nn.softmax(draft_logits, axis=-1)

    p_draft = jnp.sum(p[:, :k] * one_hot, axis=-1)
    q_draft = jnp.sum(q * one_hot, axis=-1)
    likely = accept_noise * q_draft < p_draft
    argmax = jnp.argmax(target_logits, axis=-1).astype(jnp.int32)
    stands = jnp.where(greedy[:, None], drafts == argmax[:, :k], likely)

    residual = jnp.maximum(p[:, :k] - q, 0.0)
    # p == q up to rounding leaves nothing to recover from; such a draft was accepted
    # but for rounding too, and p itself is then the right distribution.
    empty = jnp.sum(residual, axis=-1, keepdims=True) <= 0
    residual = jnp.where(empty, p[:, :k], residual)
    after = jnp.concatenate([residual, p[:, k:]], axis=1)
    sampled = jnp.argmax(jnp.log(after) + recover_noise, axis=-1).astype(jnp.int32)
    return stands, jnp.where(greedy[:, None], argmax, sampled)


def _filter(scaled: Array, filters: Filters) -> Array:
    """Top-k, top-p and min-p of already scaled logits."""
    vocab_size = scaled.shape[-1]
    order = sortable(scaled)

    # top-k: the largest threshold that at least k tokens reach.
    k = jnp.where(filters.top_k > 0, jnp.minimum(filters.top_k, vocab_size), vocab_size)

    def enough_tokens(threshold: Array) -> Array:
        return jnp.sum(order >= threshold, axis=-1) >= k[:, None]

    keep = order >= _largest_threshold(enough_tokens, order.shape[:-1])[..., None]

    # top-p: the largest threshold whose tokens hold at least top_p of what top-k left.
    weights = jnp.where(keep, jnp.exp(scaled - jnp.max(scaled, axis=-1, keepdims=True)), 0.0)
    wanted = filters.top_p[:, None] * jnp.sum(weights, axis=-1)

    def enough_mass(threshold: Array) -> Array:
        return jnp.sum(jnp.where(order >= threshold, weights, 0.0), axis=-1) >= wanted

    nucleus = order >= _largest_threshold(enough_mass, order.shape[:-1])[..., None]
    keep &= nucleus | (filters.top_p >= 1)[:, None, None]

    # min-p: relative to the most likely token, so the normaliser does not matter.
    keep &= weights >= filters.min_p[:, None, None]
    keep |= ~filters.filtered[:, None, None]
    return jnp.where(keep, scaled, MASKED)


def _largest_threshold(reached: Callable[[Array], Array], shape: tuple[int, ...]) -> Array:
    """Largest int32 t, a row, for which `reached(t[..., None])` holds; it holds for the
    smallest one and never again once it fails."""

    def narrow(_: Array, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = middle_of(low, high)
        ok = reached(middle[..., None])
        return jnp.where(ok, middle, low), jnp.where(ok, high, middle - 1)

    limits = jnp.iinfo(jnp.int32)
    start = (jnp.full(shape, limits.min, jnp.int32), jnp.full(shape, limits.max, jnp.int32))
    return jax.lax.fori_loop(0, 32, narrow, start)[0]
