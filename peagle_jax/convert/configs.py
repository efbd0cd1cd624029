"""Checkpoint metadata (config.json, GGUF keys) to ModelConfig.

What families differ in is in the tables at the top. Drafters: drafter_configs.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from peagle_jax.config import BlockConfig, GateConfig, ModelConfig, MoEConfig, RouterScores
from peagle_jax.convert.expert_tensors import Form
from peagle_jax.convert.rope_configs import rope_config
from peagle_jax.errors import InputError

_SWIGLU = GateConfig()


@dataclasses.dataclass(frozen=True)
class ExpertRule:
    """What a family with experts fixes about them, and where its config has the rest."""

    scores: RouterScores
    width_key: str  # an expert's intermediate size
    normalize_key: str | None = None
    biases: bool = False  # of the router and of the experts
    form: Form = "separate"  # of its tensors


@dataclasses.dataclass(frozen=True)
class Family:
    """What a Hugging Face architecture fixes, and the defaults its config class has."""

    qkv_bias: bool = False
    bias_key: str | None = None  # config key that gives q, k, v and o a bias
    bias_default: bool = False
    qk_norm: bool = False
    head_dim: int | None = None  # None = hidden_size / num_attention_heads
    max_positions: int = 2048
    mlp_bias: bool = False  # whether the family reads mlp_bias
    layer_types: bool = False  # whether the family reads layer_types
    window_rule: Literal["none", "all", "upper", "even"] = "none"  # where layer_types is absent
    windows_by_default: bool = True  # what an absent use_sliding_window means
    rms_norm_eps: float = 1e-6
    sinks: bool = False
    gate: GateConfig = _SWIGLU  # a bounded one's numbers are read from the config
    experts: ExpertRule | None = None


LLAMA = Family(bias_key="attention_bias", mlp_bias=True)
_QWEN2 = Family(
    qkv_bias=True,
    max_positions=32768,
    layer_types=True,
    window_rule="upper",
    windows_by_default=False,
)
QWEN3 = dataclasses.replace(
    _QWEN2, qkv_bias=False, bias_key="attention_bias", qk_norm=True, head_dim=128
)
_QWEN3_MOE = Family(
    bias_key="attention_bias",
    qk_norm=True,
    max_positions=32768,
    window_rule="all",
    windows_by_default=False,
    experts=ExpertRule("softmax_top_k", "moe_intermediate_size", normalize_key="norm_topk_prob"),
)
_GPT_OSS = Family(
    bias_key="attention_bias",
    bias_default=True,
    head_dim=64,
    max_positions=131072,
    layer_types=True,
    window_rule="even",
    rms_norm_eps=1e-5,
    sinks=True,
    gate=GateConfig(alpha=1.702, limit=7.0, up_offset=1.0),
    experts=ExpertRule("top_k_softmax", "intermediate_size", biases=True, form="interleaved"),
)
TARGET_FAMILIES = {
    "LlamaForCausalLM": LLAMA,
    "MistralForCausalLM": Family(max_positions=131072, window_rule="all"),
    "Qwen2ForCausalLM": _QWEN2,
    "Qwen3ForCausalLM": QWEN3,
    "Qwen3MoeForCausalLM": _QWEN3_MOE,
    "GptOssForCausalLM": _GPT_OSS,
}
_LAYER_TYPES = ("full_attention", "sliding_attention")
_MAX_WINDOW_LAYERS = 28  # Qwen's default
_REQUIRED = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")

# GGUF key (after "<architecture>.") to the config.json key that means the same.
_GGUF_KEYS = {
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim",
    "context_length": "max_position_embeddings",
    "rope.freq_base": "rope_theta",
    "vocab_size": "vocab_size",
}
_GGUF_ARCHITECTURES = {"llama": "LlamaForCausalLM"}


def model_config(
    config: Mapping[str, Any], where: str, generation_config: Mapping[str, Any] | None = None
) -> ModelConfig:
    """A target's config.json as a ModelConfig.

    Args:
        config: the parsed config.json.
        where: its file name, for error messages.
        generation_config: the parsed generation_config.json; its EOS ids count too.

    Raises InputError on an unknown architecture, rope type, activation or missing key.
    """
    family = family_of(config, TARGET_FAMILIES, where)
    vocab_size = integer(config, "vocab_size", where)
    with located(where):
        return ModelConfig(
            block=block_config(config, family, where),
            vocab_size=vocab_size,
            max_positions=int(config.get("max_position_embeddings") or family.max_positions),
            tie_embeddings=bool(config.get("tie_word_embeddings", False)),
            bos_token_id=config.get("bos_token_id"),
            eos_token_ids=eos_token_ids((config, generation_config or {}), vocab_size, where),
        )


def gguf_model_config(
    metadata: Mapping[str, Any], tensors: Mapping[str, tuple[int, ...]], where: str
) -> ModelConfig:
    """GGUF metadata as a ModelConfig; `tensors` gives the shapes of the file's tensors.

    Raises InputError on an architecture that is not of the Llama type, and on RoPE
    scaling: a GGUF file keeps the result of Llama 3's rule (`rope_freqs`) alone.
    """
    architecture = metadata.get("general.architecture")
    if architecture not in _GGUF_ARCHITECTURES:
        raise InputError(
            f"{where}: general.architecture: found {architecture!r}, "
            f"expected one of {', '.join(_GGUF_ARCHITECTURES)}"
        )
    if "rope_freqs.weight" in tensors:
        raise InputError(
            f"{where}: rope_freqs.weight: found Llama 3 RoPE scaling, which GGUF stores without "
            "its parameters; expected the safetensors checkpoint of this model"
        )
    if f"{architecture}.expert_count" in metadata:
        raise InputError(f"{where}: {architecture}.expert_count: found experts, expected none")
    config: dict[str, Any] = {
        key: metadata[f"{architecture}.{gguf_key}"]
        for gguf_key, key in _GGUF_KEYS.items()
        if f"{architecture}.{gguf_key}" in metadata
    }
    scaling = metadata.get(f"{architecture}.rope.scaling.type", "none")
    if scaling not in ("none", "linear"):
        raise InputError(
            f"{where}: {architecture}.rope.scaling.type: found rope type {scaling!r}, "
            "expected none or linear"
        )
    if scaling != "none":
        factor = metadata.get(f"{architecture}.rope.scaling.factor", 1.0)
        config["rope_scaling"] = {"rope_type": scaling, "factor": factor}
    config["architectures"] = [_GGUF_ARCHITECTURES[architecture]]
    config["attention_bias"] = "blk.0.attn_q.bias" in tensors
    config["tie_word_embeddings"] = "output.weight" not in tensors
    config["vocab_size"] = tensors.get("token_embd.weight", (config.get("vocab_size"),))[0]
    for kind in ("bos", "eos"):
        config[f"{kind}_token_id"] = metadata.get(f"tokenizer.ggml.{kind}_token_id")
    built = model_config(config, where)
    rotated = metadata.get(f"{architecture}.rope.dimension_count", built.block.head_dim)
    if rotated != built.block.head_dim:
        raise InputError(
            f"{where}: {architecture}.rope.dimension_count: found {rotated}, "
            f"expected the head size {built.block.head_dim}"
        )
    return built


def block_config(config: Mapping[str, Any], family: Family, where: str) -> BlockConfig:
    for key in _REQUIRED:
        integer(config, key, where)
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise InputError(f"{where}: hidden_act: found {activation!r}, expected 'silu'")
    heads = config["num_attention_heads"]
    layers = config["num_hidden_layers"]
    head_dim = config.get("head_dim") or family.head_dim or config["hidden_size"] // max(1, heads)
    biased = family.bias_key is not None
    biased &= bool(config.get(family.bias_key or "", family.bias_default))
    moe, dense_layers = _experts(config, family.experts, layers, where)
    with located(where):
        return BlockConfig(
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(head_dim),
            rms_norm_eps=float(config.get("rms_norm_eps", family.rms_norm_eps)),
            rope=rope_config(config, where),
            qkv_bias=family.qkv_bias or biased,
            out_bias=biased,
            mlp_bias=family.mlp_bias and bool(config.get("mlp_bias", False)),
            qk_norm=family.qk_norm,
            windows=_windows(config, family, layers, where),
            sinks=family.sinks,
            gate=_gate(config, family.gate),
            moe=moe,
            dense_layers=dense_layers,
        )


def _gate(config: Mapping[str, Any], gate: GateConfig) -> GateConfig:
    if gate.limit is None:
        return gate
    return dataclasses.replace(
        gate,
        alpha=float(config.get("swiglu_alpha", gate.alpha)),
        limit=float(config.get("swiglu_limit", gate.limit)),
    )


def _experts(
    config: Mapping[str, Any], rule: ExpertRule | None, layers: int, where: str
) -> tuple[MoEConfig | None, tuple[int, ...]]:
    """The experts of a config, and the layers that have none."""
    if rule is None:
        return None, ()
    count_key = "num_experts" if "num_experts" in config else "num_local_experts"
    step, listed = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    if not isinstance(step, int) or step < 1:
        raise InputError(f"{where}: decoder_sparse_step: found {step!r}, expected 1 or more")
    dense = tuple(i for i in range(layers) if i in listed or (i + 1) % step)
    if integer(config, count_key, where) == 0 or len(dense) == layers:
        return None, ()
    normalize = rule.normalize_key is not None and bool(config.get(rule.normalize_key, False))
    with located(where):
        moe = MoEConfig(
            num_experts=config[count_key],
            experts_per_token=integer(config, "num_experts_per_tok", where),
            intermediate_size=integer(config, rule.width_key, where),
            scores=rule.scores,
            normalize=normalize,
            router_bias=rule.biases,
            expert_bias=rule.biases,
        )
    return moe, dense


def _windows(
    config: Mapping[str, Any], family: Family, layers: int, where: str
) -> tuple[int | None, ...]:
    """Sliding windows, one a layer; empty where every layer sees everything."""
    types = config.get("layer_types")
    if types is not None and (len(types) != layers or set(types) - set(_LAYER_TYPES)):
        raise InputError(
            f"{where}: layer_types: found {types}, expected {layers} of {' or '.join(_LAYER_TYPES)}"
        )
    window = config.get("sliding_window")
    if not window or not config.get("use_sliding_window", family.windows_by_default):
        return ()
    if types is not None and family.layer_types:
        sliding = [kind == "sliding_attention" for kind in types]
    else:
        upper = config.get("max_window_layers", _MAX_WINDOW_LAYERS)
        sliding = [
            {"none": False, "all": True, "upper": i >= upper, "even": i % 2 == 0}[
                family.window_rule
            ]
            for i in range(layers)
        ]
    if not any(sliding):
        return ()
    if not isinstance(window, int) or window < 1:
        raise InputError(f"{where}: sliding_window: found {window!r}, expected 1 or more")
    return tuple(window if slides else None for slides in sliding)


def family_of(config: Mapping[str, Any], known: Mapping[str, Family], where: str) -> Family:
    architectures = config.get("architectures") or [None]
    return lookup(architectures[0], known, where, "architectures")


def eos_token_ids(
    sources: Sequence[Mapping[str, Any]], vocab_size: int, where: str
) -> tuple[int, ...]:
    eos: list[int] = []
    for source in sources:
        ids = source.get("eos_token_id")
        eos += [] if ids is None else ids if isinstance(ids, list) else [ids]
    for token in eos:
        if type(token) is not int or not 0 <= token < vocab_size:
            raise InputError(
                f"{where}: eos_token_id: found {token!r}, expected 0 to {vocab_size - 1}"
            )
    return tuple(dict.fromkeys(eos))


def lookup(name: Any, known: Mapping[str, Family], where: str, key: str) -> Family:
    if name not in known:
        raise InputError(f"{where}: {key}: found {name!r}, expected one of {', '.join(known)}")
    return known[name]


def integer(config: Mapping[str, Any], key: str, where: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool):
        raise InputError(f"{where}: {key}: found {value!r}, expected a whole number")
    return value


class located:
    """Puts the file's name in front of an InputError raised inside."""

    def __init__(self, where: str):
        self._where = where

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, InputError) and not str(error).startswith(self._where):
            raise InputError(f"{self._where}: {error}") from None
