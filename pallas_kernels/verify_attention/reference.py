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
    position = (start[:, None] + jnp.arange(rows))[:, :, None]
    slot = jnp.arange(capacity)
    visible = slot <= position
    if window is not None:
        visible &= slot > position - window
    scores = jnp.where(visible[:, None, None], scores, MASKED)
    weights = jax.nn.softmax(scores, axis=-1).astype(values.dtype)
    weights = weights.reshape(batch, kv_heads, group * rows, capacity)
    out = jnp.einsum("bkrs,bksd->bkrd", weights, values, preferred_element_type=jnp.float32)
    out = out.reshape(batch, kv_heads, group, rows, dim).transpose(0, 3, 1, 2, 4)
    return out.reshape(batch, rows, heads, dim).astype(q.dtype)
