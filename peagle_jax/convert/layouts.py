"""Tensor names of each checkpoint layout, and the parameters they become.

A layout's own names are first rewritten to canonical ones (Hugging Face's for targets,
vLLM's for drafters); one table then ties canonical names to parameter paths. Matching
is strict: a tensor is used, known to be ignorable, or an error.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from peagle_jax.config import DrafterConfig, ModelConfig
from peagle_jax.convert import expert_tensors
from peagle_jax.convert.base_reader import Reader
from peagle_jax.convert.lazy_tensor import DraftToTarget, LazyTensor, MaskHidden, check_stored

Rules = tuple[tuple[str, str], ...]

# Endings of parameters that lie by rows on a TPU: token tables are gathered from, row by row, and
# a kernel takes the parts of packed experts.
BY_ROWS = ("embed_tokens.embedding", ".kernel.packed", ".kernel.scales")

# Canonical names from each layout's own: every rule is applied, in order.
_HF_NAMES: Rules = ((r"\.mlp\.gate\.", ".mlp.router."),)  # Qwen3-MoE's; gpt-oss says router
_GGUF_NAMES: Rules = (
    (r"^token_embd\.", "model.embed_tokens."),
    (r"^output_norm\.", "model.norm."),
    (r"^output\.", "lm_head."),
    (r"^blk\.", "model.layers."),
    (r"\.attn_([qkv])\.", r".self_attn.\1_proj."),
    (r"\.attn_output\.", ".self_attn.o_proj."),
    (r"\.attn_([qk])_norm\.", r".self_attn.\1_norm."),
    (r"\.attn_norm\.", ".input_layernorm."),
    (r"\.ffn_norm\.", ".post_attention_layernorm."),
    (r"\.ffn_(gate|up|down)\.", r".mlp.\1_proj."),
)
_DRAFTER_NAMES: Rules = ((r"^model\.", ""), (r"^midlayer\.", "layers.0."))
CANONICAL: dict[str, Rules] = {
    "hf": _HF_NAMES,
    "gguf": _GGUF_NAMES,
    "vllm": _DRAFTER_NAMES,
    "speculators": _DRAFTER_NAMES,
    "nemo": _DRAFTER_NAMES,
    "eagle3": _DRAFTER_NAMES,
    "orbax": (),
}
# Parameter paths to canonical names: the first rule that matches.
_COMMON: Rules = (
    (r"^lm_head\.kernel$", "lm_head.weight"),
    (r"^layers_(\d+)\.(.+)\.(?:kernel|scale)$", r"{root}layers.\1.\2.weight"),
    (r"^layers_(\d+)\.(.+)\.bias$", r"{root}layers.\1.\2.bias"),
    (r"^layers_(\d+)\.(.+\.sinks)$", r"{root}layers.\1.\2"),
    (r"^(embed_tokens|norm)\.\w+$", r"{root}\1.weight"),
)
TARGET_PATHS: Rules = tuple((path, name.format(root="model.")) for path, name in _COMMON)
DRAFTER_PATHS: Rules = (
    *((path, name.format(root="")) for path, name in _COMMON),
    (r"^fc_norm_(\d+)\.scale$", r"fc_norm.\1.weight"),
    (r"^(fc|input_norm)\.\w+$", r"\1.weight"),
    (r"^mask_hidden$", "mask_hidden"),
    (r"^draft_to_target$", "d2t"),
)
ORBAX_PATHS: Rules = ((r"^(.+)$", r"\1"),)  # Orbax checkpoints keep the parameters' own names
# Canonical names that carry nothing the parameters need.
_IGNORABLE = (
    r"rotary_emb\.inv_freq$",
    r"^t2d$",  # the inverse of d2t
    r"^verifier_(lm_head|norm)\.weight$",  # speculators' frozen copies of the target's
)


def canonical(reader: Reader, layout: str) -> dict[str, str]:
    """Canonical tensor name -> the reader's own name. Raises InputError where two collide."""
    found: dict[str, str] = {}
    for name in reader.names():
        new = name
        for pattern, replacement in CANONICAL[layout]:
            new = re.sub(pattern, replacement, new)
        if new in found:
            raise reader.fail(f"{new}: found as both {found[new]} and {name}, expected one")
        found[new] = name
    return found


