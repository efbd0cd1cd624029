"""Plain-JAX verification attention: the meaning every kernel is tested against."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

MASKED = -1e30  # finite: a fully masked row would turn -inf into NaN


def verify_attention(
    q: Float[Array, "batch rows heads dim"],
    keys: Float[Array, "batch kv_heads capacity dim"],
    values: Float[Array, "batch kv_heads capacity dim"],
    start: Int[Array, "batch"],
    *,
    window: int | None = None,
    sinks: Float[Array, "heads"] | None = None,
) -> Float[Array, "batch rows heads dim"]:
    """See `pallas_kernels.verify_attention.verify_attention`."""
    batch, rows, heads, dim = q.shape
    kv_heads, capacity = keys.shape[1:3]
    group = heads // kv_heads
    # All query heads of a group become rows of one matrix product per key head.
    grouped = q.reshape(batch, rows, kv_heads, group, dim).transpose(0, 2, 3, 1, 4)
    grouped = grouped.reshape(batch, kv_heads, group * rows, dim)
    scores = jnp.einsum(
        "bkrd,bksd->bkrs", grouped * dim**-0.5, keys, preferred_element_type=jnp.float32
    ).reshape(batch, kv_heads, group, rows, capacity)
    visible = _visible(start, rows, capacity, window)
    scores = jnp.where(visible[:, None, None], scores, MASKED)
    if sinks is None:
        weights = jax.nn.softmax(scores, axis=-1)
    else:
        weights = _softmax_with_sink(scores, sinks.reshape(kv_heads, group, 1, 1))
    weights = weights.astype(values.dtype).reshape(batch, kv_heads, group * rows, capacity)
    out = jnp.einsum("bkrs,bksd->bkrd", weights, values, preferred_element_type=jnp.float32)
    out = out.reshape(batch, kv_heads, group, rows, dim).transpose(0, 3, 1, 2, 4)
    return out.reshape(batch, rows, heads, dim).astype(q.dtype)


def _visible(start: Array, rows: int, capacity: int, window: int | None) -> Array:
    """Whether row r sees slot s, `[batch, rows, capacity]`."""
    position = (start[:, None] + jnp.arange(rows))[:, :, None]
    slot = jnp.arange(capacity)
    if window is None:
        return slot <= position
    # The newest position that slot s can hold; below 0 in a slot that is not written yet.
    last = start[:, None, None] + rows - 1
    held = last - (last - slot) % capacity
    return (held >= 0) & (held <= position) & (held > position - window)


def _softmax_with_sink(scores: Array, sink: Array) -> Array:
    """Softmax over the last axis beside one more score that takes weight and gives nothing."""
    sink = sink.astype(scores.dtype)
    highest = jnp.maximum(jnp.max(scores, axis=-1, keepdims=True), sink)
    weights = jnp.exp(scores - highest)
    return weights / (jnp.sum(weights, axis=-1, keepdims=True) + jnp.exp(sink - highest))
