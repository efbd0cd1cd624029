"""Attention of whole passes over packed documents: the target's, and an autoregressive drafter's.

In such a drafter's pass j the row at index i is element (anchor i, depth j) of
`cod_attention.visible`: it stands j positions further on and sees what it saw in pass 0, and its
own rows of passes 1 .. j. That is what it would find in its cache when decoding.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels.cod_attention import MASKED, cod_attention, visible
from peagle_jax.models.attention import Attend

KeyValue = tuple[
    Float[Array, "batch length kv_heads dim"], Float[Array, "batch length kv_heads dim"]
]


def attend_packed(
    documents: Int[Array, "batch length"],
    window: int | None,
    earlier: tuple[KeyValue, ...] = (),
    query_block: int | None = None,
) -> Attend:
    """Attention of one pass over every row; carries the pass's own (keys, values).

    A device's own kernel where it has one; else scores of `query_block` rows exist at a time, in
    the backward pass too.

    Args:
      documents: document of every row; rows see only their own.
      window: sliding window in tokens (a row sees itself and `window - 1` positions before).
      earlier: (keys, values) that this layer carried in passes 0 .. j-1; the call is pass j.
    """
    depth = len(earlier)

    def attend(q: Array, k: Array, v: Array, sinks: Array | None = None) -> tuple[Array, KeyValue]:
        (keys, values), *chain = (*earlier, (k, v))
        batch, length, heads, dim = q.shape
        kv_heads = k.shape[2]
        grouped = (q * dim**-0.5).reshape(batch, length, kv_heads, heads // kv_heads, dim)
        scores = jnp.zeros((*grouped.shape[:-1], 0), jnp.float32)
        if chain:
            of_passes = [_scores(grouped, own) for own, _ in chain]
            seen = visible(0, depth, 0, np.arange(1, depth + 1), True, window)
            scores = jnp.where(seen, jnp.stack(of_passes, axis=-1), MASKED)
        if sinks is not None:  # scores like those of the passes, with no value to add
            of_head = sinks.astype(jnp.float32).reshape(grouped.shape[2:4])[..., None]
            scores = jnp.concatenate(
                [scores, jnp.broadcast_to(of_head, (*grouped.shape[:-1], 1))], axis=-1
            )
        out, weights = cod_attention(
            q,
            jnp.swapaxes(keys, 1, 2),
            jnp.swapaxes(values, 1, 2),
            jnp.broadcast_to(jnp.arange(length), (batch, length)),
            np.full(length, depth, np.int32),
            documents,
            scores,
            window=window,
            query_block=query_block,
        )
        for index, (_, own) in enumerate(chain):
            part = weights[..., index, None] * own[:, :, :, None].astype(jnp.float32)
            out = out + part.reshape(out.shape).astype(out.dtype)
        return out, (k, v)

    return attend


def _scores(
    grouped: Float[Array, "batch length kv_heads group dim"],
    keys: Float[Array, "batch length kv_heads dim"],
) -> Float[Array, "batch length kv_heads group"]:
    """Every row's score over one key of its own, in float32."""
    return jnp.einsum("brkgd,brkd->brkg", grouped, keys, preferred_element_type=jnp.float32)
