"""Tensor names of each checkpoint layout, and the parameters they become.

A layout's own names are first rewritten to canonical ones (Hugging Face's for targets,
vLLM's for drafters); one table then ties canonical names to parameter paths. Matching
is strict: a tensor is used, known to be ignorable, or an error.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from peagle_jax.config import DrafterConfig, ModelConfig
from peagle_jax.convert.base_reader import Reader, row_chunks

Rules = tuple[tuple[str, str], ...]

# Canonical names from each layout's own: every rule is applied, in order.
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
    "hf": (),
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


@dataclasses.dataclass(frozen=True)
class LazyTensor:
    """One parameter, still in its file: `shape` and `dtype` are the parameter's."""

    reader: Reader
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the parameter."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    def chunks(self) -> list[tuple[int, int]]:
        """(start, stop) row ranges that cover the tensor, small enough for the cache."""
        return row_chunks(self.shape, self.dtype, self.reader.chunk_bytes)

    def rows(self, start: int, stop: int) -> np.ndarray:
        """Rows `[start, stop)` in the parameter's dtype. Raises InputError on NaN or Inf."""
        rows = self.reader.rows(self.name, start, stop).astype(self.dtype, copy=False)
        self.reader.check_finite(self.name, rows)
        return rows

    def part(self, index: tuple[slice, ...] | None = None) -> np.ndarray:
        """A box of the parameter (all of it by default), read chunk by chunk.

        It lies in memory that JAX on CPU adopts without a copy.
        """
        outer, *inner = index or (slice(None),)
        start, stop, _ = outer.indices(self.shape[0])
        shape = [len(range(*s.indices(n))) for s, n in zip(inner, self.shape[1:], strict=False)]
        out = aligned_empty((stop - start, *shape, *self.shape[1 + len(inner) :]), self.dtype)
        for first, last in self.chunks():
            first, last = max(first, start), min(last, stop)
            if first < last:
                out[first - start : last - start] = self.rows(first, last)[:, *inner]
        return out


class MaskHidden(LazyTensor):
    """`mask_hidden` without its leading axes of one: `[n_aux * H_t]`."""

    def rows(self, start: int, stop: int) -> np.ndarray:
        leading = self.reader.shape(self.name)[0]
        flat = self.reader.rows(self.name, 0, leading).reshape(-1)[start:stop]
        self.reader.check_finite(self.name, flat)
        return flat.astype(self.dtype)


class DraftToTarget(LazyTensor):
    """`d2t` as absolute target ids: the checkpoint stores offsets, target id - draft id."""

    def rows(self, start: int, stop: int) -> np.ndarray:
        offsets = self.reader.rows(self.name, start, stop).astype(np.int64)
        return (offsets + np.arange(start, stop)).astype(self.dtype)


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
    wanted = {path: (tensor_name(path, paths), leaf) for path, leaf in flatten(abstract).items()}
    missing = sorted({name for name, _ in wanted.values()} - set(names))
    if missing:
        raise reader.fail(f"{_some(missing)}: found no such tensor, expected one (see the config)")
    used = {name for name, _ in wanted.values()}
    extra = [
        own
        for name, own in names.items()
        if name not in used and not any(re.search(p, name) for p in (*_IGNORABLE, *ignorable))
    ]
    if extra:
        raise reader.fail(
            f"{_some(sorted(extra))}: found and not understood, expected no such tensor"
        )
    return {path: _lazy(reader, names[name], name, leaf) for path, (name, leaf) in wanted.items()}


def _lazy(reader: Reader, own_name: str, name: str, leaf: jax.ShapeDtypeStruct) -> LazyTensor:
    found, dtype = reader.shape(own_name), np.dtype(leaf.dtype)
    compared: tuple[int, ...] = found
    kind: type[LazyTensor] = LazyTensor
    if name == "mask_hidden":
        kind = MaskHidden
        compared = (int(np.prod(found, dtype=np.int64)),)
    elif name == "d2t":
        kind = DraftToTarget
    if compared != leaf.shape:
        raise reader.fail(f"{own_name}: found shape {list(found)}, expected {list(leaf.shape)}")
    if (reader.dtype(own_name).kind in "biu") != (dtype.kind in "iu"):
        raise reader.fail(f"{own_name}: found dtype {reader.dtype(own_name)}, expected {dtype}")
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


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An uninitialised array at a 64-byte boundary: JAX on CPU adopts it without a copy."""
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    buffer = np.empty(size + 64, np.uint8)
    offset = -buffer.ctypes.data % 64
    return buffer[offset : offset + size].view(dtype).reshape(shape)


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
