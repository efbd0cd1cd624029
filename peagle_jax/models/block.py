"""One pre-norm decoder layer: attention and gated MLP around a residual stream."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
from jaxtyping import Array, Float

from peagle_jax.config import BlockConfig
from peagle_jax.models.attention import Attend, Attention
from peagle_jax.models.layers import GatedMLP, RMSNorm

Rope = tuple[Float[Array, "batch rows half"], Float[Array, "batch rows half"]]


class Block(nn.Module):
    """A Llama or Qwen3 layer, as `config` says."""

    config: BlockConfig
    dtype: Any

    def setup(self) -> None:
        c = self.config
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps, self.dtype)
        self.self_attn = Attention(c, c.hidden_size, self.dtype)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps, self.dtype)
        self.mlp = GatedMLP(c.hidden_size, c.intermediate_size, c.mlp_bias, self.dtype)

    def __call__(
        self, x: Float[Array, "batch rows hidden"], rope: Rope, attend: Attend
    ) -> tuple[Float[Array, "batch rows hidden"], Any]:
        out, carried = self.self_attn(self.input_layernorm(x), rope, attend)
        x = x + out
        return x + self.mlp(self.post_attention_layernorm(x)), carried
