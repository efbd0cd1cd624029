"""What a drafter learns from: the target's features and distributions on packed text."""

from __future__ import annotations

from typing import Any

import jax
from flax import struct
from jaxtyping import Array, Float, Int

from peagle_jax.config import ModelConfig
from peagle_jax.models.decoder import Decoder
from peagle_jax.training.batch import PackedBatch
from peagle_jax.training.packed_attention import attend_packed


@struct.dataclass
class TargetView:
    """The target at every position of a batch.

    features: residual streams at the asked depths, concatenated; the final hidden state where
        none was asked.
    hidden: after the final norm, for the target's logits of the next token.
    """

    features: Float[Array, "batch length raw"]
    hidden: Float[Array, "batch length hidden"]


def view_target(
    config: ModelConfig,
    params: dict[str, Any],
    batch: PackedBatch,
    aux_layer_ids: tuple[int, ...],
    dtype: Any,
) -> TargetView:
    """Runs the target over packed documents, each as if it were alone. No gradient passes."""
    block = config.block
    attends = [attend_packed(batch.documents, block.window(i)) for i in range(block.num_layers)]
    hidden, features, _ = Decoder(config, dtype).apply(
        {"params": params},
        batch.tokens,
        batch.positions,
        attends,
        aux_layer_ids,
        method="run_layers",
    )
    return jax.lax.stop_gradient(TargetView(features, hidden))


def target_head(
    config: ModelConfig,
    params: dict[str, Any],
    draft_to_target: Int[Array, "draft_vocab"] | None = None,
) -> Float[Array, "rows hidden"]:
    """The target's head `[out, in]`: its embedding where the two are tied.

    `draft_to_target` takes the rows of a draft vocabulary, in its order. That copies
    `draft_vocab * hidden` values: gather once, outside a loop over blocks of rows.
    """
    tied = config.tie_embeddings
    head = params["embed_tokens"]["embedding"] if tied else params["lm_head"]["kernel"]
    return head if draft_to_target is None else head[draft_to_target]
