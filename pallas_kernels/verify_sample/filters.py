"""How requests are sampled, and the order of float32 logits as integers."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


class Filters(NamedTuple):
    """Sampling parameters of a batch, one entry a sequence.

    Attributes:
      temperature: 0 is greedy.
      top_k: 0 is off.
      top_p: 1 is off, more than 0.
      min_p: 0 is off.
    """

    temperature: Float[Array, "batch"]
    top_k: Int[Array, "batch"]
    top_p: Float[Array, "batch"]
    min_p: Float[Array, "batch"]

    @property
    def greedy(self) -> Bool[Array, "batch"]:
        """Sequences that take the argmax."""
        return self.temperature == 0

    @property
    def filtered(self) -> Bool[Array, "batch"]:
        """Sampled sequences with at least one filter switched on."""
        on = (self.top_k > 0) | (self.top_p < 1) | (self.min_p > 0)
        return on & ~self.greedy


def sortable(x: Float[Array, "*shape"]) -> Int[Array, "*shape"]:
    """int32 keys in the order of the float32 values."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def value_of(key: Int[Array, "*shape"]) -> Float[Array, "*shape"]:
    """The float32 values of `sortable` keys."""
    bits = jnp.where(key < 0, key ^ 0x7FFFFFFF, key)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def middle_of(low: Int[Array, "*shape"], high: Int[Array, "*shape"]) -> Int[Array, "*shape"]:
    """The mean without overflow, rounded up: low < middle <= high where low < high."""
    return (low & high) + ((low ^ high) >> 1) + ((low ^ high) & 1)
