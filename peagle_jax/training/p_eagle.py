"""The P-EAGLE objective (arXiv 2602.01469): K tokens from one pass, as decoding drafts them.

Element (anchor a, depth d) stands at position p = a + d. At depth 0 it pairs the text's token
x_{p+1} with the target's feature of p, deeper it is a mask row; it predicts x_{p+2} and is
compared with the target's distribution at p + 1.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.cod_attention import Implementation
from peagle_jax.config import DrafterConfig, ModelConfig
from peagle_jax.errors import InputError
from peagle_jax.training.batch import PackedBatch
from peagle_jax.training.cod import Chains, ChainSampling, sample_chains
from peagle_jax.training.elements import element_loss
from peagle_jax.training.loss import DepthSums, LossConfig
from peagle_jax.training.masks import Kept, SegmentRows, no_keys, segment_attends
from peagle_jax.training.networks import Networks
from peagle_jax.training.params import Params
from peagle_jax.training.partition import accumulate
from peagle_jax.training.target import TargetView, view_target


@dataclasses.dataclass(frozen=True)
class PEagleObjective:
    """How a parallel drafter is trained. Hashable: a jit static.

    drafter: as `params.Split.config` has it.
    sampling: K, how chains are drawn, and in how many segments a step is done.
    dtype: of activations; gradients and sums have the trained parameters' and float32.
    implementation: of attention; see `masks.chain_attention`.
    """

    drafter: DrafterConfig
    target: ModelConfig
    sampling: ChainSampling = dataclasses.field(default_factory=ChainSampling)
    loss: LossConfig = dataclasses.field(default_factory=LossConfig)
    dtype: str = "float32"
    implementation: Implementation | None = None

    def __post_init__(self) -> None:
        if not self.drafter.parallel:
            raise InputError("drafter: found an autoregressive one, expected one with mask rows")
        self.loss.check_depths(self.sampling.num_depths)

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
          key: of the draw of chains, one or one a row; everything else is a function of the
            data.
          denominator: what the sum of losses is divided by, the same for every part of one
            step, such as the total weight over all devices.

        Returns:
          (loss sum / denominator, sums by depth, its gradient, like `trained`).

        Raises:
          InputError: the row length is not a multiple of the segments.
        """
        view = view_target(
            self.target, target_params, batch, self.drafter.aux_layer_ids, jnp.dtype(self.dtype)
        )
        chains = sample_chains(self.sampling, batch, key)
        return self.gradient(trained, frozen, target_params, batch, view, chains, denominator)

    def gradient(
        self,
        trained: Params,
        frozen: Params,
        target_params: Params,
        batch: PackedBatch,
        view: TargetView,
        chains: Chains,
        denominator: Float[Array, ""] | float,
    ) -> tuple[Float[Array, ""], DepthSums, Params]:
        """`value_and_grad` of given features and chains; the chains say how many segments."""
        rows, length = batch.tokens.shape
        segments = chains.anchor.shape[1]
        size = length // segments
        dtype = jnp.dtype(self.dtype)

        def networks(trained: Params) -> Networks:
            return Networks(self.target, self.drafter, trained, frozen, target_params, dtype)

        def segment(index: Array) -> SegmentRows:
            return SegmentRows(batch.documents, index * size, size, chains.segment(index))

        def keys_of(trained: Params, kept: Kept, index: Array) -> Kept:
            return self.run_rows(networks(trained), batch, view, segment(index).depth_0, kept)[1]

        def loss_of(
            trained: Params, kept: Kept, index: Array
        ) -> tuple[tuple[Array, Kept], DepthSums]:
            net, part = networks(trained), segment(index)
            stream, own = self.run_rows(net, batch, view, part, kept)
            loss, sums = element_loss(
                net,
                batch,
                view.hidden,
                stream,
                part.anchor,
                part.depth,
                part.valid,
                len(chains.slots) + 1,
                self.loss,
            )
            return (loss, own), sums

        kept = no_keys(self.drafter.block, rows, length, dtype)
        return accumulate(loss_of, keys_of, trained, kept, segments, denominator)

    def run_rows(
        self,
        networks: Networks,
        batch: PackedBatch,
        view: TargetView,
        rows: SegmentRows,
        kept: Kept,
    ) -> tuple[Float[Array, "batch rows hidden"], Kept]:
        """The layers over some rows: residual streams, and keys and values of depth 0.

        `kept` holds the keys and values of the indices before `rows.start`.
        """
        block = self.drafter.block

        def at_depth_0(x: Array) -> Array:
            return jax.lax.dynamic_slice_in_dim(x, rows.start, rows.size, axis=1)

        def with_masks(real: Array, mask: Array) -> Array:
            shape = (real.shape[0], len(rows.chains.depth), real.shape[-1])
            return jnp.concatenate([real, jnp.broadcast_to(mask, shape)], axis=1)

        mask_token = jnp.asarray(self.drafter.mask_token_id, jnp.int32)
        following = jnp.roll(batch.tokens, -1, axis=1)
        stream, carried = networks.run_layers(
            with_masks(networks.embed(at_depth_0(following)), networks.embed(mask_token)),
            with_masks(networks.project(at_depth_0(view.features)), networks.mask_feature()),
            jnp.take_along_axis(batch.positions, rows.anchor, axis=1) + rows.depth,
            segment_attends(
                kept,
                rows,
                [block.window(layer) for layer in range(block.num_layers)],
                self.implementation,
            ),
        )
        return stream, tuple(carried)
