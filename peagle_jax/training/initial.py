"""The drafter that training starts from: its shape and its first parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from peagle_jax.config import DrafterConfig, GateConfig, ModelConfig
from peagle_jax.convert.checkpoint import load_drafter
from peagle_jax.errors import InputError
from peagle_jax.models import drafter as drafter_model
from peagle_jax.training.params import Params
from peagle_jax.training.target import target_head
from peagle_jax.training.train_config import DrafterSection

FROM_TARGET, RANDOM = "target", "random"

# What a section's key is in a drafter's configuration.
_KEYS: dict[str, Callable[[DrafterConfig], Any]] = {
    "method": lambda d: d.method,
    "num_layers": lambda d: d.block.num_layers,
    "intermediate_size": lambda d: d.block.intermediate_size,
    "num_heads": lambda d: d.block.num_heads,
    "num_kv_heads": lambda d: d.block.num_kv_heads,
    "head_dim": lambda d: d.block.head_dim,
    "window": lambda d: d.block.window(0) if len(set(d.block.windows)) == 1 else None,
    "draft_vocab_size": lambda d: d.draft_vocab_size,
    "aux_layer_ids": lambda d: d.aux_layer_ids,
    "mask_token_id": lambda d: d.mask_token_id,
    "norm_before_residual": lambda d: d.norm_before_residual,
    "norm_before_fc": lambda d: d.norm_before_fc,
    "fc_norm": lambda d: d.fc_norm,
    "norm_output": lambda d: d.norm_output,
}


def new_drafter_config(
    section: DrafterSection, target: ModelConfig, mask_token_id: int | None
) -> DrafterConfig:
    """The drafter that a configuration asks for: a Llama-type network as wide as the target.

    `mask_token_id` stands in where the section has none. Raises InputError on values that no
    network has, or not beside this target.
    """
    block, layers = target.block, section.num_layers or 1
    ids = section.aux_layer_ids
    if ids is None:
        last = block.num_layers
        ids = tuple(sorted({min(2, last), last // 2, max(last - 3, 0)}))
    if list(ids) != sorted(set(ids)) or max(ids, default=0) > block.num_layers:
        raise InputError(
            f"drafter.aux_layer_ids: found {list(ids)}, expected rising ids of 0 to "
            f"{block.num_layers}, the target's layers"
        )
    parallel = section.method != "eagle3"
    return DrafterConfig(
        block=dataclasses.replace(
            block,
            intermediate_size=section.intermediate_size or block.intermediate_size,
            num_layers=layers,
            num_heads=section.num_heads or block.num_heads,
            num_kv_heads=section.num_kv_heads or block.num_kv_heads,
            head_dim=section.head_dim or block.head_dim,
            qkv_bias=False,
            out_bias=False,
            mlp_bias=False,
            qk_norm=False,
            windows=() if section.window is None else (section.window,) * layers,
            sinks=False,
            gate=GateConfig(),
            moe=None,
            dense_layers=(),
        ),
        parallel=parallel,
        vocab_size=target.vocab_size,
        draft_vocab_size=section.draft_vocab_size or target.vocab_size,
        target_hidden_size=block.hidden_size,
        aux_layer_ids=ids,
        mask_token_id=mask_token_id if parallel else None,
        norm_before_residual=bool(section.norm_before_residual),
        norm_before_fc=bool(section.norm_before_fc),
        fc_norm=bool(section.fc_norm),
        norm_output=bool(section.norm_output),
        trained_num_draft_tokens=section.num_draft_tokens,
        bos_token_id=target.bos_token_id,
        eos_token_ids=target.eos_token_ids,
    )


def new_params(
    config: DrafterConfig,
    target: ModelConfig,
    target_params: Params,
    draft_to_target: Int[np.ndarray, "draft_vocab"] | None,
    init: str,
    seed: int,
) -> Params:
    """First parameters in float32.

    init "random": norms of 1, everything else normal. "target" changes three of them, so
    that the drafter starts with what the target knows at its last auxiliary layer: `fc` hands
    that layer's state on as it is, and the final norm and the head are the target's.
    """
    params = drafter_model.init(config, jax.random.key(seed), jnp.float32)
    if draft_to_target is not None:
        params["draft_to_target"] = jnp.asarray(draft_to_target, jnp.int32)
    if init == FROM_TARGET:
        if config.has_fc:
            params["fc"]["kernel"] = _last_chunk(config)
        params["norm"]["scale"] = jnp.asarray(target_params["norm"]["scale"], jnp.float32)
        head = target_head(target, target_params, params.get("draft_to_target"))
        params["lm_head"]["kernel"] = jnp.asarray(head, jnp.float32)
    return params


def _last_chunk(config: DrafterConfig) -> Float[Array, "hidden raw"]:
    hidden, wide = config.block.hidden_size, config.feature_size
    return jnp.eye(hidden, wide, wide - config.target_hidden_size, dtype=jnp.float32)


def load_previous(
    path: str, section: DrafterSection, target: ModelConfig
) -> tuple[DrafterConfig, Params]:
    """A drafter to go on from, float32, its configuration with the section's number of depths.

    Raises InputError where the section asks for another shape than it has.
    """
    config, params = load_drafter(path, target_config=target, dtype="float32")
    for key, found in shape_of(config).items():
        asked = getattr(section, key)
        if asked is not None and asked != found:
            raise InputError(
                f"{path}: drafter.{key}: found {found} in the drafter to go on from, "
                f"expected {asked}"
            )
    return dataclasses.replace(config, trained_num_draft_tokens=section.num_draft_tokens), params


def shape_of(config: DrafterConfig) -> dict[str, Any]:
    """A drafter's configuration under the keys of a `DrafterSection`."""
    return {key: value(config) for key, value in _KEYS.items()}


def is_path(init: str) -> bool:
    """Whether `init` names a drafter. Raises InputError where there is nothing of the name."""
    if init in (FROM_TARGET, RANDOM):
        return False
    if not Path(init).expanduser().exists() and "/" not in init and init != "smollm2":
        raise InputError(
            f"drafter.init: found {init!r}, expected {FROM_TARGET!r}, {RANDOM!r} or a drafter's "
            "folder"
        )
    return True
