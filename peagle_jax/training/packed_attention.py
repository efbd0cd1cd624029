"""Attention among packed documents, and along chains of guesses that start in them.

A row at index i of its sequence sees the rows up to i of its own document. Chains: in an
autoregressive drafter's pass j, the row that started at index i stands j positions further on,
sees what its start saw, and its own rows of passes 1 .. j: what it would have in its cache when
decoding. Rows of a document are neighbours, so a distance of indices is one of positions.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from peagle_jax.models.attention import Attend

KeyValue = tuple[
    Float[Array, "batch length kv_heads dim"], Float[Array, "batch length kv_heads dim"]
]

MASKED = -1e30  # finite: -inf would turn a row that sees nothing (padding) into NaN
QUERY_BLOCK = 512  # rows whose scores exist at once


def attend_packed(
    documents: Int[Array, "batch length"],
    window: int | None,
    earlier: tuple[KeyValue, ...] = (),
    query_block: int = QUERY_BLOCK,
) -> Attend:
    """Attention of one pass over packed documents; carries the pass's own (keys, values).

    Memory grows with `length * query_block`, in the backward pass too.

    Args:
      documents: document of every row; rows see only their own.
      window: sliding window in tokens (a row sees itself and `window - 1` positions before).
      earlier: (keys, values) that this layer carried in passes 0 .. j-1; the call is pass j.
    """
    depth = len(earlier)

    def attend(q: Array, k: Array, v: Array) -> tuple[Array, KeyValue]:
        passes = (*earlier, (k, v))
        keys, values = passes[0]
        # Of the chain, guesses `window` or more positions back are out of sight.
        chain = passes[1:] if window is None else passes[max(1, depth - window + 1) :]
        chain_keys = jnp.stack([one for one, _ in chain], 2) if chain else k[:, :, None][:, :, :0]
        chain_values = jnp.stack([one for _, one in chain], 2) if chain else chain_keys
        out = _in_query_blocks(
            q, keys, values, chain_keys, chain_values, documents, window, depth, query_block
        )
        return out, (k, v)

    return attend


def _in_query_blocks(
    q: Float[Array, "batch length heads dim"],
    keys: Float[Array, "batch length kv_heads dim"],
    values: Float[Array, "batch length kv_heads dim"],
    chain_keys: Float[Array, "batch length chain kv_heads dim"],
    chain_values: Float[Array, "batch length chain kv_heads dim"],
    documents: Int[Array, "batch length"],
    window: int | None,
    depth: int,
    query_block: int,
) -> Float[Array, "batch length heads dim"]:
    length = q.shape[1]
    blocks = -(-length // query_block)
    size = -(-length // blocks)
    index = jnp.arange(length)

    def one_block(inputs: tuple[Array, Array, Array, Array, Array]) -> Array:
        rows, row_documents, at, own_keys, own_values = inputs
        at = at[0]
        visible = (row_documents[:, :, None] == documents[:, None, :]) & (index <= at[:, None])
        if window is not None:
            visible &= index > at[:, None] + depth - window
        return _attention(rows, keys, values, own_keys, own_values, visible)

    def split(x: Array) -> Array:
        padded = jnp.pad(x, ((0, 0), (0, blocks * size - length), *[(0, 0)] * (x.ndim - 2)))
        return jnp.moveaxis(padded.reshape(x.shape[0], blocks, size, *x.shape[2:]), 1, 0)

    inputs = (q, documents, index[None], chain_keys, chain_values)
    if blocks == 1:
        return one_block(inputs)
    # The backward pass computes a block's scores again instead of keeping them.
    out = jax.lax.map(jax.checkpoint(one_block, prevent_cse=False), jax.tree.map(split, inputs))
    return jnp.moveaxis(out, 0, 1).reshape(q.shape[0], -1, *q.shape[2:])[:, :length]


def _attention(
    q: Float[Array, "batch rows heads dim"],
    keys: Float[Array, "batch length kv_heads dim"],
    values: Float[Array, "batch length kv_heads dim"],
    chain_keys: Float[Array, "batch rows chain kv_heads dim"],
    chain_values: Float[Array, "batch rows chain kv_heads dim"],
    visible: Bool[Array, "batch rows length"],
) -> Float[Array, "batch rows heads dim"]:
    """Softmax, in float32, over the visible keys and each row's own chain."""
    batch, rows, heads, dim = q.shape
    length, kv_heads = keys.shape[1:3]
    grouped = (q * dim**-0.5).reshape(batch, rows, kv_heads, heads // kv_heads, dim)

    def product(equation: str, a: Array, b: Array) -> Array:
        return jnp.einsum(equation, a, b, preferred_element_type=jnp.float32)

    scores = product("brkgd,blkd->bkgrl", grouped, keys)
    scores = jnp.where(visible[:, None, None], scores, MASKED)
    chain_scores = product("brkgd,brckd->bkgrc", grouped, chain_keys)
    weights = jax.nn.softmax(jnp.concatenate([scores, chain_scores], axis=-1), axis=-1)
    weights = weights.astype(values.dtype)
    out = product("bkgrl,blkd->brkgd", weights[..., :length], values)
    out += product("bkgrc,brckd->brkgd", weights[..., length:], chain_values)
    return out.reshape(batch, rows, heads, dim).astype(q.dtype)
