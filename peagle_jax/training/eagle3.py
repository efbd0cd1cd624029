"""The EAGLE-3 objective (arXiv 2503.01840): training-time test, K passes as decoding makes them.

Pass 0 pairs the text's tokens with the target's features. Pass j stands one position further
on and is fed the streams of pass j - 1 in the features' place, so that the drafter learns to
go on from its own output; the tokens stay the text's. Rows keep the index of their anchor a:
in pass j row a stands at a + j, takes token x_{a+j+1} and predicts x_{a+j+2}.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from peagle_jax.config import DrafterConfig, ModelConfig, check_num_draft_tokens
from peagle_jax.errors import InputError
from peagle_jax.training.batch import PackedBatch
from peagle_jax.training.elements import element_loss
from peagle_jax.training.loss import DepthSums, LossConfig
from peagle_jax.training.networks import Networks
from peagle_jax.training.packed_attention import KeyValue, attend_packed
from peagle_jax.training.params import Params
from peagle_jax.training.target import TargetView, view_target


@dataclasses.dataclass(frozen=True)
class Eagle3Objective:
    """How an autoregressive drafter is trained. Hashable: a jit static.

    drafter: as `params.Split.config` has it.
    num_depths: K, the passes: tokens drafted in a row.
    dtype: of activations; gradients and sums have the trained parameters' and float32.
    remat: compute each pass again in the backward pass instead of keeping its activations:
      a third more work, 1/K of the memory.
    """

    drafter: DrafterConfig
    target: ModelConfig
    num_depths: int = 7
    loss: LossConfig = dataclasses.field(default_factory=LossConfig)
    dtype: str = "float32"
    remat: bool = False

    def __post_init__(self) -> None:
        if self.drafter.parallel:
            raise InputError("drafter: found a parallel one, expected an autoregressive one")
        check_num_draft_tokens(self.num_depths)
        self.loss.check_depths(self.num_depths)

    def value_and_grad(
        self,
        trained: Params,
        frozen: Params,
        target_params: Params,
        batch: PackedBatch,
        key: Array,
        denominator: Float[Array, ""] | float,
    ) -> tuple[Float[Array, ""], DepthSums, Params]:
        """One step's loss and gradient, by a target that runs beside the drafter.

        Args:
          trained, frozen: as `params.Split` has them.
          key: not used: nothing is drawn.
          denominator: what the sum of losses is divided by, the same for every part of one
            step.

        Returns:
          (loss sum / denominator, sums by depth, its gradient, like `trained`).
        """
        del key
        view = view_target(
            self.target, target_params, batch, self.drafter.aux_layer_ids, jnp.dtype(self.dtype)
        )
        return self.gradient(trained, frozen, target_params, batch, view, denominator)

    def gradient(
        self,
        trained: Params,
        frozen: Params,
        target_params: Params,
        batch: PackedBatch,
        view: TargetView,
        denominator: Float[Array, ""] | float,
    ) -> tuple[Float[Array, ""], DepthSums, Params]:
        """`value_and_grad` of given features."""
        rows, length = batch.tokens.shape
        passes = self.num_depths
        anchor = jnp.broadcast_to(jnp.tile(jnp.arange(length), passes), (rows, passes * length))
        depth = np.repeat(np.arange(passes, dtype=np.int32), length)

        def total(trained: Params) -> tuple[Array, DepthSums]:
            networks = Networks(
                self.target, self.drafter, trained, frozen, target_params, jnp.dtype(self.dtype)
            )
            loss, sums = element_loss(
                networks,
                batch,
                view.hidden,
                jnp.concatenate(self.run_passes(networks, batch, view.features), axis=1),
                anchor,
                depth,
                jnp.ones(anchor.shape, bool),
                passes,
                self.loss,
            )
            return loss / denominator, sums

        (loss, sums), gradient = jax.value_and_grad(total, has_aux=True)(trained)
        return loss, sums, gradient

    def run_passes(
        self,
        networks: Networks,
        batch: PackedBatch,
        features: Float[Array, "batch length raw"],
    ) -> list[Float[Array, "batch length hidden"]]:
        """The residual streams of every pass, by index of the anchor.

        Rows whose token or position would be past their document's end hold values that
        no row within it sees.
        """
        block = self.drafter.block

        def one_pass(
            tokens: Int[Array, "batch length"],
            feature: Float[Array, "batch length hidden"],
            positions: Int[Array, "batch length"],
            earlier: list[tuple[KeyValue, ...]],
        ) -> tuple[Array, list[KeyValue]]:
            attends = [
                attend_packed(batch.documents, block.window(layer), kept)
                for layer, kept in enumerate(earlier)
            ]
            return networks.run_layers(networks.embed(tokens), feature, positions, attends)

        if self.remat:
            one_pass = jax.checkpoint(one_pass)
        kept: list[tuple[KeyValue, ...]] = [()] * block.num_layers
        feature = networks.project(features)
        streams = []
        for index in range(self.num_depths):
            tokens = jnp.roll(batch.tokens, -index - 1, axis=1)
            stream, made = one_pass(tokens, feature, batch.positions + index, kept)
            kept = [(*before, own) for before, own in zip(kept, made, strict=True)]
            feature = networks.next_feature(stream)
            streams.append(stream)
        return streams
