"""ModelConfig and DrafterConfig as the config.json that transformers and vLLM read."""

from __future__ import annotations

import re
from typing import Any

from peagle_jax.config import BlockConfig, DrafterConfig, GateConfig, ModelConfig
from peagle_jax.convert.configs import TARGET_FAMILIES, Family
from peagle_jax.convert.rope_configs import rope_json
from peagle_jax.errors import InputError

# Per (q/k norms, parallel): the architecture under which vLLM has the drafter's network.
_DRAFTER_ARCHITECTURES = {
    (False, False): "LlamaForCausalLMEagle3",
    (False, True): "LlamaForCausalLMEagle3",
    (True, False): "Eagle3Qwen3ForCausalLM",
    (True, True): "PeagleQwen3ForCausalLM",
}


def target_json(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """A config.json that `configs.model_config` and transformers read as `config`.

    `dtype` names the dtype of the weights. Raises InputError where no family has this mix
    of biases, norms, windows and experts.
    """
    block = config.block
    name, family = family_name(config)
    words = name.removesuffix("ForCausalLM")
    return {
        "architectures": [name],
        "model_type": re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", words).lower(),
        **_block_json(block, family.layer_types, always=family.window_rule == "even"),
        **_expert_json(block, family),
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_positions,
        "tie_word_embeddings": config.tie_embeddings,
        **_special_ids(config),
        "torch_dtype": dtype,
    }


def _special_ids(config: ModelConfig | DrafterConfig) -> dict[str, Any]:
    eos = list(config.eos_token_ids)
    return {
        "bos_token_id": config.bos_token_id,
        "eos_token_id": eos if len(eos) > 1 else next(iter(eos), None),
    }


def family_name(config: ModelConfig) -> tuple[str, Family]:
    """The first family that has a target's network. Raises InputError where none has."""
    for name, family in TARGET_FAMILIES.items():
        if _fits(family, config.block):
            return name, family
    raise InputError("target: found a mix of biases, norms, windows and experts that no family has")


def drafter_json(config: DrafterConfig, dtype: str, max_positions: int) -> dict[str, Any]:
    """A flat config.json that `configs.drafter_config` and vLLM read as `config`.

    `dtype` names the dtype of the weights; `max_positions` is the target's context, where
    known: vLLM wants one, the network has none.
    """
    written = {
        "architectures": [_DRAFTER_ARCHITECTURES[config.block.qk_norm, config.parallel]],
        "model_type": "qwen3" if config.block.qk_norm else "llama",
        **_block_json(config.block, layer_types=True),
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "max_position_embeddings": max_positions,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "logit_scale": config.logit_scale,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": list(config.aux_layer_ids),
            "use_aux_hidden_state": bool(config.aux_layer_ids),
            "norm_before_fc": config.norm_before_fc,
        },
        "tie_word_embeddings": False,
        **_special_ids(config),
        "torch_dtype": dtype,
    }
    if config.mask_token_id is not None:
        written |= {"ptd_token_id": config.mask_token_id, "mask_token_id": config.mask_token_id}
    if config.trained_num_draft_tokens is not None:
        written["speculative_tokens"] = config.trained_num_draft_tokens
    return written


def _fits(family: Family, block: BlockConfig) -> bool:
    biases = {(family.qkv_bias, False)} | ({(True, True)} if family.bias_key else set())
    windows_fit = (
        not any(block.windows)
        or family.layer_types
        or (family.window_rule == "all" and all(block.windows))
    )
    bounded = family.gate.limit is not None
    gate_fits = block.gate.limit is not None if bounded else block.gate == GateConfig()
    return (
        windows_fit
        and gate_fits
        and _experts_fit(family, block)
        and (block.qkv_bias, block.out_bias) in biases
        and block.qk_norm == family.qk_norm
        and block.sinks == family.sinks
        and block.gate.up_offset == family.gate.up_offset
        and block.mlp_bias <= family.mlp_bias
    )


def _experts_fit(family: Family, block: BlockConfig) -> bool:
    rule, moe = family.experts, block.moe
    if rule is None or moe is None:
        return rule is None and moe is None
    shares_width = rule.width_key == "intermediate_size"
    return (
        moe.scores == rule.scores
        and moe.router_bias == moe.expert_bias == rule.biases
        and (not moe.normalize or rule.normalize_key is not None)
        and (
            not shares_width
            or (moe.intermediate_size == block.intermediate_size and not block.dense_layers)
        )
    )


def _expert_json(block: BlockConfig, family: Family) -> dict[str, Any]:
    written: dict[str, Any] = {}
    if block.gate.limit is not None:
        written |= {"swiglu_alpha": block.gate.alpha, "swiglu_limit": block.gate.limit}
    if family.experts is not None and block.moe is not None:
        count = "num_local_experts" if family.experts.biases else "num_experts"
        written |= {
            count: block.moe.num_experts,
            "num_experts_per_tok": block.moe.experts_per_token,
            family.experts.width_key: block.moe.intermediate_size,
            "mlp_only_layers": list(block.dense_layers),
        }
        if family.experts.normalize_key is not None:
            written[family.experts.normalize_key] = block.moe.normalize
    return written


def _block_json(block: BlockConfig, layer_types: bool, always: bool = False) -> dict[str, Any]:
    """`layer_types`: windows are written so; `always`, also where there are none."""
    written: dict[str, Any] = {
        "hidden_size": block.hidden_size,
        "intermediate_size": block.intermediate_size,
        "num_hidden_layers": block.num_layers,
        "num_attention_heads": block.num_heads,
        "num_key_value_heads": block.num_kv_heads,
        "head_dim": block.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": block.rms_norm_eps,
        **rope_json(block.rope),
        "attention_bias": block.out_bias,
        "mlp_bias": block.mlp_bias,
    }
    if any(block.windows) or always:
        sizes = sorted({window for window in block.windows if window})
        if len(sizes) > 1:
            raise InputError(f"windows: found sizes {sizes}, expected one size")
        written["use_sliding_window"] = bool(sizes)
        written["sliding_window"] = sizes[0] if sizes else None
        if layer_types:
            kinds = [block.window(i) for i in range(block.num_layers)]
            written["layer_types"] = [
                "sliding_attention" if window else "full_attention" for window in kinds
            ]
    return written
