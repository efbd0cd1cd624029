"""Attention of tiles with a gradient: what is kept of the scores is a row's log of its total.

The backward pass computes a block's scores again and finds its weights by that number
(FlashAttention-2, arXiv 2307.08691), so that nothing kept grows with rows times length.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.target import Target


class Kernels(NamedTuple):
    """A backend's kernels and their tiling; hashable.

    forward: (q, keys, values, spans, extra, blocks, target) -> (output, log of the total).
    backward: (q, keys, values, spans, d output, log of the total, shift, blocks, target) ->
      gradients of q, keys and values; see `_backward` for the shift.
    """

    forward: Callable[..., Any]
    backward: Callable[..., Any]
    blocks: Any
    target: Target


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend_tiles(
    kernels: Kernels,
    q: Float[Array, "batch kv_heads group dim rows"],
    keys: Float[Array, "batch kv_heads dim slots"],
    values: Float[Array, "batch kv_heads dim slots"],
    spans: Int[Array, "batch tiles 2 row"],
    extra: Float[Array, "batch kv_heads group rows"],
) -> tuple[
    Float[Array, "batch kv_heads group dim rows"], Float[Array, "batch kv_heads group rows"]
]:
    """Outputs in q's dtype, and the log of each row's total weight, float32.

    Args:
      q: rotated, not scaled; see `tiles`.
      keys, values: padded to whole blocks with anything finite.
      spans: first and last index that each row sees, in tiles of `blocks.rows`.
      extra: float32; one more score a row, which takes its share of the softmax and adds no value.
    """
    return kernels.forward(q, keys, values, spans, extra, kernels.blocks, kernels.target)


def _forward(kernels: Kernels, *arguments: Array) -> tuple[Any, Any]:
    out, total = attend_tiles(kernels, *arguments)
    return (out, total), (*arguments, out, total)


def _backward(kernels: Kernels, kept: tuple[Array, ...], cotangents: Any) -> tuple[Any, ...]:
    q, keys, values, spans, extra, out, total = kept
    d_out, d_total = cotangents
    # A score's gradient is its weight times (values . d_out - out . d_out + d_total).
    product = out.astype(jnp.float32) * d_out.astype(jnp.float32)
    shift = jnp.sum(product, axis=3) - d_total
    d_q, d_keys, d_values = kernels.backward(
        q, keys, values, spans, d_out, total, shift, kernels.blocks, kernels.target
    )
    return d_q, d_keys, d_values, None, -jnp.exp(extra - total) * shift


attend_tiles.defvjp(_forward, _backward)
