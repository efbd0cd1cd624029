"""What an element of training is compared with: the end of every objective.

Element (anchor a, depth d) is the row at index a + d of a draft whose last real row stands at
a; it predicts the token two further on, as the target does one further on.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from peagle_jax.training.batch import PackedBatch
from peagle_jax.training.cod import bears_loss
from peagle_jax.training.loss import DepthSums, LossConfig, blocked_loss
from peagle_jax.training.networks import Networks


def element_loss(
    networks: Networks,
    batch: PackedBatch,
    target_hidden: Float[Array, "batch length target_hidden"],
    stream: Float[Array, "batch rows hidden"],
    anchor: Int[Array, "batch rows"],
    depth: Int[np.ndarray, "rows"],
    valid: Bool[Array, "batch rows"],
    num_depths: int,
    config: LossConfig,
) -> tuple[Float[Array, ""], DepthSums]:
    """The sum of all elements' weighted losses, and sums by depth; see `loss.blocked_loss`.

    An element counts where it is valid and its token is in the anchor's document and in an
    answer.

    Args:
      target_hidden: after the target's final norm, by index.
      stream: the drafter's residual stream of every element.
    """
    rows, length = batch.tokens.shape

    def take(x: Array, index: Int[Array, "batch rows"]) -> Array:
        return jnp.take_along_axis(x, index, axis=1)

    at = jnp.minimum(anchor + depth, length - 1)
    in_document = take(batch.documents, at) == take(batch.documents, anchor)
    counts = valid & in_document & take(bears_loss(batch), at)
    following = jnp.minimum(at + 1, length - 1)
    labels = networks.draft_ids(jnp.roll(batch.tokens, -2, axis=1))
    return blocked_loss(
        networks.draft_logits,
        networks.head_params,
        networks.target_logits,
        stream.reshape(-1, stream.shape[-1]),
        target_hidden.reshape(-1, target_hidden.shape[-1]),
        (length * jnp.arange(rows)[:, None] + following).reshape(-1),
        take(labels, at).reshape(-1),
        counts.reshape(-1).astype(jnp.float32),
        jnp.tile(depth, rows),
        num_depths,
        config,
    )
