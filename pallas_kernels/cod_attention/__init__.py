"""Attention of drafter training: elements over the keys of depth 0, forward and backward."""

from __future__ import annotations

from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels.cod_attention import gpu, reference, shapes, tpu
from pallas_kernels.cod_attention.flash import Kernels, attend_tiles
from pallas_kernels.cod_attention.predicate import MASKED, visible, visible_spans
from pallas_kernels.cod_attention.shapes import GpuBlocks, TpuBlocks
from pallas_kernels.cod_attention.tiles import by_head, by_row, spans_to_tiles
from pallas_kernels.target import Implementation, choose, current_target

__all__ = ["MASKED", "GpuBlocks", "Implementation", "TpuBlocks", "cod_attention", "visible"]


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
    implementation: Implementation | None = None,
    blocks: TpuBlocks | GpuBlocks | None = None,
) -> tuple[Float[Array, "batch rows heads dim"], Float[Array, "batch rows kv_heads group own"]]:
    """Attention over depth 0, sharing its softmax with scores that are already there.

    Row r is element (anchor[r], depth[r]): of the keys at indices 0 .. length - 1 it sees those
    that `visible` shows, at depth 0, in its anchor's document. Differentiable in q, keys, values
    and own. Memory grows with rows plus length, not with their product.

    Args:
      q: rotated. heads is a multiple of kv_heads; head h's key head is `h // group`.
      keys, values: by index; in q's dtype.
      documents: of every index; the rows of one document are neighbours.
      own: float32; each row's scores over keys of its own, MASKED where there is none. With
        them, a row sees something.
      window: sliding window in positions.
      query_block: rows whose scores exist at once in the reference; None chooses.
      implementation: None picks by platform (see `pallas_kernels.target`); an explicit choice
        never falls back.
      blocks: tiling of the chosen kernel; None takes the tuned or the heuristic one.

    Returns:
      The part of the output that the keys of depth 0 give, in q's dtype, and the weights of
      `own`; softmax in float32.

    Raises:
      NotImplementedError: an explicit `implementation` that does not exist or does not cover
        these arguments on this device.
    """
    heads, dim = q.shape[2:]

    def limit() -> str | None:
        return shapes.limit(dim, q.dtype.name, keys.dtype.name, values.dtype.name)

    chosen = choose("cod_attention", implementation, {"pallas_tpu": limit, "pallas_gpu": limit})
    if chosen == "reference":
        return reference.cod_attention(
            q, keys, values, anchor, depth, documents, own, window=window, query_block=query_block
        )
    target = current_target()
    if blocks is None:
        problem = shapes.Problem(heads // keys.shape[1], dim, q.dtype.name)
        blocks = shapes.blocks(problem, target)
    backend: ModuleType = tpu if chosen == "pallas_tpu" else gpu
    kernels = Kernels(backend.forward, backend.backward, blocks, target)
    spans = visible_spans(anchor, jnp.asarray(depth), documents, window)
    return _flash(kernels, q, keys, values, spans, own)


def _flash(
    kernels: Kernels, q: Array, keys: Array, values: Array, spans: Array, own: Array
) -> tuple[Array, Array]:
    """Arrays turned, attended to and turned back; all but the middle is XLA's."""
    kv_heads, length = keys.shape[1:3]
    pad = ((0, 0), (0, 0), (0, 0), (0, -length % kernels.blocks.keys))
    turned = [jnp.pad(x.swapaxes(2, 3), pad) for x in (keys, values)]
    extra = jax.nn.logsumexp(own, axis=-1) if own.shape[-1] else jnp.full(own.shape[:-1], MASKED)
    out, total = attend_tiles(
        kernels,
        by_head(q, kv_heads),
        *turned,
        spans_to_tiles(spans, kernels.blocks.rows),
        extra.transpose(0, 2, 3, 1),
    )
    return by_row(out), jnp.exp(own - total.transpose(0, 3, 1, 2)[..., None])
