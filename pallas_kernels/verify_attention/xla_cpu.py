"""Attention over pages for CPUs, in plain JAX: loops over the pages that sequences have.

Gathering the pages of all sequences first, as the reference does, writes and reads again as much
memory as the cache itself, for every sequence as much as the longest one has; on a CPU that costs
more than the matrix products. Here blocks of pages are read once and stay in a core's own cache,
and a sequence has as many of them as it needs. Softmaxes of blocks are joined as in flash
attention (https://arxiv.org/abs/2205.14135).
"""

from __future__ import annotations

from typing import Any, NamedTuple

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

BLOCK_SLOTS = 128
# Query rows of a key head from which blocks are taken one by one, each large enough to keep all
# cores busy; of fewer rows several blocks, of whatever sequences, are computed together.
MANY_ROWS = 32
BLOCKS_TOGETHER = 8


class _Part(NamedTuple):
    """Attention to some of the slots: out is a sum of values, total that of its weights, which
    are relative to the highest score."""

    highest: Float[Array, "*parts kv_heads tile_rows"]
    total: Float[Array, "*parts kv_heads tile_rows"]
    out: Float[Array, "*parts kv_heads tile_rows dim"]


class _Queries(NamedTuple):
    """What is known of each sequence, or of the sequence of each block."""

    rows: Float[Array, "batch kv_heads tile_rows dim"]
    start: Int[Array, "batch"]
    words: Int[Array, "batch tile_rows words"] | None  # a tree, see `pack_tree`

    def at(self, sequence: Int[Array, "blocks"]) -> _Queries:
        """Those of the sequence of each block."""
        return jax.tree.map(lambda x: jnp.take(x, sequence, axis=0, mode="clip"), self)


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
    batch, rows, heads, _ = q.shape
    kv_heads, page_size = key_pages.shape[1:3]
    group = heads // kv_heads
    pages = min(max(1, BLOCK_SLOTS // page_size), page_table.shape[1])
    # Whole blocks; what is added lies past every sequence.
    table = jnp.pad(page_table, ((0, 0), (0, -page_table.shape[1] % pages)))
    table = table.reshape(batch, -1, pages)
    words = None if tree is None else pack_tree(tree, group)
    queries = _Queries(group_rows(q, kv_heads), start, words)
    span = pages * page_size
    first = jnp.zeros_like(start)
    if window is not None:
        first = jnp.maximum(start - window + 1, 0) // span
    last = jnp.minimum((start + rows + span - 1) // span, table.shape[1])
    many = group * rows >= MANY_ROWS

    def attend(
        queries: _Queries, ids: Int[Array, "blocks pages"], index: Int[Array, "blocks"]
    ) -> _Part:
        return _attend(queries, key_pages, value_pages, ids, index, rows, window, together=many)

    parts = (_one_by_one if many else _together)(attend, queries, table, first, last)
    if sinks is not None:
        score = group_sinks(sinks, kv_heads, rows)
        parts = _join(parts, _Part(score, jnp.ones_like(score), jnp.zeros_like(parts.out)))
    return ungroup_rows(parts.out / parts.total[..., None], rows, heads).astype(q.dtype)


def _attend(
    queries: _Queries,
    key_pages: Array,
    value_pages: Array,
    ids: Int[Array, "blocks pages"],
    index: Int[Array, "blocks"],
    rows: int,
    window: int | None,
    *,
    together: bool,
) -> _Part:
    """Each block's queries attending to it. Block `index` of a sequence is in the pages `ids`.

    together: the keys of a block are laid together, head by head. Pages hold them head by head
        too, but one page after the other, and only many rows make up for the copy.
    """
    blocks, pages = ids.shape
    _, kv_heads, page_size, dim = key_pages.shape
    span, dtype = pages * page_size, queries.rows.dtype
    pieces = 1 if together else pages

    def read(pool: Array) -> Float[Array, "blocks pieces kv_heads slots dim"]:
        block = jnp.take(pool, ids, axis=0, mode="clip").astype(dtype)
        if together:
            block = block.swapaxes(1, 2).reshape(blocks, 1, kv_heads, span, dim)
        return block

    def seen_in(index: Array, start: Array, words: Array | None) -> Bool[Array, "tile_rows span"]:
        position = (index * span + jnp.arange(span, dtype=start.dtype))[None]
        tile_rows = queries.rows.shape[2]
        row = jnp.tile(jnp.arange(rows, dtype=start.dtype), tile_rows // rows)[:, None]
        tree = None if words is None else list(jnp.split(words, words.shape[-1], axis=-1))
        return visible(position, row, start, rows, window, tree)

    seen = jax.vmap(seen_in)(index, queries.start, queries.words)
    # Weights of zero do not silence what is no number in slots that no row sees.
    slot = index[:, None] * span + jnp.arange(span, dtype=index.dtype) - queries.start[:, None]
    held = slot < rows if window is None else (slot < rows) & (slot > -window)
    held = held.reshape(blocks, pieces, 1, span // pieces, 1)
    values = jnp.where(held, read(value_pages), 0)
    scores = jnp.einsum(
        "bkrd,bpksd->bpkrs", queries.rows, read(key_pages), preferred_element_type=jnp.float32
    )
    by_piece = seen.reshape(blocks, -1, pieces, span // pieces).swapaxes(1, 2)
    scores = jnp.where(by_piece[:, :, None], scores, MASKED)
    highest = jnp.max(scores, axis=(1, 4))
    weights = jnp.exp(scores - highest[:, None, :, :, None])
    out = jnp.einsum(
        "bpkrs,bpksd->bpkrd", weights.astype(dtype), values, preferred_element_type=jnp.float32
    )
    return _Part(highest, jnp.sum(weights, axis=(1, 4)), jnp.sum(out, axis=1))


def _join(one: _Part, other: _Part) -> _Part:
    """Attention to the slots of both."""
    highest = jnp.maximum(one.highest, other.highest)
    total, out = jnp.zeros_like(one.total), jnp.zeros_like(one.out)
    for part in (one, other):
        share = jnp.exp(part.highest - highest)
        total, out = total + part.total * share, out + part.out * share[..., None]
    return _Part(highest, total, out)


def _nothing(queries: _Queries, parts: int) -> _Part:
    """No slots."""
    shape = (parts, *queries.rows.shape[1:])
    # Zero, also where a query is no number, but no constant: those of all layers would be one, and
    # copied for each.
    zero = (queries.rows[0, 0, 0, 0] > jnp.inf).astype(jnp.float32)
    return _Part(
        jnp.broadcast_to(zero + MASKED, shape[:-1]),
        jnp.broadcast_to(zero, shape[:-1]),
        jnp.broadcast_to(zero, shape),
    )


def _one_by_one(attend: Any, queries: _Queries, table: Array, first: Array, last: Array) -> _Part:
    """Sequence by sequence, each block joined to those before it."""

    def of_sequence(sequence: Array) -> _Part:
        one = queries.at(sequence[None])

        def block(index: Array, part: _Part) -> _Part:
            return _join(part, attend(one, table[sequence, index][None], index[None]))

        part = jax.lax.fori_loop(first[sequence], last[sequence], block, _nothing(one, 1))
        return jax.tree.map(lambda x: x[0], part)

    return jax.lax.map(of_sequence, jnp.arange(table.shape[0], dtype=first.dtype))


def _together(attend: Any, queries: _Queries, table: Array, first: Array, last: Array) -> _Part:
    """Blocks of all sequences in one row, a few at a time; a sequence's are joined at the end."""
    batch, most, _ = table.shape
    counts = last - first
    ends = jnp.cumsum(counts)
    size = min(BLOCKS_TOGETHER, batch * most)
    item = jnp.arange(batch * most + size, dtype=first.dtype)
    sequence = jnp.minimum(jnp.searchsorted(ends, item, side="right"), batch - 1)
    sequence = sequence.astype(first.dtype)
    index = first[sequence] + item - (ends - counts)[sequence]
    index = jnp.minimum(index, most - 1)  # past the last item anything is computed
    ids = table[sequence, index]

    def some(turn: Array, parts: _Part) -> _Part:
        at = turn * size
        mine, pages, number = (
            jax.lax.dynamic_slice_in_dim(x, at, size) for x in (sequence, ids, index)
        )
        new = attend(queries.at(mine), pages, number)
        return jax.tree.map(
            lambda old, x: jax.lax.dynamic_update_slice_in_dim(old, x, at, 0), parts, new
        )

    turns = (ends[-1] + size - 1) // size
    parts = jax.lax.fori_loop(0, turns, some, _nothing(queries, item.shape[0]))
    place = (ends - counts)[:, None] + jnp.arange(most, dtype=first.dtype)
    mine = (jnp.arange(most) < counts[:, None])[..., None, None]
    # What stands behind a sequence's parts is its neighbour's, and may be no number.
    highest = jnp.where(mine, parts.highest[place], MASKED)
    total = jnp.where(mine, parts.total[place], 0)
    out = jnp.where(mine[..., None], parts.out[place], 0)
    top = jnp.max(highest, axis=1)
    share = jnp.exp(highest - top[:, None])
    return _Part(top, jnp.sum(share * total, axis=1), jnp.sum(share[..., None] * out, axis=1))
