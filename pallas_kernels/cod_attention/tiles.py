"""Rows in tiles, and which blocks of keys a tile sees.

Queries lie `[batch, kv_heads, group, dim, rows]`, rows along a TPU's lanes, which is how XLA itself
lays them out where heads are narrower than a register: turning them so copies nothing. A tile is
some rows of all heads of a group, side by side: a block's scores are `[keys, group * rows]`, so
that the softmax reduces over the first axis, elementwise from register to register.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.cod_attention.predicate import NOTHING


def by_head(
    x: Float[Array, "batch rows heads dim"], kv_heads: int
) -> Float[Array, "batch kv_heads group dim rows"]:
    """Rows last, heads by their key head."""
    batch, rows, _, dim = x.shape
    return x.reshape(batch, rows, kv_heads, -1, dim).transpose(0, 2, 3, 4, 1)


def by_row(
    x: Float[Array, "batch kv_heads group dim rows"],
) -> Float[Array, "batch rows heads dim"]:
    """The inverse of `by_head`."""
    batch, _, _, dim, rows = x.shape
    return x.transpose(0, 4, 1, 2, 3).reshape(batch, rows, -1, dim)


def spans_to_tiles(spans: Int[Array, "batch 2 rows"], size: int) -> Int[Array, "batch tiles 2 row"]:
    """Every tile's spans; rows past the last see nothing."""
    batch, _, rows = spans.shape
    nothing = jnp.broadcast_to(jnp.asarray(NOTHING, jnp.int32)[:, None], (batch, 2, -rows % size))
    padded = jnp.concatenate([spans, nothing], axis=2)
    return padded.reshape(batch, 2, -1, size).swapaxes(1, 2)


def tile_bounds(spans: Int[Array, "batch tiles 2 row"]) -> Int[Array, "batch tiles 4"]:
    """Of a tile's spans: least first, greatest last, greatest first and least last index.

    A tile sees nothing outside the first two, and all of it sees what lies in the other two.
    """
    first, last = spans[:, :, 0], spans[:, :, 1]
    return jnp.stack([first.min(-1), last.max(-1), first.max(-1), last.min(-1)], axis=-1)


def visited(
    bounds: Int[Array, "batch tiles 4"], length: int, block: int
) -> Bool[Array, "batch tiles blocks"]:
    """Whether a tile's product with a block of keys is computed, forward and backward alike."""
    begin = jnp.arange(0, length, block)
    low, high = bounds[..., :1], bounds[..., 1:2]
    return (low < begin + block) & (high >= begin)
