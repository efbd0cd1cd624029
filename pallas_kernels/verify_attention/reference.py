"""Plain-JAX verification attention: the meaning every kernel is tested against."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.verify_attention.rows import MASKED, group_rows, ungroup_rows


def verify_attention(
    q: Float[Array, "batch rows heads dim"],
    keys: Float[Array, "batch kv_heads capacity dim"],
    values: Float[Array, "batch kv_heads capacity dim"],
    start: Int[Array, "batch"],
    *,
    window: int | None = None,
    sinks: Float[Array, "heads"] | None = None,
    tree: Bool[Array, "batch rows rows"] | None = None,
) -> Float[Array, "batch rows heads dim"]:
    """See `pallas_kernels.verify_attention.verify_attention`."""
    batch, rows, heads, _ = q.shape
    kv_heads, capacity = keys.shape[1:3]
    group = heads // kv_heads
    keys, values = keys.astype(q.dtype), values.astype(q.dtype)
    scores = jnp.einsum(
        "bkrd,bksd->bkrs", group_rows(q, kv_heads), keys, preferred_element_type=jnp.float32
    ).reshape(batch, kv_heads, group, rows, capacity)
    seen = _visible(start, rows, capacity, window, tree)
    scores = jnp.where(seen[:, None, None], scores, MASKED)
    if sinks is None:
        weights = jax.nn.softmax(scores, axis=-1)
    else:
        weights = _softmax_with_sink(scores, sinks.reshape(kv_heads, group, 1, 1))
    weights = weights.astype(values.dtype).reshape(batch, kv_heads, group * rows, capacity)
    out = jnp.einsum("bkrs,bksd->bkrd", weights, values, preferred_element_type=jnp.float32)
    return ungroup_rows(out, rows, heads).astype(q.dtype)


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
    """See `pallas_kernels.verify_attention.verify_attention_paged`: gathers, then attends."""
    keys, values = (_gather(pages, page_table) for pages in (key_pages, value_pages))
    return verify_attention(q, keys, values, start, window=window, sinks=sinks, tree=tree)


def _gather(pages: Array, page_table: Array) -> Array:
    # Entries past a sequence's length may hold anything; their slots are masked later.
    table = jnp.clip(page_table, 0, pages.shape[0] - 1)
    batch, count = table.shape
    _, kv_heads, page_size, dim = pages.shape
    gathered = pages[table].swapaxes(1, 2)
    return gathered.reshape(batch, kv_heads, count * page_size, dim)


def _visible(
    start: Array, rows: int, capacity: int, window: int | None, tree: Array | None
) -> Array:
    """Whether row r sees slot s, `[batch, rows, capacity]`."""
    position = (start[:, None] + jnp.arange(rows))[:, :, None]
    slot = jnp.arange(capacity)
    if window is None and tree is None:
        return slot <= position
    last = start[:, None, None] + rows - 1
    # The newest position that slot s can hold; below 0 in a slot that is not written yet.
    held = slot if window is None else last - (last - slot) % capacity
    if tree is None:
        assert window is not None
        return (held >= 0) & (held <= position) & (held > position - window)
    first = start[:, None, None]
    depth = jnp.sum(tree, axis=-1, dtype=start.dtype)[..., None] - 1
    old = (held >= 0) & (held < first)
    if window is not None:
        old &= held > first + depth - window
    new = jnp.broadcast_to(held - first, (start.shape[0], rows, capacity))
    among_new = jnp.take_along_axis(tree, jnp.clip(new, 0, rows - 1), axis=-1)
    return old | ((new >= 0) & (new < rows) & among_new)


def _softmax_with_sink(scores: Array, sink: Array) -> Array:
    """Softmax over the last axis beside one more score that takes weight and gives nothing."""
    sink = sink.astype(scores.dtype)
    highest = jnp.maximum(jnp.max(scores, axis=-1, keepdims=True), sink)
    weights = jnp.exp(scores - highest)
    return weights / (jnp.sum(weights, axis=-1, keepdims=True) + jnp.exp(sink - highest))