def target_tensors(
    reader: Reader, layout: str, config: ModelConfig, abstract: Any
) -> dict[str, LazyTensor]:
    """Dotted parameter path -> tensor, for a target.

    `abstract` is `models.decoder.abstract_params(config, dtype)`. Raises InputError naming
    missing, unexpected or wrongly shaped tensors.
    """
    ignorable = (r"^lm_head\.weight$",) if config.tie_embeddings else ()
    paths = ORBAX_PATHS if layout == "orbax" else TARGET_PATHS
    return _match(reader, canonical(reader, layout), paths, abstract, ignorable)


def drafter_tensors(
    reader: Reader, layout: str, config: DrafterConfig, abstract: Any
) -> dict[str, LazyTensor]:
    """Dotted parameter path -> tensor, for a drafter.

    `abstract` is `models.drafter.abstract_params(config, dtype)`. Raises InputError naming
    missing, unexpected or wrongly shaped tensors, and on a `d2t` out of range.
    """
    names = canonical(reader, layout)
    ignorable = [] if config.has_fc else [r"^fc\.weight$"]  # vLLM drops it too
    if config.draft_vocab_size == config.vocab_size:
        ignorable.append(r"^d2t$")
    paths = ORBAX_PATHS if layout == "orbax" else DRAFTER_PATHS
    tensors = _match(reader, names, paths, abstract, tuple(ignorable))
    if "d2t" in names:
        _check_draft_vocabulary(reader, names["d2t"], config)
    return tensors


def _match(
    reader: Reader,
    names: Mapping[str, str],
    paths: Rules,
    abstract: Any,
    ignorable: tuple[str, ...],
) -> dict[str, LazyTensor]:
    # Experts are stored in other forms than the parameters have, but for Orbax's.
    form = expert_tensors.form_of(names) if paths == TARGET_PATHS else None
    wanted: dict[str, tuple[list[str], jax.ShapeDtypeStruct]] = {}
    for path, leaf in flatten(abstract).items():
        name = tensor_name(path, paths)
        stored = expert_tensors.stored_names(name, leaf.shape[0], form) if form else [name]
        wanted[path] = (stored, leaf)
    used = {name for stored, _ in wanted.values() for name in stored}
    missing = sorted(used - set(names))
    if missing:
        raise reader.fail(f"{_some(missing)}: found no such tensor, expected one (see the config)")
    extra = [
        own
        for name, own in names.items()
        if name not in used and not any(re.search(p, name) for p in (*_IGNORABLE, *ignorable))
    ]
    if extra:
        raise reader.fail(
            f"{_some(sorted(extra))}: found and not understood, expected no such tensor"
        )
    found = {}
    for path, (stored, leaf) in wanted.items():
        own_names = tuple(names[name] for name in stored)
        experts = None
        if form:
            experts = expert_tensors.lazy(reader, own_names, tensor_name(path, paths), leaf, form)
        found[path] = experts or _lazy(reader, own_names[0], stored[0], leaf)
    return found


def _lazy(reader: Reader, own_name: str, name: str, leaf: jax.ShapeDtypeStruct) -> LazyTensor:
    dtype = np.dtype(leaf.dtype)
    compared: tuple[int, ...] | None = None
    kind: type[LazyTensor] = LazyTensor
    if name == "mask_hidden":
        kind = MaskHidden
        compared = (int(np.prod(reader.shape(own_name), dtype=np.int64)),)
    elif name == "d2t":
        kind = DraftToTarget
    check_stored(reader, own_name, leaf.shape, dtype, compared)
    return kind(reader, own_name, tuple(leaf.shape), dtype)


def _check_draft_vocabulary(reader: Reader, name: str, config: DrafterConfig) -> None:
    offsets = reader.read(name).astype(np.int64)
    ids = offsets + np.arange(len(offsets))
    if config.draft_vocab_size == config.vocab_size:
        if offsets.any():
            raise reader.fail(f"{name}: found a mapping, expected none without a draft vocabulary")
        return
    if ids.min() < 0 or ids.max() >= config.vocab_size:
        raise reader.fail(
            f"{name}: found target ids {ids.min()} to {ids.max()}, "
            f"expected 0 to {config.vocab_size - 1}"
        )
    if len(np.unique(ids)) != len(ids):
        raise reader.fail(f"{name}: found a target id twice, expected each at most once")


def tensor_name(path: str, paths: Rules) -> str:
    """The canonical tensor name of a dotted parameter path."""
    for pattern, replacement in paths:
        if re.match(pattern, path):
            return re.sub(pattern, replacement, path)
    raise KeyError(f"no layout rule for parameter {path}")


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested dict as one of dotted paths."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def unflatten(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The nested dict of dotted paths."""
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        *parents, leaf = path.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    return tree


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
