"""ModelConfig and DrafterConfig as the config.json that transformers and vLLM read."""

from __future__ import annotations

from typing import Any

from peagle_jax.config import BlockConfig, DrafterConfig, ModelConfig
from peagle_jax.convert.configs import TARGET_FAMILIES, Family
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
    of biases, norms and windows.
    """
    block = config.block
    fitting = [name for name, family in TARGET_FAMILIES.items() if _fits(family, block)]
    if not fitting:
        raise InputError("target: found a mix of biases, norms and windows that no family has")
    eos = list(config.eos_token_ids)
    return {
        "architectures": fitting[:1],
        "model_type": fitting[0].removesuffix("ForCausalLM").lower(),
        **_block_json(block, TARGET_FAMILIES[fitting[0]].layer_types),
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_positions,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": eos if len(eos) > 1 else next(iter(eos), None),
        "torch_dtype": dtype,
    }


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
    return (
        windows_fit
        and (block.qkv_bias, block.out_bias) in biases
        and block.qk_norm == family.qk_norm
        and block.mlp_bias <= family.mlp_bias
    )


def _block_json(block: BlockConfig, layer_types: bool) -> dict[str, Any]:
    rope = block.rope
    written: dict[str, Any] = {
        "hidden_size": block.hidden_size,
        "intermediate_size": block.intermediate_size,
        "num_hidden_layers": block.num_layers,
        "num_attention_heads": block.num_heads,
        "num_key_value_heads": block.num_kv_heads,
        "head_dim": block.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": block.rms_norm_eps,
        "rope_theta": rope.theta,
        "attention_bias": block.out_bias,
        "mlp_bias": block.mlp_bias,
    }
    if rope.kind != "default":
        written["rope_scaling"] = {"rope_type": rope.kind, "factor": rope.factor}
    if rope.kind == "llama3":
        written["rope_scaling"] |= {
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
            "original_max_position_embeddings": rope.original_max_positions,
        }
    if any(block.windows):
        written["use_sliding_window"] = True
        sizes = sorted({window for window in block.windows if window})
        if len(sizes) > 1:
            raise InputError(f"windows: found sizes {sizes}, expected one size")
        written["sliding_window"] = sizes[0]
        if layer_types:
            written["layer_types"] = [
                "sliding_attention" if window else "full_attention" for window in block.windows
            ]
    return written
