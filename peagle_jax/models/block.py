"""One pre-norm decoder layer: attention and a feed-forward around a residual stream."""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax
from jaxtyping import Array, Float

from peagle_jax.config import BlockConfig, MoEConfig
from peagle_jax.models.attention import Attend, Attention
from peagle_jax.models.layers import GatedMLP, RMSNorm
from peagle_jax.models.moe import MoE

Rope = tuple[Float[Array, "batch rows half"], Float[Array, "batch rows half"]]


class Block(nn.Module):
    """A layer of any family, as `config` says; `experts` = None is a plain feed-forward."""

    config: BlockConfig
    dtype: Any
    experts: MoEConfig | None = None

    def setup(self) -> None:
        c = self.config
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps, self.dtype)
        self.self_attn = Attention(c, c.hidden_size, self.dtype)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps, self.dtype)
        self.mlp = (
            GatedMLP(c.hidden_size, c.intermediate_size, c.mlp_bias, c.gate, self.dtype)
            if self.experts is None
            else MoE(self.experts, c.hidden_size, c.gate, self.dtype)
        )

    def __call__(
        self, x: Float[Array, "batch rows hidden"], rope: Rope, attend: Attend
    ) -> tuple[Float[Array, "batch rows hidden"], Any]:
        out, carried = self.self_attn(self.input_layernorm(x), rope, attend)
        x = x + out
        return x + self.mlp(self.post_attention_layernorm(x)), carried


def run_block(
    block: Block, x: Float[Array, "batch rows hidden"], rope: Rope, attend: Attend
) -> tuple[Float[Array, "batch rows hidden"], Any]:
    """`block(x, rope, attend)`, traced once for all the layers alike in a network.

    Tracing thirty layers one by one is much of the time to a first token. XLA inlines the
    calls: what it compiles is the same. Only an Attend that is a pytree can be shared, a
    closure holds one layer's own arrays; and what a caller asks to see inside is a layer's own.
    """
    watched = block.is_initializing() or block.is_mutable_collection("intermediates")
    if watched or jax.tree_util.all_leaves([attend]):
        return block(x, rope, attend)
    alone = block.clone(parent=None, name=None)
    return _run_alone(alone, block.variables["params"], x, rope, attend)


@functools.partial(jax.jit, static_argnames="block")
def _run_alone(
    block: Block, params: Any, x: Array, rope: Rope, attend: Attend
) -> tuple[Array, Any]:
    return block.apply({"params": params}, x, rope, attend)
