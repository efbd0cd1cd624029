"""Plain-JAX attention over depth 0: the meaning every kernel is tested against, and CPU's path.

Rows are taken in blocks; a block's scores over all keys exist at a time, in the backward pass too.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels.cod_attention.predicate import MASKED, visible

# Scores that exist at once: rows are taken in blocks of as many as give this many, all heads
# together, so that a block's few arrays stay in a CPU's cache and out of the way of the rest.
SCORES = 1 << 21


def cod_attention(
    q: Float[Array, "batch rows heads dim"],
    keys: Float[Array, "batch kv_heads length dim"],
    values: Float[Array, "batch kv_heads length dim"],
    anchor: Int[Array, "batch rows"],
    depth: Int[Array, "rows"] | Int[np.ndarray, "rows"],
    documents: Int[Array, "batch length"],
    own: Float[Array, "batch rows kv_heads group own"],
    *,
    window: int | None = None,
    query_block: int | None = None,
) -> tuple[Float[Array, "batch rows heads dim"], Float[Array, "batch rows kv_heads group own"]]:
    """See `pallas_kernels.cod_attention.cod_attention`.

    query_block: rows whose scores exist at once; None = as many as SCORES allows, in eights.
    """
    batch, num_rows, heads, dim = q.shape
    kv_heads, length = keys.shape[1:3]
    group = heads // kv_heads
    query_block = query_block or max(8, SCORES // (batch * heads * length) // 8 * 8)
    blocks = -(-num_rows // query_block)
    size = -(-num_rows // blocks)
    index = jnp.arange(length)
    # Blocks see a cast of a float32 copy: what they add to the gradient of keys and values is
    # then added in float32. A sum of a thousand blocks in bfloat16 is wrong by percents.
    wide = keys.astype(jnp.float32), values.astype(jnp.float32)
    dtype = values.dtype

    def one_block(block: tuple[Array, ...]) -> tuple[Array, Array]:
        rows, at, deep, extra = block
        keys, values = (x.astype(dtype) for x in wide)
        document = jnp.take_along_axis(documents, at, axis=1)
        seen = visible(
            at[:, :, None],
            deep[:, :, None],
            index,
            0,
            document[:, :, None] == documents[:, None],
            window,
        )
        # All query heads of a group are rows of one product per key head.
        grouped = (rows * dim**-0.5).reshape(batch, size, kv_heads, group, dim)
        grouped = grouped.transpose(0, 2, 3, 1, 4).reshape(batch, kv_heads, group * size, dim)
        scores = _product("bkrd,bktd->bkrt", grouped, keys)
        scores = scores.reshape(batch, kv_heads, group, size, length)
        scores = jnp.where(seen[:, None, None], scores, MASKED)
        extra = extra.transpose(0, 2, 3, 1, 4)
        top = jnp.max(scores, axis=-1, keepdims=True)
        top = jnp.maximum(top, jnp.max(extra, axis=-1, keepdims=True, initial=MASKED))
        top = jax.lax.stop_gradient(top)
        scores, extra = jnp.exp(scores - top), jnp.exp(extra - top)
        total = jnp.sum(scores, -1, keepdims=True) + jnp.sum(extra, -1, keepdims=True)
        scores = scores.astype(values.dtype).reshape(batch, kv_heads, group * size, length)
        out = _product("bkrt,bktd->bkrd", scores, values)
        out = out.reshape(batch, kv_heads, group, size, dim) / total
        out = out.transpose(0, 3, 1, 2, 4).reshape(batch, size, heads, dim).astype(q.dtype)
        return out, (extra / total).transpose(0, 3, 1, 2, 4)

    def split(x: Array) -> Array:
        padded = jnp.pad(x, ((0, 0), (0, blocks * size - num_rows), *[(0, 0)] * (x.ndim - 2)))
        return jnp.moveaxis(padded.reshape(x.shape[0], blocks, size, *x.shape[2:]), 1, 0)

    inputs = jax.tree.map(split, (q, anchor, jnp.asarray(depth)[None], own))
    # The backward pass computes a block's scores again instead of keeping them.
    outputs = jax.lax.map(jax.checkpoint(one_block, prevent_cse=False), inputs)
    out, weights = (
        jnp.moveaxis(x, 0, 1).reshape(batch, blocks * size, *x.shape[3:])[:, :num_rows]
        for x in outputs
    )
    return out, weights


def _product(equation: str, a: Array, b: Array) -> Array:
    return jnp.einsum(equation, a, b, preferred_element_type=jnp.float32)
