"""Counter-based Gumbel noise, element by element: what `jax.random.gumbel` draws from a key.

jax's default generator is Threefry-2x32 with 20 rounds (Salmon et al. 2011) in its partitionable
form: element i of any shape is the two words of the block with counter (0, i), combined by
exclusive or. So a kernel can draw the noise of a token from the token's id, where and when
it needs it.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

_PARITY = 0x1BD11BDA
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_TINY = float(jnp.finfo(jnp.float32).tiny)
# Bounds of what `gumbel` returns, with room for rounding: of 2**-23 steps in [tiny, 1) the
# last is -log(2**-23) = 15.94, the first -log(-log(tiny)) = -4.47.
HIGHEST, LOWEST = 16.5, -4.6


def random_bits(first: Any, second: Any, counter: Int[Array, "*shape"]) -> Int[Array, "*shape"]:
    """32 random bits, as int32, of each counter under the key (first, second), int32 too."""
    key = (first, second, first ^ second ^ _PARITY)
    left, right = jnp.zeros_like(counter) + key[0], counter + key[1]
    for group in range(5):
        for turn in _ROTATIONS[group % 2]:
            left = left + right
            right = (right << turn) | jax.lax.shift_right_logical(
                right, jnp.full_like(right, 32 - turn)
            )
            right = right ^ left
        left = left + key[(group + 1) % 3]
        right = right + (key[(group + 2) % 3] + (group + 1))
    return left ^ right


def gumbel(first: Any, second: Any, counter: Int[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Standard Gumbel noise of each counter."""
    bits = random_bits(first, second, counter)
    mantissa = jax.lax.shift_right_logical(bits, jnp.full_like(bits, 9)) | 0x3F800000
    unit = jax.lax.bitcast_convert_type(mantissa, jnp.float32) - 1.0
    return -jnp.log(-jnp.log(jnp.maximum(unit + _TINY, _TINY)))


def drawn_by_jax() -> bool:
    """Whether jax's own generator is configured to draw the same numbers."""
    config: Any = jax.config
    return (
        config.jax_default_prng_impl == "threefry2x32"
        and bool(config.jax_threefry_partitionable)
        and not getattr(config, "jax_high_dynamic_range_gumbel", False)
    )
