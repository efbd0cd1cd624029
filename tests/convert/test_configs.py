"""Hugging Face configs to ModelConfig: each family's rules, both homes of RoPE, refusals."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from peagle_jax.config import BlockConfig, GateConfig, ModelConfig, MoEConfig, RopeConfig
from peagle_jax.convert.config_writers import target_json
from peagle_jax.convert.configs import TARGET_FAMILIES, model_config
from peagle_jax.errors import InputError

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 100,
}


def read(**changes: Any) -> ModelConfig:
    return model_config({**BASE, **changes}, "config.json")


def test_defaults_are_those_of_the_llama_class() -> None:
    assert read() == ModelConfig(
        block=BlockConfig(32, 48, 3, 4, 4, 8, rms_norm_eps=1e-6, rope=RopeConfig(10_000.0)),
        vocab_size=100,
        max_positions=2048,
    )


@pytest.mark.parametrize(
    ("architecture", "changes", "expected"),
    [
        ("LlamaForCausalLM", {"attention_bias": True}, (True, True, False, False)),
        ("LlamaForCausalLM", {"mlp_bias": True}, (False, False, True, False)),
        ("MistralForCausalLM", {"attention_bias": True}, (False, False, False, False)),
        ("Qwen2ForCausalLM", {}, (True, False, False, False)),
        ("Qwen3ForCausalLM", {}, (False, False, False, True)),
        ("Qwen3ForCausalLM", {"attention_bias": True}, (True, True, False, True)),
    ],
)
def test_biases_and_norms(
    architecture: str, changes: dict[str, Any], expected: tuple[bool, ...]
) -> None:
    block = read(architectures=[architecture], **changes).block
    assert (block.qkv_bias, block.out_bias, block.mlp_bias, block.qk_norm) == expected


def test_head_dim() -> None:
    assert read(head_dim=6).block.head_dim == 6
    assert read(head_dim=None).block.head_dim == 8
    assert read(architectures=["Qwen3ForCausalLM"]).block.head_dim == 128


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 24.0,
    "original_max_position_embeddings": 64,
    "truncate": False,
}
QWEN3_MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
}
GPT_OSS: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 7,
}


def test_yarn_has_its_factors() -> None:
    """0.1 ln(factor) + 1, but for what the config itself says."""
    found = read(rope_scaling=YARN, rope_theta=15e4).block.rope
    expected = RopeConfig(15e4, "yarn", 32.0, original_max_positions=64, beta_fast=24.0)
    assert found.attention_factor == pytest.approx(1.3465736)
    expected = dataclasses.replace(
        expected, truncate=False, attention_factor=found.attention_factor
    )
    assert found == expected
    given = read(rope_scaling={**YARN, "attention_factor": 0.7}).block.rope
    assert given.attention_factor == 0.7
    both = {"mscale": 0.707, "mscale_all_dim": 1.0}
    factor = read(rope_scaling={**YARN, **both}).block.rope.attention_factor
    assert factor == pytest.approx((0.0707 * np.log(32) + 1) / (0.1 * np.log(32) + 1))
    assert read(rope_scaling={**YARN, "factor": 0.5}).block.rope.attention_factor == 1.0


def test_qwen3_moe() -> None:
    block = read(**QWEN3_MOE, norm_topk_prob=True).block
    assert block.moe == MoEConfig(4, 2, 12, normalize=True)
    assert (block.dense_layers, block.qk_norm, block.head_dim) == ((), True, 8)
    some = read(**QWEN3_MOE, mlp_only_layers=[0]).block
    assert some.moe is not None
    assert not some.moe.normalize
    assert [some.experts(i) is None for i in range(3)] == [True, False, False]
    steps = read(**QWEN3_MOE, decoder_sparse_step=2).block
    assert steps.dense_layers == (0, 2)
    assert read(**{**QWEN3_MOE, "num_experts": 0}).block.moe is None
    sliding = read(**QWEN3_MOE, sliding_window=7, use_sliding_window=True)
    assert sliding.block.windows == (7, 7, 7)
    assert read(**QWEN3_MOE, sliding_window=7).block.windows == ()


def test_gpt_oss() -> None:
    block = read(**GPT_OSS).block
    assert block.moe == MoEConfig(
        4, 2, 48, scores="top_k_softmax", router_bias=True, expert_bias=True
    )
    assert block.gate == GateConfig(1.702, 7.0, 1.0)
    assert (block.sinks, block.qkv_bias, block.out_bias, block.head_dim) == (True, True, True, 64)
    assert block.windows == (7, None, 7)  # by turns, where the config does not say
    assert block.rms_norm_eps == 1e-5
    types = ["full_attention", "sliding_attention", "full_attention"]
    changed = read(**GPT_OSS, swiglu_limit=3.0, layer_types=types).block
    assert changed.gate == GateConfig(1.702, 3.0, 1.0)
    assert changed.windows == (None, 7, None)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rope_theta": 5e5}, RopeConfig(5e5)),
        ({"rope_theta": 5e5, "rope_scaling": None}, RopeConfig(5e5)),
        ({"rope_theta": 5e5, "rope_scaling": LLAMA3}, RopeConfig(5e5, "llama3", 8.0, 1.0, 4.0, 64)),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, RopeConfig(1e4, "linear", 2.0)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, RopeConfig(1e6)),
        (
            {"rope_parameters": {**LLAMA3, "rope_theta": 1e6}},
            RopeConfig(1e6, "llama3", 8.0, 1.0, 4.0, 64),
        ),
    ],
)
def test_rope(changes: dict[str, Any], expected: RopeConfig) -> None:
    assert read(**changes).block.rope == expected


@pytest.mark.parametrize(
    ("architecture", "changes", "expected"),
    [
        ("MistralForCausalLM", {"sliding_window": 7}, (7, 7, 7)),
        ("MistralForCausalLM", {"sliding_window": None}, ()),
        ("LlamaForCausalLM", {"sliding_window": 7}, ()),
        ("Qwen2ForCausalLM", {"sliding_window": 7, "use_sliding_window": False}, ()),
        ("Qwen2ForCausalLM", {"sliding_window": 7}, ()),
        (
            "Qwen2ForCausalLM",
            {"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 2},
            (None, None, 7),
        ),
        (
            "Qwen3ForCausalLM",
            {
                "sliding_window": 7,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            (7, None, 7),
        ),
    ],
)
def test_windows(
    architecture: str, changes: dict[str, Any], expected: tuple[int | None, ...]
) -> None:
    assert read(architectures=[architecture], **changes).block.windows == expected


def test_eos_ids_of_both_files_count_once() -> None:
    config = {**BASE, "eos_token_id": 3, "bos_token_id": 1}
    found = model_config(config, "config.json", {"eos_token_id": [7, 3]})
    assert (found.bos_token_id, found.eos_token_ids) == (1, (3, 7))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "architectures: found 'GPT2LMHeadModel', expected",
        ),
        ({"architectures": None}, "architectures: found None, expected one of LlamaForCausalLM"),
        ({"hidden_size": None}, "hidden_size: found None, expected a whole number"),
        ({"vocab_size": "many"}, "vocab_size: found 'many', expected a whole number"),
        ({"hidden_act": "gelu"}, "hidden_act: found 'gelu', expected 'silu'"),
        (
            {"rope_scaling": {"rope_type": "longrope", "factor": 2}},
            "rope_scaling: found rope type 'longrope', expected one of default, linear",
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2}},
            "rope_scaling.original_max_position_embeddings: found None, expected a number",
        ),
        ({**QWEN3_MOE, "num_experts": None}, "num_experts: found None, expected a whole number"),
        ({**QWEN3_MOE, "num_experts_per_tok": 9}, "experts_per_token: found 9, expected 1 to 4"),
        ({**QWEN3_MOE, "decoder_sparse_step": 0}, "decoder_sparse_step: found 0, expected 1"),
        ({**GPT_OSS, "layer_types": ["full_attention"]}, "layer_types: found .*, expected 3 of"),
        ({"layer_types": ["linear_attention"] * 3}, "layer_types: found .*linear_attention"),
        ({"rope_parameters": {"full_attention": {}}}, "expected one of default.*for all layers"),
        (
            {"rope_scaling": {"type": "linear"}},
            "rope_scaling.factor: found None, expected a number",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: found 0.5, expected 1.0"),
        ({"num_key_value_heads": 3}, "num_heads: found 4, expected a multiple of num_kv_heads = 3"),
        ({"num_hidden_layers": 0}, "num_layers: found 0, expected 1 or more"),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "layer_types": ["linear_attention"] * 3,
                "sliding_window": 7,
                "use_sliding_window": True,
            },
            "layer_types: found .*linear_attention.*expected 3 of full_attention or sliding",
        ),
    ],
)
def test_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=rf"^config\.json: .*{message}") as info:
        read(**changes)
    assert "\n" not in str(info.value)


@pytest.mark.parametrize("architecture", list(TARGET_FAMILIES))
@pytest.mark.parametrize("rope", [{}, LLAMA3, YARN])
@pytest.mark.parametrize("tied", [False, True])
def test_written_config_reads_back(architecture: str, rope: dict[str, Any], tied: bool) -> None:
    config = read(
        architectures=[architecture],
        num_key_value_heads=2,
        head_dim=6,
        sliding_window=7,
        use_sliding_window=True,
        max_window_layers=1,
        eos_token_id=[2, 5],
        bos_token_id=1,
        tie_word_embeddings=tied,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=12,
        norm_topk_prob=True,
        rope_theta=5e5,
        rope_scaling=rope,
    )
    written = target_json(config, "float32")
    assert written["architectures"] == [architecture]
    assert model_config(written, "config.json") == config


@pytest.mark.parametrize(
    ("changes", "model_type"),
    [
        ({**QWEN3_MOE, "mlp_only_layers": [1]}, "qwen3_moe"),
        ({**QWEN3_MOE, "sliding_window": 7, "use_sliding_window": True}, "qwen3_moe"),
        ({**GPT_OSS, "sliding_window": None}, "gpt_oss"),
        ({**GPT_OSS, "swiglu_limit": 3.0, "head_dim": 8}, "gpt_oss"),
    ],
)
def test_written_experts_read_back(changes: dict[str, Any], model_type: str) -> None:
    config = read(**changes)
    written = target_json(config, "bfloat16")
    assert written["model_type"] == model_type
    assert model_config(written, "config.json") == config


def test_mix_that_no_family_has_is_not_written() -> None:
    block = BlockConfig(32, 48, 2, 4, 4, 8, out_bias=True)
    with pytest.raises(InputError, match="found a mix of biases"):
        target_json(ModelConfig(block, 100, 64), "float32")


@pytest.mark.parametrize("eos", [-1, 99_999, [2, "3"]])
def test_an_end_of_sequence_outside_the_vocabulary_is_refused(eos: object) -> None:
    config = {**BASE, "eos_token_id": eos}
    with pytest.raises(InputError, match=r"config\.json: eos_token_id: found .*, expected 0 to"):
        model_config(config, "config.json")
