"""Attention over pages for CPUs, in plain JAX: a loop over each sequence's own pages.

Gathering the pages of all sequences first, as the reference does, writes and reads again as much
memory as the cache itself, for every sequence as much as the longest one has; on a CPU that costs
more than the matrix products. Here a block of pages is read once, stays in a core's own cache, and
a sequence has as many blocks as it needs. The softmax is taken block by block, as in
flash attention (https://arxiv.org/abs/2205.14135).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.verify_attention.rows import (
    MASKED,
    group_rows,
    group_sinks,
    pack_tree,
    ungroup_rows,
    visible,
)

# Slots of a block. Keys and values of a few heads fit a core's cache; fewer make more calls of
# small operations.
BLOCK_SLOTS = 128


def verify_attention_paged(
    q: Float[Array, "batch rows heads dim"],
    key_pages: Float[Array, "pages kv_heads page_size dim"],
    value_pages: Float[Array, "pages kv_heads page_size dim"],
    page_table: Int[Array, "batch pages_per_sequence"],
    start: Int[Array, "batch"],
    *,
    window: int | None = None,
    sinks: Float[Array, "heads"] | None = None,
    tree: Bool[Array, "batch rows rows"] | None = None,
) -> Float[Array, "batch rows heads dim"]:
    """See `pallas_kernels.verify_attention.verify_attention_paged`."""
    rows, heads = q.shape[1:3]
    kv_heads, page_size = key_pages.shape[1:3]
    group = heads // kv_heads
    pages = min(max(1, BLOCK_SLOTS // page_size), page_table.shape[1])
    span = pages * page_size
    # Whole blocks; what is added lies past every sequence.
    table = jnp.pad(page_table, ((0, 0), (0, -page_table.shape[1] % pages)))
    row = jnp.tile(jnp.arange(rows, dtype=start.dtype), group)[:, None]
    words = None if tree is None else pack_tree(tree, group)
    tile = (kv_heads, group * rows)
    highest, total = jnp.full(tile, MASKED), jnp.zeros(tile)
    if sinks is not None:
        highest = group_sinks(sinks, kv_heads, rows)
        total = jnp.ones_like(highest)

    def attend(sequence: tuple[Array, Array, Array, Array | None]) -> Array:
        q, table, start, words = sequence
        seen_by = None if words is None else list(jnp.split(words, words.shape[-1], axis=-1))

        def block(index: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            highest, total, out = carry
            ids = jax.lax.dynamic_slice_in_dim(table, index * pages, pages)
            keys, values = (
                jnp.take(x, ids, axis=0, mode="clip").astype(q.dtype)
                for x in (key_pages, value_pages)
            )
            position = (index * span + jnp.arange(span, dtype=start.dtype))[None]
            seen = visible(position, row, start, rows, window, seen_by)
            # Weights of zero do not silence what is no number in slots that no row sees.
            held = jnp.any(seen, axis=0).reshape(pages, 1, page_size, 1)
            values = jnp.where(held, values, 0)
            scores = jnp.einsum("krd,pksd->pkrs", q, keys, preferred_element_type=jnp.float32)
            by_page = seen.reshape(-1, pages, page_size).swapaxes(0, 1)[:, None]
            scores = jnp.where(by_page, scores, MASKED)
            new = jnp.maximum(highest, jnp.max(scores, axis=(0, 3)))
            weights = jnp.exp(scores - new[None, :, :, None])
            keep = jnp.exp(highest - new)
            more = jnp.einsum(
                "pkrs,pksd->pkrd",
                weights.astype(values.dtype),
                values,
                preferred_element_type=jnp.float32,
            )
            total = total * keep + jnp.sum(weights, axis=(0, 3))
            return new, total, out * keep[..., None] + jnp.sum(more, axis=0)

        first = 0 if window is None else jnp.maximum(start - window + 1, 0) // span
        last = jnp.minimum((start + rows + span - 1) // span, table.shape[0] // pages)
        out = jnp.zeros((*tile, q.shape[-1]))
        _, total_, out = jax.lax.fori_loop(first, last, block, (highest, total, out))
        return out / total_[..., None]

    out = jax.lax.map(attend, (group_rows(q, kv_heads), table, start, words))
    return ungroup_rows(out, rows, heads).astype(q.dtype)
