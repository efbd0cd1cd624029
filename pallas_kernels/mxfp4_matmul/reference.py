"""MXFP4 in plain JAX: what packed bytes stand for, and the product every kernel is tested against.

OCP Microscaling Formats (MX) 1.0: 32 elements of four bits (E2M1) share a scale of eight bits
(E8M0, 2 ** (code - 127); code 255 is NaN). Packed weights lie input-major here: two neighbours
along the input axis are one byte, the first in its low half, and outputs are the last axis, which
on a TPU is along the lanes. So a scale's block is rows of whole registers.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt8

BLOCK = 32  # elements along the input axis that share a scale
SCALE_NAN = 255
_MAGNITUDE, _SIGN = 7, 8  # bits of a nibble
# A magnitude's three bits, put below this exponent, are a float f of which min(2f - 1, f) is the
# magnitude: .5, .75, 1, 1.5, 2, 3, 4, 6 become 0, .5, 1, 1.5, 2, 3, 4, 6, without a subnormal.
_HALF_BITS = 0x3F000000


def dequantise(
    packed: UInt8[Array, "*experts half out"],
    scales: UInt8[Array, "*experts blocks out"],
    dtype: Any,
) -> Float[Array, "*experts in out"]:
    """The values, exact in float32 and bfloat16, in = 2 half = 32 blocks.

    Under the scale 255 all values are NaN; what exceeds the dtype is Inf. Values below 2 ** -126
    may come out as 0, as hardware without subnormals has it; under the scale 0 all do.
    """
    experts, (half, out) = packed.shape[:-2], packed.shape[-2:]
    wide = packed.astype(jnp.int32)
    nibbles = jnp.stack([wide & 15, wide >> 4], axis=-2).reshape(*experts, -1, BLOCK, out)
    assert nibbles.shape[-3] == scales.shape[-2], (packed.shape, scales.shape)
    f = _float32(((nibbles & _MAGNITUDE) << 22) + _HALF_BITS)
    signs = (nibbles & _SIGN) << 28
    magnitudes = jax.lax.bitcast_convert_type(jnp.minimum(2 * f - 1, f), jnp.int32)
    values = _float32(magnitudes | signs) * scale_values(scales)[..., None, :]
    return values.reshape(*experts, 2 * half, out).astype(dtype)


def scale_values(scales: UInt8[Array, "*shape"]) -> Float[Array, "*shape"]:
    """2 ** (code - 127) in float32; NaN for 255, and 0 for the subnormal of code 0."""
    values = _float32(scales.astype(jnp.int32) << 23)
    return jnp.where(scales == SCALE_NAN, jnp.nan, values)


def mxfp4_matmul(
    x: Float[Array, "rows in"],
    sizes: Int[Array, "experts"],
    packed: UInt8[Array, "experts half out"],
    scales: UInt8[Array, "experts blocks out"],
) -> Float[Array, "rows out"]:
    """See `pallas_kernels.mxfp4_matmul.mxfp4_matmul`: one expert after another, those without
    rows left out."""
    ends = jnp.cumsum(sizes)
    row = jnp.arange(x.shape[0])

    def turn(expert: Array, out: Array) -> Array:
        def multiplied() -> Array:
            kernel = dequantise(packed[expert], scales[expert], x.dtype)
            y = jnp.dot(x, kernel, preferred_element_type=jnp.float32)
            own = (row >= ends[expert] - sizes[expert]) & (row < ends[expert])
            return jnp.where(own[:, None], y, out)

        return jax.lax.cond(sizes[expert] > 0, multiplied, lambda: out)

    out = jnp.zeros((x.shape[0], packed.shape[2]), jnp.float32)
    return jax.lax.fori_loop(0, packed.shape[0], turn, out)


def _float32(bits: Int[Array, "*shape"]) -> Float[Array, "*shape"]:
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
