"""What the target decoder says of itself."""

from __future__ import annotations

import dataclasses

import jax
import pytest

from peagle_jax.config import BlockConfig, ModelConfig
from peagle_jax.models import decoder

BLOCK = BlockConfig(32, 48, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8)


@pytest.mark.parametrize(
    "block",
    [BLOCK, dataclasses.replace(BLOCK, qkv_bias=True, qk_norm=True, windows=(4, None, 4))],
    ids=["plain", "biases-norms-windows"],
)
@pytest.mark.parametrize("tied", [False, True])
def test_abstract_params_are_those_of_init(block, tied) -> None:
    config = ModelConfig(block, vocab_size=64, max_positions=32, tie_embeddings=tied)
    abstract = decoder.abstract_params(config, "bfloat16")
    real = jax.eval_shape(lambda: decoder.init(config, jax.random.key(0), "bfloat16"))
    assert abstract == real
