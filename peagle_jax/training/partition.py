"""Sequence partitioning (P-EAGLE, arXiv 2602.01469, Algorithm 1): gradients segment by segment.

A sequence is cut into S segments and trained on one after the other, so that only one
segment's activations exist at a time; the gradient is that of the whole. Chains stay whole in
one segment, so segments meet at one place only: rows see the depth-0 keys and values of
earlier segments. Depth 0 depends on depth 0 alone, in every layer. Therefore

- forward, over depth 0 alone: each segment's keys and values are computed from the ones
  before it and kept;
- backward, from the last segment to the first: each segment's loss is differentiated with
  respect to the parameters and to the kept keys and values that it saw. What later segments
  left on its own keys and values goes in as their cotangent.

What keeping costs: keys and values of depth 0 at every position and in every layer, and their
cotangents in float32, `2 * layers * length * kv_heads * head_dim` values of each; and a second
forward pass over depth 0 of all segments but the last, without chains, losses and head: at
most a tenth of a step's layers at K = 8 and r = 0.7. Computing them anew instead would run
depth 0 of all earlier segments in every segment, forward and backward: (S - 1) / 2 times the
depth-0 part of a step in work, and activations that grow with the sequence again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from peagle_jax.training.masks import Kept, read_rows, write_rows

# (parameters, keys and values kept, segment's index) -> the segment's own keys and values
KeysOf = Callable[[Any, Kept, Array], Kept]
# ... -> ((loss, the segment's own keys and values), sums to be added up)
LossOf = Callable[[Any, Kept, Array], tuple[tuple[Array, Kept], Any]]


def accumulate(
    loss_of: LossOf,
    keys_of: KeysOf,
    trained: Any,
    kept: Kept,
    segments: int,
    denominator: Float[Array, ""] | float,
) -> tuple[Float[Array, ""], Any, Any]:
    """The sum of all segments' losses over `denominator`, their sums, and the gradient.

    `segments` = 1 is the plain gradient: one pass, nothing computed twice.

    Args:
      loss_of: a segment's loss; it may look at rows of `kept` before its own.
      keys_of: the same segment's own keys and values, by a pass over depth 0 alone.
      kept: room for keys and values at every index; the segments cut its third axis evenly.

    Returns:
      (loss, sums, gradient like `trained`).
    """
    length = kept[0].keys.shape[2]
    assert length % segments == 0
    size = length // segments

    def keep(filled: Kept, index: Array) -> tuple[Kept, None]:
        return write_rows(filled, keys_of(trained, filled, index), index * size), None

    if segments > 1:
        kept, _ = jax.lax.scan(keep, kept, jnp.arange(segments - 1))

    scale = 1 / jnp.asarray(denominator, jnp.float32)

    def add_segment(carry: Any, index: Array) -> tuple[Any, None]:
        total, owed = carry

        def loss_here(trained: Any, kept: Kept) -> tuple[tuple[Array, Kept], Any]:
            return loss_of(trained, kept, index)

        (loss, own), pull_back, sums = jax.vjp(loss_here, trained, kept, has_aux=True)
        cotangent = jax.tree.map(
            lambda asked, made: asked.astype(made.dtype), read_rows(owed, index * size, size), own
        )
        gradient, seen = pull_back((scale, cotangent))
        total = jax.tree.map(jnp.add, total, (loss, sums, gradient))
        # What this segment saw are the keys of earlier ones: its own rows and later ones get 0.
        return (total, jax.tree.map(lambda a, b: a + b.astype(a.dtype), owed, seen)), None

    _, sums = jax.eval_shape(loss_of, trained, kept, jnp.zeros((), jnp.int32))
    zeros = (jnp.zeros(()), jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), sums))
    start = (*zeros, jax.tree.map(jnp.zeros_like, trained))
    owed = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), kept)
    backwards = jnp.arange(segments - 1, -1, -1)
    ((loss, sums, gradient), _), _ = jax.lax.scan(add_segment, (start, owed), backwards)
    return loss * scale, sums, gradient
