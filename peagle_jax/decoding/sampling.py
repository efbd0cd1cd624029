"""Logits -> processed logits -> token: one function for plain decoding and verification.

Filters apply in the order temperature, top-k, top-p, min-p, each on the
distribution that the one before left. They are found by threshold search, not by
sorting: a bisection over the 2**32 float values takes 32 cheap passes over the
vocabulary whatever its size, and every token tied with the threshold is kept, so
the result does not depend on an order among equals.

Randomness is counter-based: the noise of a token is a pure function of the
request's seed and the token's position, so it is the same in every method, slot,
batch and draft length.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int, UInt32

MASKED = -jnp.inf

# Independent streams of noise of one (seed, position). Plain sampling, coupled
# drafts and coupled verification share the first one: that is the coupling.
STREAM_TOKEN, STREAM_ACCEPT, STREAM_RECOVER = 0, 1, 2


@struct.dataclass
class RequestArrays:
    """Sampling parameters of a batch, one entry a request (see SamplingParams)."""

    temperature: Float[Array, "batch"]
    top_k: Int[Array, "batch"]
    top_p: Float[Array, "batch"]
    min_p: Float[Array, "batch"]
    seed: UInt32[Array, "batch"]
    max_new_tokens: Int[Array, "batch"]
    ignore_eos: Bool[Array, "batch"]

    @property
    def greedy(self) -> Bool[Array, "batch"]:
        """Rows that take the argmax."""
        return self.temperature == 0

    @property
    def filtered(self) -> Bool[Array, "batch"]:
        """Sampled rows with at least one filter switched on."""
        on = (self.top_k > 0) | (self.top_p < 1) | (self.min_p > 0)
        return on & ~self.greedy


def process_logits(
    logits: Float[Array, "batch rows vocab"], requests: RequestArrays
) -> Float[Array, "batch rows vocab"]:
    """The logits that a request samples from: scaled by its temperature, -inf where filtered.

    Greedy rows come back as they are. Float32 in and out.
    """
    temperature = jnp.where(requests.greedy, 1.0, requests.temperature)
    scaled = logits / temperature[:, None, None]
    return jax.lax.cond(
        jnp.any(requests.filtered), lambda: _filter(scaled, requests), lambda: scaled
    )


def gumbel_noise(
    requests: RequestArrays,
    positions: Int[Array, "batch rows"],
    vocab_size: int,
    stream: int = STREAM_TOKEN,
) -> Float[Array, "batch rows vocab"]:
    """Gumbel noise keyed by (seed, position, stream); zero in greedy rows.

    argmax(log p + noise) is then a sample of p, and the argmax of a greedy row.
    """

    def draw() -> Array:
        def one(seed: Array, position: Array) -> Array:
            return jax.random.gumbel(_key(seed, position, stream), (vocab_size,), jnp.float32)

        noise = jax.vmap(jax.vmap(one, (None, 0)))(requests.seed, positions)
        return jnp.where(requests.greedy[:, None, None], 0.0, noise)

    shape = (*positions.shape, vocab_size)
    return jax.lax.cond(jnp.all(requests.greedy), lambda: jnp.zeros(shape, jnp.float32), draw)


def uniform_noise(
    requests: RequestArrays, positions: Int[Array, "batch rows"], stream: int
) -> Float[Array, "batch rows"]:
    """One uniform number in [0, 1) a position."""

    def one(seed: Array, position: Array) -> Array:
        return jax.random.uniform(_key(seed, position, stream), (), jnp.float32)

    return jax.vmap(jax.vmap(one, (None, 0)))(requests.seed, positions)


def choose(
    processed: Float[Array, "*batch vocab"], noise: Float[Array, "*batch vocab"]
) -> Int[Array, "*batch"]:
    """The sampled (or, with zero noise, greedy) token of each row."""
    return jnp.argmax(processed + noise, axis=-1).astype(jnp.int32)


def _key(seed: Array, position: Array, stream: int) -> Array:
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), position), stream)


def _filter(scaled: Array, requests: RequestArrays) -> Array:
    """Top-k, top-p and min-p of already scaled logits."""
    vocab_size = scaled.shape[-1]
    order = _sortable(scaled)

    # top-k: the largest threshold that at least k tokens reach.
    k = jnp.where(requests.top_k > 0, jnp.minimum(requests.top_k, vocab_size), vocab_size)

    def enough_tokens(threshold: Array) -> Array:
        return jnp.sum(order >= threshold, axis=-1) >= k[:, None]

    keep = order >= _largest_threshold(enough_tokens, order.shape[:-1])[..., None]

    # top-p: the largest threshold whose tokens hold at least top_p of what top-k left.
    weights = jnp.where(keep, jnp.exp(scaled - jnp.max(scaled, axis=-1, keepdims=True)), 0.0)
    wanted = requests.top_p[:, None] * jnp.sum(weights, axis=-1)

    def enough_mass(threshold: Array) -> Array:
        return jnp.sum(jnp.where(order >= threshold, weights, 0.0), axis=-1) >= wanted

    nucleus = order >= _largest_threshold(enough_mass, order.shape[:-1])[..., None]
    keep &= nucleus | (requests.top_p >= 1)[:, None, None]

    # min-p: relative to the most likely token, so the normaliser does not matter.
    keep &= weights >= requests.min_p[:, None, None]
    keep |= ~requests.filtered[:, None, None]
    return jnp.where(keep, scaled, MASKED)


def _sortable(x: Array) -> Array:
    """int32 keys in the order of the float32 values."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _largest_threshold(reached: Callable[[Array], Array], shape: tuple[int, ...]) -> Array:
    """Largest int32 t, a row, for which `reached(t[..., None])` holds; it holds for the
    smallest one and never again once it fails."""

    def narrow(_: Array, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        # The mean without overflow, rounded up: low < middle <= high.
        middle = (low & high) + ((low ^ high) >> 1) + ((low ^ high) & 1)
        ok = reached(middle[..., None])
        return jnp.where(ok, middle, low), jnp.where(ok, high, middle - 1)

    limits = jnp.iinfo(jnp.int32)
    start = (jnp.full(shape, limits.min, jnp.int32), jnp.full(shape, limits.max, jnp.int32))
    return jax.lax.fori_loop(0, 32, narrow, start)[0]
