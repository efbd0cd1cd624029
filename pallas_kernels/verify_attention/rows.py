"""The tile of query rows that a key head sees, and what each row may see.

All query heads of a group share their key head, so that their rows form one matrix: row
`g * rows + r` of a tile is query row r of the group's head g.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

MASKED = -1e30  # finite: a fully masked row would turn -inf into NaN


def group_rows(
    q: Float[Array, "batch rows heads dim"], kv_heads: int, tile: int = 1
) -> Float[Array, "batch kv_heads tile_rows dim"]:
    """Scaled queries, a tile a key head, padded with zero rows to a multiple of `tile`."""
    batch, rows, heads, dim = q.shape
    group = heads // kv_heads
    grouped = (q * dim**-0.5).reshape(batch, rows, kv_heads, group, dim)
    grouped = grouped.transpose(0, 2, 3, 1, 4).reshape(batch, kv_heads, group * rows, dim)
    pad = -(group * rows) % tile
    return jnp.pad(grouped, ((0, 0), (0, 0), (0, pad), (0, 0))) if pad else grouped


def ungroup_rows(
    out: Float[Array, "batch kv_heads tile_rows dim"], rows: int, heads: int
) -> Float[Array, "batch rows heads dim"]:
    """The inverse of `group_rows`, without the scale."""
    batch, kv_heads, _, dim = out.shape
    group = heads // kv_heads
    out = out[:, :, : group * rows].reshape(batch, kv_heads, group, rows, dim)
    return out.transpose(0, 3, 1, 2, 4).reshape(batch, rows, heads, dim)


def group_sinks(
    sinks: Float[Array, "heads"], kv_heads: int, rows: int, tile: int = 1
) -> Float[Array, "kv_heads tile_rows"]:
    """A sink score for every row of a tile, float32."""
    grouped = jnp.repeat(sinks.astype(jnp.float32).reshape(kv_heads, -1), rows, axis=1)
    return jnp.pad(grouped, ((0, 0), (0, -grouped.shape[1] % tile)))


def pack_tree(
    tree: Bool[Array, "batch rows rows"], group: int, tile: int = 1
) -> Int[Array, "batch tile_rows words"]:
    """A tree mask as bits: word 0 is the row's depth, bit j of word 1 + w its view of row 32w + j.

    A row's depth is its position less `start`: its ancestors among the new rows.
    """
    batch, rows, _ = tree.shape
    words = -(-rows // 32)
    padded = jnp.pad(tree, ((0, 0), (0, 0), (0, 32 * words - rows)))
    bits = padded.reshape(batch, rows, words, 32).astype(jnp.uint32) << jnp.arange(
        32, dtype=jnp.uint32
    )
    packed = jax.lax.bitcast_convert_type(jnp.sum(bits, axis=-1, dtype=jnp.uint32), jnp.int32)
    depth = jnp.sum(tree, axis=-1, dtype=jnp.int32)[..., None] - 1
    packed = jnp.tile(jnp.concatenate([depth, packed], axis=-1), (1, group, 1))
    return jnp.pad(packed, ((0, 0), (0, -packed.shape[1] % tile), (0, 0)))


def visible(
    position: Int[Array, "1 slots"],
    row: Int[Array, "tile_rows 1"],
    start: Int[Array, ""],
    rows: int,
    window: int | None,
    tree: list[Array] | None,
) -> Bool[Array, "tile_rows slots"]:
    """Whether each row of a tile sees each position of a block; used inside kernels.

    Args:
      position: position of each slot.
      row: query row of each row of the tile, `0 .. rows - 1`.
      start: position of the sequence's first row.
      tree: the words of `pack_tree`, each `[tile_rows, 1]`, None for a chain.
    """
    if tree is None:
        seen = position <= start + row
        return seen if window is None else seen & (position > start + row - window)
    depth, *words = tree
    old = position < start
    if window is not None:
        old = old & (position > start + depth - window)
    new = position - start
    word = words[0] if len(words) == 1 else jnp.where(new < 32, words[0], words[1])
    bit = jax.lax.shift_right_logical(
        jnp.broadcast_to(word, (word.shape[0], new.shape[1])),
        jnp.broadcast_to(new & 31, (word.shape[0], new.shape[1])),
    )
    return old | ((new >= 0) & (new < rows) & ((bit & 1) == 1))
