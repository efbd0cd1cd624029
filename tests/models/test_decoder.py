"""What the target decoder says of itself."""

from __future__ import annotations

import dataclasses

import jax
import pytest
from flax.traverse_util import flatten_dict
from jax.sharding import PartitionSpec

from peagle_jax.config import BlockConfig, GateConfig, ModelConfig, MoEConfig
from peagle_jax.errors import InputError
from peagle_jax.models import decoder

BLOCK = BlockConfig(32, 48, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8)
EXPERTS = MoEConfig(4, 2, 16, router_bias=True, expert_bias=True)
BLOCKS = {
    "plain": BLOCK,
    "biases-norms-windows": dataclasses.replace(
        BLOCK, qkv_bias=True, qk_norm=True, windows=(4, None, 4)
    ),
    "experts-sinks": dataclasses.replace(
        BLOCK, moe=EXPERTS, sinks=True, gate=GateConfig(1.702, 7.0, 1.0), windows=(4, None, 4)
    ),
    "some-experts": dataclasses.replace(BLOCK, moe=EXPERTS, dense_layers=(0, 2)),
    "dense-last": dataclasses.replace(BLOCK, moe=EXPERTS, dense_layers=(2,)),
}


@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
@pytest.mark.parametrize("tied", [False, True])
def test_abstract_params_are_those_of_init(block, tied) -> None:
    config = ModelConfig(block, vocab_size=64, max_positions=32, tie_embeddings=tied)
    abstract = decoder.abstract_params(config, "bfloat16")
    real = jax.eval_shape(lambda: decoder.init(config, jax.random.key(0), "bfloat16"))
    assert abstract == real


def test_layers_have_the_feed_forward_that_is_theirs() -> None:
    config = ModelConfig(BLOCKS["some-experts"], vocab_size=64, max_positions=32)
    params = decoder.abstract_params(config)
    axes = decoder.logical_axes(config)
    assert flatten_dict(params).keys() == flatten_dict(axes).keys()
    assert params["layers_0"]["mlp"]["up_proj"]["kernel"].shape == (48, 32)
    experts = params["layers_1"]["mlp"]["experts"]
    assert experts["up_proj"]["kernel"].shape == (4, 16, 32)
    assert experts["down_proj"]["bias"].shape == (4, 32)
    specs = axes["layers_1"]["mlp"]
    assert specs["experts"]["up_proj"]["kernel"] == PartitionSpec("experts", "mlp", "embed")
    assert specs["experts"]["down_proj"]["bias"] == PartitionSpec("experts", "embed")
    assert specs["router"]["kernel"] == PartitionSpec(None, "embed")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dense_layers": (0,)}, "dense_layers: found .0., expected layers among the 0"),
        ({"moe": EXPERTS, "dense_layers": (3,)}, "dense_layers: found .3., expected .* the 3"),
        ({"windows": (4, 0, None)}, "windows: found .*, expected 1 or more, or None"),
    ],
)
def test_refused(changes, message) -> None:
    with pytest.raises(InputError, match=message):
        dataclasses.replace(BLOCK, **changes)


def test_more_chosen_experts_than_there_are() -> None:
    with pytest.raises(InputError, match="experts_per_token: found 5, expected 1 to 4"):
        dataclasses.replace(EXPERTS, experts_per_token=5)
