"""Logits -> processed logits -> token: one function for plain decoding and verification.

What is made of the logits of a request stands in pallas_kernels/verify_sample: the reference,
which CPUs run, and kernels that draw the same noise themselves.

Randomness is counter-based: the noise of a token is a pure function of the
request's seed and the token's position, so it is the same in every method, slot,
batch and draft length.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int, UInt32

from pallas_kernels.verify_sample import Filters, own_kernel, reference, sample_tokens
from peagle_jax.sharding import per_device

MASKED = reference.MASKED
choose = reference.choose

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
    def filters(self) -> Filters:
        """What is done to a row's logits."""
        return Filters(self.temperature, self.top_k, self.top_p, self.min_p)

    @property
    def greedy(self) -> Bool[Array, "batch"]:
        """Rows that take the argmax."""
        return self.filters.greedy

    @property
    def filtered(self) -> Bool[Array, "batch"]:
        """Sampled rows with at least one filter switched on."""
        return self.filters.filtered


def process_logits(
    logits: Float[Array, "batch rows vocab"], requests: RequestArrays
) -> Float[Array, "batch rows vocab"]:
    """The logits that a request samples from: scaled by its temperature, -inf where filtered.

    Greedy rows come back as they are. Float32 in and out.
    """
    return reference.process_logits(logits, requests.filters)


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


@struct.dataclass
class Draws:
    """What the target chooses its tokens with at some positions, see `draws`.

    Attributes:
      keys: key data of each position's noise.
      noise: the noise itself, zero in greedy rows; None where a kernel draws it.
    """

    keys: UInt32[Array, "batch rows 2"]
    noise: Float[Array, "batch rows vocab"] | None

    def rows(self, at: slice) -> Draws:
        """Of some of the positions."""
        noise = None if self.noise is None else self.noise[:, at]
        return Draws(self.keys[:, at], noise)

    def at(self, rows: Int[Array, "batch some"]) -> Draws:
        """Row `rows[b, i]` of sequence b as its i-th."""
        index = rows[..., None]
        noise = self.noise
        if noise is not None:
            noise = jnp.take_along_axis(noise, index, axis=1)
        return Draws(jnp.take_along_axis(self.keys, index, axis=1), noise)

    def noise_of(
        self, requests: RequestArrays, size: int, token_ids: Int[Array, "size"] | None
    ) -> Float[Array, "batch rows size"]:
        """The noise of `size` tokens: of the whole vocabulary, or of those with these ids."""
        if self.noise is None:
            return reference.gumbel_noise(requests.filters, self.keys, size, token_ids)
        if token_ids is None:
            return self.noise
        chosen: Array = jnp.take(self.noise, token_ids, axis=-1)
        return chosen


def draws(requests: RequestArrays, positions: Int[Array, "batch rows"], vocab_size: int) -> Draws:
    """The target's own draws: noise, or only its keys where the device's kernel draws it."""
    keys = noise_keys(requests, positions)
    if own_kernel(vocab_size):
        return Draws(keys, None)
    return Draws(keys, gumbel_noise(requests, positions, vocab_size))


def noise_keys(
    requests: RequestArrays, positions: Int[Array, "batch rows"], stream: int = STREAM_TOKEN
) -> UInt32[Array, "batch rows 2"]:
    """Data of the keys that `gumbel_noise` draws with."""

    def one(seed: Array, position: Array) -> Array:
        data: Array = jax.random.key_data(_key(seed, position, stream))
        return data

    return jax.vmap(jax.vmap(one, (None, 0)))(requests.seed, positions)


def sample(
    logits: Float[Array, "batch rows vocab"],
    requests: RequestArrays,
    drawn: Draws,
    token_ids: Int[Array, "vocab"] | None = None,
) -> Int[Array, "batch rows"]:
    """The token of each row, processed and drawn; `token_ids`: the columns' ids, where they are
    not the whole vocabulary. Columns come back."""
    if drawn.noise is None:
        run = per_device(sample_tokens, PartitionSpec(), PartitionSpec())
        chosen: Array = run(logits, requests.filters, drawn.keys, token_ids)
        return chosen
    noise = drawn.noise_of(requests, logits.shape[-1], token_ids)
    return choose(process_logits(logits, requests), noise)


def _key(seed: Array, position: Array, stream: int) -> Array:
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), position), stream)
