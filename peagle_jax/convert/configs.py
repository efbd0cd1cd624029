"""Checkpoint metadata (config.json, GGUF keys) to ModelConfig and DrafterConfig.

What families and layouts differ in is in the tables at the top.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, get_args

from peagle_jax.config import BlockConfig, DrafterConfig, ModelConfig, RopeConfig, RopeKind
from peagle_jax.errors import InputError

Layout = Literal["hf", "gguf", "vllm", "speculators", "nemo", "eagle3", "orbax"]


@dataclasses.dataclass(frozen=True)
class Family:
    """What a Hugging Face architecture fixes, and the defaults its config class has."""

    qkv_bias: bool = False
    bias_key: str | None = None  # config key that gives q, k, v and o a bias
    qk_norm: bool = False
    head_dim: int | None = None  # None = hidden_size / num_attention_heads
    max_positions: int = 2048
    window_rule: Literal["none", "all", "upper"] = "none"  # when layer_types is absent
    layer_types: bool = True  # whether the family reads layer_types


_LLAMA = Family(bias_key="attention_bias", layer_types=False)
_QWEN3 = Family(
    bias_key="attention_bias", qk_norm=True, head_dim=128, max_positions=32768, window_rule="upper"
)
TARGET_FAMILIES = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": Family(max_positions=131072, window_rule="all"),
    "Qwen2ForCausalLM": Family(qkv_bias=True, max_positions=32768, window_rule="upper"),
    "Qwen3ForCausalLM": _QWEN3,
}
# Drafters take windows from layer_types alone, whatever their family.
_LLAMA_DRAFTER = Family(bias_key="attention_bias")
_QWEN3_DRAFTER = dataclasses.replace(_QWEN3, window_rule="none")
DRAFTER_FAMILIES = {
    **dict.fromkeys(
        (
            "LlamaForCausalLMEagle3",
            "Eagle3LlamaForCausalLM",
            "PeagleLlamaForCausalLM",
            "LlamaEagle3DraftModel",
            "LlamaForCausalLM",  # the EAGLE-3 originals
        ),
        _LLAMA_DRAFTER,
    ),
    **dict.fromkeys(("Eagle3Qwen3ForCausalLM", "PeagleQwen3ForCausalLM"), _QWEN3_DRAFTER),
}
SPECULATORS_FAMILIES = {"llama": _LLAMA_DRAFTER, "qwen3": _QWEN3_DRAFTER}
# Per speculators_model_type: is it parallel, and its default of norm_before_residual.
SPECULATORS_TYPES = {"peagle": (True, False), "eagle3": (False, True)}

# Where vLLM looks the mask token id up, in its order.
MASK_ID_KEYS = (
    ("dflash_config", "mask_token_id"),
    ("mask_token_id",),
    ("pard_token",),
    ("ptd_token_id",),
)
_REQUIRED = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_DRAFTER_KEYS = ("speculators_model_type", "draft_vocab_size", "eagle_config", "parallel_drafting")

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


def is_drafter(config: Mapping[str, Any] | None, tensors: list[str]) -> bool:
    """Whether a checkpoint is a drafter: its config says so, or layer 0 has a hidden_norm."""
    architectures = (config or {}).get("architectures") or [""]
    return (
        any((config or {}).get(key) is not None for key in _DRAFTER_KEYS)
        or (architectures[0] in DRAFTER_FAMILIES and architectures[0] not in TARGET_FAMILIES)
        or any(name.endswith("hidden_norm.weight") for name in tensors)
    )


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
    family = _family(config, TARGET_FAMILIES, where)
    eos: list[int] = []
    for source in (config, generation_config or {}):
        ids = source.get("eos_token_id")
        eos += [] if ids is None else ids if isinstance(ids, list) else [ids]
    with _located(where):
        return ModelConfig(
            block=_block_config(config, family, where),
            vocab_size=_integer(config, "vocab_size", where),
            max_positions=int(config.get("max_position_embeddings") or family.max_positions),
            tie_embeddings=bool(config.get("tie_word_embeddings", False)),
            bos_token_id=config.get("bos_token_id"),
            eos_token_ids=tuple(dict.fromkeys(int(i) for i in eos)),
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


def drafter_layout(config: Mapping[str, Any], tensors: list[str]) -> Layout:
    """Which of the four known layouts a drafter is in."""
    if "speculators_model_type" in config:
        return "speculators"
    if "LlamaEagle3DraftModel" in (config.get("architectures") or []):
        return "nemo"
    parallel = mask_token_id(config, "") is not None or "mask_hidden" in tensors
    return "eagle3" if any("midlayer." in t for t in tensors) and not parallel else "vllm"


def mask_token_id(config: Mapping[str, Any], where: str) -> int | None:
    """The mask token id, looked up in vLLM's order; it may be written as a string."""
    for keys in MASK_ID_KEYS:
        value: Any = config
        for key in keys:
            value = value.get(key) if isinstance(value, Mapping) else None
        if value is not None:
            try:
                return int(value)
            except (TypeError, ValueError):
                raise InputError(
                    f"{where}: {'.'.join(keys)}: found {value!r}, expected a token id"
                ) from None
    return None


