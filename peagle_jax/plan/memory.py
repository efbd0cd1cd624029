"""Bytes of a device's memory, by part: weights, pages, slots, and work."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

from pallas_kernels.layout import slot_tile
from peagle_jax import sharding
from peagle_jax.config import BlockConfig, DrafterConfig, ModelConfig, WeightForm
from peagle_jax.decoding.generate import PREFILL_CHUNK
from peagle_jax.decoding.speculate import Speculator
from peagle_jax.errors import InputError
from peagle_jax.mesh_shape import MeshShape
from peagle_jax.models import decoder, drafter, kernel_forms
from peagle_jax.models.paged_cache import bytes_a_position
from peagle_jax.serving import device
from peagle_jax.sharding import DATA, EXPERT, MODEL


@dataclasses.dataclass(frozen=True)
class Weights:
    """Bytes of a network's parameters on a device, by how a step reads them.

    embedding: rows of it. head: all of it, once a pass; of a tied one the embedding.
    experts: those that a token chose. layers: all else.
    """

    embedding: int = 0
    head: int = 0
    experts: int = 0
    layers: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.embedding + self.head + self.experts + self.layers


def target_weights(
    config: ModelConfig, dtype: str, mesh: MeshShape, weights: WeightForm = "full"
) -> Weights:
    """A target's, split as an engine on this mesh splits them.

    Raises InputError where they cannot be split so, or do not come in this form.
    """
    if weights == "mxfp4" and config.block.moe is None:
        raise InputError("--weights: found mxfp4 and a model without experts, expected some")
    full, axes = _described(config, dtype)
    abstract = kernel_forms.abstract(full, weights)
    axes = kernel_forms.axes_like(axes, abstract)
    placed = AbstractMesh((mesh.data, mesh.expert, mesh.model), (DATA, EXPERT, MODEL))
    sharding.check_heads(config.block, placed, sharding.TENSOR_RULES)
    if mesh.expert > 1 and config.block.moe is None:
        raise InputError("mesh: expert: found a model without experts, expected 1")
    specs = sharding.partition_specs(axes, abstract, placed, sharding.TENSOR_RULES)
    parts = jax.tree.map(
        lambda spec: math.prod(placed.shape[axis] for axis in spec if axis is not None),
        specs,
        is_leaf=lambda leaf: isinstance(leaf, jax.sharding.PartitionSpec),
    )
    return _grouped(abstract, parts)


@functools.lru_cache(maxsize=8)
def _described(config: ModelConfig, dtype: str) -> tuple[Any, Any]:
    """A target's parameters and their logical axes: tracing it is what planning waits for."""
    return decoder.abstract_params(config, jnp.dtype(dtype)), decoder.logical_axes(config)


@functools.lru_cache(maxsize=8)
def drafter_weights(config: DrafterConfig, dtype: str) -> Weights:
    """A drafter's, which are whole on every device."""
    abstract = drafter.abstract_params(config, jnp.dtype(dtype))
    return _grouped(abstract, jax.tree.map(lambda _: 1, abstract))


def _grouped(abstract: Any, parts: Any) -> Weights:
    sizes = dict.fromkeys((field.name for field in dataclasses.fields(Weights)), 0)
    leaves = jax.tree_util.tree_flatten_with_path(abstract)[0]
    for (path, leaf), split in zip(leaves, jax.tree.leaves(parts), strict=True):
        names = [key.key for key in path]
        group = "layers"
        if names[0] == "embed_tokens":
            group = "embedding"
        elif names[0] == "lm_head":
            group = "head"
        elif "experts" in names:
            group = "experts"
        sizes[group] += leaf.size * leaf.dtype.itemsize // split
    return Weights(**sizes)


def page_bytes(speculator: Speculator, page_size: int, mesh: MeshShape) -> int:
    """One page of both networks' caches on a device of a TPU, what its layout pads included."""

    def padded(block: BlockConfig) -> int:
        tile = slot_tile(block.head_dim, speculator.dtype)
        return bytes_a_position(block, speculator.dtype) * (-(-page_size // tile) * tile)

    total = padded(speculator.target.block) // mesh.model
    return total + (padded(speculator.drafter.block) if speculator.drafter else 0)


def slot_bytes(speculator: Speculator, slots: int, context: int) -> int:
    """What an engine keeps for `slots` slots beside their pages."""
    init = functools.partial(device.init, speculator, slots, 2, 1, context)
    _, state = jax.eval_shape(init)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))


def working_bytes(speculator: Speculator, slots: int, mesh: MeshShape) -> int:
    """An estimate of what a step of `slots` slots, or a prefill, holds at its fullest.

    A layer's activations: the residual stream in, its norm and out, queries, keys and values, the
    feed-forward's gate, up and product (of the chosen experts, where there are some), and the
    streams handed to the drafter. At the end of a step, in float32: logits, the noise
    that chooses among them, and their processed copy. The compiler reuses, fuses and pads:
    it alone knows.
    """
    block, item = speculator.target.block, jnp.dtype(speculator.dtype).itemsize
    chosen = block.moe.experts_per_token if block.moe else 1
    width = block.moe.intermediate_size if block.moe else block.intermediate_size
    heads = (block.num_heads + 2 * block.num_kv_heads) * block.head_dim
    a_row = (3 + len(speculator.aux_layer_ids)) * block.hidden_size
    a_row += (heads + 3 * chosen * width) // mesh.model
    rows = slots * (speculator.num_draft_tokens + 1)
    scored = rows * speculator.target.vocab_size * 4 * 3 // mesh.model
    return max(rows * a_row * item + scored, PREFILL_CHUNK * a_row * item)
