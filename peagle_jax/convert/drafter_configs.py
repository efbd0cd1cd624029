"""A drafter's config.json, in any of the four layouts, to DrafterConfig."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from peagle_jax.config import DrafterConfig, ModelConfig
from peagle_jax.convert.configs import (
    LLAMA,
    QWEN3,
    TARGET_FAMILIES,
    block_config,
    eos_token_ids,
    family_of,
    integer,
    located,
    lookup,
)
from peagle_jax.errors import InputError

Layout = Literal["hf", "gguf", "vllm", "speculators", "nemo", "eagle3", "orbax"]


# Drafters take windows from layer_types alone, whatever their family.
_LLAMA_DRAFTER = dataclasses.replace(LLAMA, layer_types=True)
_QWEN3_DRAFTER = dataclasses.replace(QWEN3, window_rule="none")
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
_DRAFTER_KEYS = ("speculators_model_type", "draft_vocab_size", "eagle_config", "parallel_drafting")


def is_drafter(config: Mapping[str, Any] | None, tensors: list[str]) -> bool:
    """Whether a checkpoint is a drafter: its config says so, or layer 0 has a hidden_norm."""
    architectures = (config or {}).get("architectures") or [""]
    return (
        any((config or {}).get(key) is not None for key in _DRAFTER_KEYS)
        or (architectures[0] in DRAFTER_FAMILIES and architectures[0] not in TARGET_FAMILIES)
        or any(name.endswith("hidden_norm.weight") for name in tensors)
    )


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
        family = lookup(inner.get("model_type", "llama"), SPECULATORS_FAMILIES, where, "model_type")
    else:
        says_parallel, norm_before_residual = bool(config.get("parallel_drafting")), False
        inner, family = config, family_of(config, DRAFTER_FAMILIES, where)

    nested = config.get("eagle_config") or {}

    def flag(name: str, default: Any = False) -> Any:
        found = nested.get(name, outer.get(name))
        return default if found is None else found

    mask_id = mask_token_id(outer, where)
    parallel = says_parallel or mask_id is not None or "mask_hidden" in tensors
    if parallel and "mask_hidden" not in tensors:
        raise InputError(
            f"{where}: mask_hidden: found no such tensor in the weights beside it, expected one in "
            "a parallel drafter"
        )
    block = block_config(inner, family, where)
    vocab_size = integer(inner, "vocab_size", where)
    own_embedding = "embed_tokens.weight" in tensors
    own_head = "lm_head.weight" in tensors
    draft_vocab_size = int(flag("draft_vocab_size", vocab_size))
    aux_layer_ids: tuple[int, ...] = ()
    if flag("use_aux_hidden_state", True):
        aux_layer_ids = _aux_layer_ids(
            outer.get("eagle_aux_hidden_state_layer_ids")
            or nested.get("eagle_aux_hidden_state_layer_ids"),
            target,
            where,
            aux_layer_shift,
        )
    proposals = (outer.get("speculators_config") or {}).get("proposal_methods") or [outer]
    trained = None
    if proposals[0].get("speculative_tokens") is not None:
        trained = integer(proposals[0], "speculative_tokens", where)
        if trained < 1:
            raise InputError(f"{where}: speculative_tokens: found {trained}, expected 1 or more")
    with located(where):
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
            trained_num_draft_tokens=trained,
            bos_token_id=inner.get("bos_token_id"),
            eos_token_ids=eos_token_ids([inner], vocab_size, where),
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