def drafter_config(
    config: Mapping[str, Any],
    tensors: list[str],
    where: str,
    target: ModelConfig | None = None,
    aux_layer_shift: int = 0,
) -> DrafterConfig:
    """A drafter's config.json, in any of the four layouts, as a DrafterConfig.

    Args:
        config: the parsed config.json.
        tensors: the checkpoint's tensor names in vLLM's spelling (`layouts.canonical`).
        where: its file name, for error messages.
        target: needed where the config leaves the aux layer ids or the target's width out.
        aux_layer_shift: added to explicit aux layer ids; 1 for a drafter whose ids have
            SGLang's sense (after decoder layer i) instead of vLLM's (before it).

    Raises InputError on what cannot be honoured.
    """
    outer = config
    if "speculators_model_type" in config:
        kind = config["speculators_model_type"]
        if kind not in SPECULATORS_TYPES:
            raise InputError(
                f"{where}: speculators_model_type: found {kind!r}, "
                f"expected one of {', '.join(SPECULATORS_TYPES)}"
            )
        says_parallel, norm_before_residual = SPECULATORS_TYPES[kind]
        inner = config.get("transformer_layer_config")
        if not isinstance(inner, dict):
            raise InputError(f"{where}: transformer_layer_config: found none, expected an object")
        family = _lookup(
            inner.get("model_type", "llama"), SPECULATORS_FAMILIES, where, "model_type"
        )
    else:
        says_parallel, norm_before_residual = bool(config.get("parallel_drafting")), False
        inner, family = config, _family(config, DRAFTER_FAMILIES, where)

    nested = config.get("eagle_config") or {}

    def flag(name: str, default: Any = False) -> Any:
        found = nested.get(name, outer.get(name))
        return default if found is None else found

    mask_id = mask_token_id(outer, where)
    parallel = says_parallel or mask_id is not None or "mask_hidden" in tensors
    if parallel and "mask_hidden" not in tensors:
        raise InputError(
            f"{where}: mask_hidden: found no such tensor, expected one in a parallel drafter"
        )
    block = _block_config(inner, family, where)
    vocab_size = _integer(inner, "vocab_size", where)
    own_embedding = "embed_tokens.weight" in tensors
    own_head = "lm_head.weight" in tensors
    draft_vocab_size = int(flag("draft_vocab_size", vocab_size))
    if not own_head and draft_vocab_size != vocab_size:
        raise InputError(
            f"{where}: lm_head.weight: found no such tensor, expected one, since "
            f"draft_vocab_size {draft_vocab_size} is not the vocabulary size {vocab_size}"
        )
    aux_layer_ids: tuple[int, ...] = ()
    if flag("use_aux_hidden_state", True):
        aux_layer_ids = _aux_layer_ids(
            outer.get("eagle_aux_hidden_state_layer_ids")
            or nested.get("eagle_aux_hidden_state_layer_ids"),
            target,
            where,
            aux_layer_shift,
        )
    methods = (outer.get("speculators_config") or {}).get("proposal_methods") or [{}]
    with _located(where):
        return DrafterConfig(
            block=block,
            parallel=parallel,
            vocab_size=vocab_size,
            draft_vocab_size=draft_vocab_size,
            target_hidden_size=int(flag("target_hidden_size", block.hidden_size)),
            aux_layer_ids=aux_layer_ids,
            mask_token_id=mask_id,
            norm_before_residual=bool(flag("norm_before_residual", norm_before_residual)),
            norm_before_fc=bool(flag("norm_before_fc")),
            fc_norm=bool(flag("fc_norm")),
            norm_output=bool(flag("norm_output")),
            own_embedding=own_embedding,
            own_head=own_head,
            logit_scale=float(flag("logit_scale", 1.0)),
            trained_num_draft_tokens=methods[0].get("speculative_tokens"),
        )


def check_pair(drafter: DrafterConfig, target: ModelConfig, where: str) -> None:
    """Raises InputError unless `drafter` was made for a target of this shape."""
    lent = [
        name
        for name, own in (("embed_tokens", drafter.own_embedding), ("lm_head", drafter.own_head))
        if not own
    ]
    checks = [
        ("vocab_size", drafter.vocab_size, target.vocab_size),
        ("target_hidden_size", drafter.target_hidden_size, target.block.hidden_size),
    ]
    if lent:  # the target's table must fit
        checks.append(
            (f"hidden_size (no {lent[0]})", drafter.block.hidden_size, target.block.hidden_size)
        )
    for key, found, expected in checks:
        if found != expected:
            raise InputError(f"{where}: {key}: found {found}, expected the target's {expected}")
    if max(drafter.aux_layer_ids, default=0) > target.block.num_layers:
        raise InputError(
            f"{where}: eagle_aux_hidden_state_layer_ids: found {list(drafter.aux_layer_ids)}, "
            f"expected ids up to the target's {target.block.num_layers} layers"
        )


