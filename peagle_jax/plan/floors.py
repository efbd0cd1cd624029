"""The least time that a speculative step can take: bytes, operations, and sums between chips.

A roofline, not a prediction. Every weight that is multiplied with is read once, each sequence's
cache once, at the published bandwidth; every product runs at the published rate. Nothing waits for
Python, and latency of collectives is not counted.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from pallas_kernels.chips import Chip
from peagle_jax.config import BlockConfig, network_method
from peagle_jax.decoding.speculate import Speculator
from peagle_jax.mesh_shape import MeshShape
from peagle_jax.plan.memory import Weights


@dataclasses.dataclass(frozen=True)
class StepFloor:
    """One step of one data group, a device's part.

    weight_bytes, cache_bytes: read from its memory. flops: of its matrix products.
    sent_bytes: to the other devices that share the weights.
    Times in milliseconds; memory and products overlap, and sums come after the products.
    """

    weight_bytes: float
    cache_bytes: float
    flops: float
    sent_bytes: float
    memory_ms: float
    product_ms: float
    sum_ms: float

    @property
    def ms(self) -> float:
        """The least time of a step."""
        return max(self.memory_ms, self.product_ms) + self.sum_ms


def step_floor(
    speculator: Speculator,
    weights: Weights,
    drafter: Weights | None,
    mesh: MeshShape,
    chip: Chip,
    slots: int,
    context: int,
    multiplied: Weights | None = None,
) -> StepFloor:
    """A step of `slots` sequences of one data group, each with `context` tokens.

    weights, drafter: of a device, as memory.py gives them. multiplied: the target's where all are
    in the dtype of the computation, None = `weights`: products count elements, not bytes.
    """
    target, item = speculator.target, jnp.dtype(speculator.dtype).itemsize
    k = speculator.num_draft_tokens
    rows = slots * (k + 1)
    head = weights.embedding if target.tie_embeddings else weights.head
    moe = target.block.moe
    used = 1.0 if moe is None else hit_share(moe.num_experts, moe.experts_per_token, rows)
    active = 1.0 if moe is None else moe.experts_per_token / moe.num_experts
    read: float = weights.layers + head + used * weights.experts
    full = weights if multiplied is None else multiplied
    full_head = full.embedding if target.tie_embeddings else full.head
    flops: float = 2 * rows * (full.layers + full_head + active * full.experts) / item
    cache: float = slots * cache_bytes(target.block, context, k + 1, item) / mesh.model
    flops += _scores(target.block, context, k + 1) * rows / mesh.model
    if drafter is not None:
        assert speculator.drafter is not None
        config = speculator.drafter
        passes = 1 if network_method(speculator.method) == "p-eagle" else k
        scored: float = drafter.head
        if not config.own_head:
            scored = head * config.draft_vocab_size / config.vocab_size
        read += passes * (drafter.layers + scored)
        if not config.own_head:
            scored = full_head * config.draft_vocab_size / config.vocab_size
        flops += 2 * slots * k * (drafter.layers + scored) / item
        cache += passes * slots * cache_bytes(config.block, context, k, item)
        flops += _scores(config.block, context, k) * slots * k
    sent = _sent(target.block, mesh, rows * target.block.hidden_size * item)
    return StepFloor(
        weight_bytes=read,
        cache_bytes=cache,
        flops=flops,
        sent_bytes=sent,
        memory_ms=chip.floor_us(read + cache) / 1e3,
        product_ms=chip.floor_us(0.0, flops) / 1e3,
        sum_ms=sent / chip.ici_gb_s / 1e6 if sent else 0.0,
    )


def hit_share(num_experts: int, chosen: int, tokens: int) -> float:
    """Share of a layer's experts that some of `tokens` tokens chose, were all as likely."""
    return 1 - (1 - chosen / num_experts) ** tokens


def cache_bytes(block: BlockConfig, context: int, rows: int, item: int) -> int:
    """Bytes of one sequence's cache that a pass of `rows` rows sees, `item` bytes an element."""
    a_layer = 2 * block.num_kv_heads * block.head_dim * item
    return a_layer * sum(_seen(block, context, rows))


def _scores(block: BlockConfig, context: int, rows: int) -> int:
    """Operations of one row's attention, all layers: scores, and the sum of values."""
    return 4 * block.num_heads * block.head_dim * sum(_seen(block, context, rows))


def _seen(block: BlockConfig, context: int, rows: int) -> list[int]:
    """Positions that a pass sees in each layer."""
    windows = (block.window(layer) for layer in range(block.num_layers))
    return [context if one is None else min(context, one + rows - 1) for one in windows]


def _sent(block: BlockConfig, mesh: MeshShape, stream: int) -> float:
    """Bytes that a device sends for the sums of a pass over a residual stream of `stream` bytes:
    one after attention and one after the feed-forward of each layer, one for the embedding."""

    def ring(devices: int) -> float:
        return 2 * (devices - 1) / devices * stream

    over_model: float = ring(mesh.model)
    mixed = sum(block.experts(layer) is not None for layer in range(block.num_layers))
    plain = block.num_layers - mixed
    return (block.num_layers + plain + 1) * over_model + mixed * ring(mesh.group_size)