def _block_config(config: Mapping[str, Any], family: Family, where: str) -> BlockConfig:
    for key in _REQUIRED:
        _integer(config, key, where)
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise InputError(f"{where}: hidden_act: found {activation!r}, expected 'silu'")
    heads = config["num_attention_heads"]
    layers = config["num_hidden_layers"]
    head_dim = config.get("head_dim") or family.head_dim or config["hidden_size"] // max(1, heads)
    biased = family.bias_key is not None and bool(config.get(family.bias_key, False))
    with _located(where):
        return BlockConfig(
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(head_dim),
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope=_rope_config(config, where),
            qkv_bias=family.qkv_bias or biased,
            out_bias=biased,
            mlp_bias=bool(config.get("mlp_bias", False)),
            qk_norm=family.qk_norm,
            windows=_windows(config, family, layers, where),
        )


def _rope_config(config: Mapping[str, Any], where: str) -> RopeConfig:
    """From `rope_parameters`, or its older homes `rope_theta` and `rope_scaling`."""
    home = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    rope: Mapping[str, Any] = config.get(home) or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in get_args(RopeKind) or any(isinstance(v, Mapping) for v in rope.values()):
        raise InputError(
            f"{where}: {home}: found rope type {kind!r}, "
            f"expected one of {', '.join(get_args(RopeKind))} for all layers"
        )
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise InputError(f"{where}: partial_rotary_factor: found {partial}, expected 1.0")
    theta = float(rope.get("rope_theta") or config.get("rope_theta") or 10_000.0)
    needed = {
        "default": (),
        "linear": ("factor",),
        "llama3": (
            "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"
        ),
    }[kind]  # fmt: skip
    for key in needed:
        if not isinstance(rope.get(key), int | float):
            raise InputError(f"{where}: {home}.{key}: found {rope.get(key)!r}, expected a number")
    fields = {key: float(rope[key]) for key in needed if not key.startswith("original")}
    if "original_max_position_embeddings" in needed:
        fields["original_max_positions"] = int(rope["original_max_position_embeddings"])
    return RopeConfig(theta=theta, kind=kind, **fields)  # type: ignore[arg-type]


def _windows(
    config: Mapping[str, Any], family: Family, layers: int, where: str
) -> tuple[int | None, ...]:
    """Sliding windows, one a layer; empty where every layer sees everything."""
    window = config.get("sliding_window")
    types = config.get("layer_types") if family.layer_types else None
    if types is None:
        first = {
            "none": layers,
            "all": 0 if window else layers,
            "upper": int(config.get("max_window_layers") or 0)
            if window and config.get("use_sliding_window")
            else layers,
        }[family.window_rule]
        sliding = [index >= first for index in range(layers)]
    else:
        unknown = set(types) - {"full_attention", "sliding_attention"}
        if len(types) != layers or unknown:
            raise InputError(
                f"{where}: layer_types: found {types}, expected {layers} of "
                "full_attention or sliding_attention"
            )
        sliding = [kind == "sliding_attention" for kind in types]
    if not any(sliding):
        return ()
    if not isinstance(window, int) or window < 1:
        raise InputError(f"{where}: sliding_window: found {window!r}, expected 1 or more")
    return tuple(window if slides else None for slides in sliding)


def _aux_layer_ids(
    found: Any, target: ModelConfig | None, where: str, shift: int
) -> tuple[int, ...]:
    key = "eagle_aux_hidden_state_layer_ids"
    if not found:
        if target is None:
            raise InputError(
                f"{where}: {key}: found none, expected ids, or the target at hand "
                "to take the default (2, L/2, L-3) of its L layers"
            )
        layers = target.block.num_layers
        found, shift = [2, layers // 2, layers - 3], 0
    if not isinstance(found, list) or not all(isinstance(i, int) and i + shift >= 0 for i in found):
        raise InputError(f"{where}: {key}: found {found}, expected layer ids of 0 or more")
    return tuple(sorted({i + shift for i in found}))


def _family(config: Mapping[str, Any], known: Mapping[str, Family], where: str) -> Family:
    architectures = config.get("architectures") or [None]
    return _lookup(architectures[0], known, where, "architectures")


def _lookup(name: Any, known: Mapping[str, Family], where: str, key: str) -> Family:
    if name not in known:
        raise InputError(f"{where}: {key}: found {name!r}, expected one of {', '.join(known)}")
    return known[name]


def _integer(config: Mapping[str, Any], key: str, where: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool):
        raise InputError(f"{where}: {key}: found {value!r}, expected a whole number")
    return value


class _located:
    """Puts the file's name in front of an InputError raised inside."""

    def __init__(self, where: str):
        self._where = where

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, InputError) and not str(error).startswith(self._where):
            raise InputError(f"{self._where}: {error}") from None
