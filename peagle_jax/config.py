"""Static descriptions of networks and requests: frozen, hashable, safe as `jax.jit` statics.

Families are data here, never branches: a target or drafter that needs an
`if name == ...` somewhere in the models is a field that is missing in this file.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

from peagle_jax.errors import InputError

RopeKind = Literal["default", "linear", "llama3", "yarn"]
RouterScores = Literal["softmax_top_k", "top_k_softmax"]
Method = Literal[
    "p-eagle",
    "eagle3",
    "p-eagle+lookup",
    "eagle3+lookup",
    "p-eagle+tree",
    "p-eagle+tree+lookup",
    "prompt-lookup",
    "none",
]
DraftSampling = Literal["greedy", "sample"]
Verification = Literal["coupled", "rejection"]
# How a target's weights are kept in memory; "full": all in the dtype of the computation.
WeightForm = Literal["full", "mxfp4", "int8"]

METHODS: tuple[Method, ...] = get_args(Method)
_LOOKUP, _TREE = "+lookup", "+tree"
MAX_DRAFT_TOKENS = 32


def needs_drafter(method: Method | None) -> bool:
    """Whether a drafter network drafts; None stands for the method of one."""
    return method not in ("prompt-lookup", "none")


def network_method(method: Method) -> str | None:
    """What a drafter must have been trained for, "p-eagle" or "eagle3"; None without one."""
    return method.split("+")[0] if needs_drafter(method) else None


def looks_up(method: Method) -> bool:
    """Whether the text's own past drafts, alone or before a drafter is asked."""
    return method == "prompt-lookup" or method.endswith(_LOOKUP)


def drafts_tree(method: Method) -> bool:
    """Whether the drafts of a step are alternatives, a tree, rather than one chain."""
    return _TREE in method


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding (RoFormer, arXiv 2104.09864) and its context extensions.

    `kind` names the frequency rule as Hugging Face's `rope_type` does. The fields
    below `theta` matter to the rules that use them; the others ignore them. The last
    four are YaRN's (arXiv 2309.00071): `beta_fast` and `beta_slow` rotations over the
    original context bound the blend, `truncate` rounds these bounds to whole
    dimensions, and `attention_factor` scales cosines and sines.
    """

    theta: float = 10_000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0


@dataclasses.dataclass(frozen=True)
class GateConfig:
    """The gate of a feed-forward: g * sigmoid(alpha * g) * (u + up_offset).

    The defaults are SwiGLU (arXiv 2002.05202). `limit` bounds g from above and u from
    both sides first. gpt-oss has alpha 1.702, limit 7 and offset 1.
    """

    alpha: float = 1.0
    limit: float | None = None
    up_offset: float = 0.0


@dataclasses.dataclass(frozen=True)
class MoEConfig:
    """A feed-forward of `num_experts`, of which each token takes `experts_per_token`.

    `scores` says how the chosen ones are weighted: "softmax_top_k" is a softmax over all
    experts of which the chosen values are kept (and made to sum to 1 by `normalize`);
    "top_k_softmax" is a softmax over the chosen ones alone.
    """

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    scores: RouterScores = "softmax_top_k"
    normalize: bool = False
    router_bias: bool = False
    expert_bias: bool = False

    def __post_init__(self) -> None:
        for name in ("num_experts", "intermediate_size"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}: found {getattr(self, name)}, expected 1 or more")
        if not 1 <= self.experts_per_token <= self.num_experts:
            raise InputError(
                f"experts_per_token: found {self.experts_per_token}, expected 1 to "
                f"{self.num_experts}, the number of experts"
            )


@dataclasses.dataclass(frozen=True)
class BlockConfig:
    """What one decoder layer is made of: shared by the target and by every drafter.

    Sizes are element counts. `windows[i]` is layer i's sliding window in tokens
    (a query sees itself and the `window - 1` positions before it), None = full
    attention; an empty tuple means full attention everywhere. `sinks`: every query
    head has one more score, learned, that takes its share of the softmax and adds no
    value. `moe`: the feed-forward is a choice of experts in every layer but
    `dense_layers`.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-5
    rope: RopeConfig = RopeConfig()
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int | None, ...] = ()
    sinks: bool = False
    gate: GateConfig = GateConfig()
    moe: MoEConfig | None = None
    dense_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}: found {getattr(self, name)}, expected 1 or more")
        if self.num_heads % self.num_kv_heads:
            raise InputError(
                f"num_heads: found {self.num_heads}, expected a multiple of "
                f"num_kv_heads = {self.num_kv_heads}"
            )
        if self.head_dim < 2 or self.head_dim % 2:
            raise InputError(f"head_dim: found {self.head_dim}, expected an even number (RoPE)")
        if self.windows and len(self.windows) != self.num_layers:
            raise InputError(
                f"windows: found {len(self.windows)} entries, expected {self.num_layers}, "
                "one a layer"
            )
        if any(window is not None and window < 1 for window in self.windows):
            raise InputError(f"windows: found {list(self.windows)}, expected 1 or more, or None")
        known = set(range(self.num_layers)) if self.moe else set()
        if not set(self.dense_layers) <= known:
            raise InputError(
                f"dense_layers: found {list(self.dense_layers)}, expected layers among the "
                f"{len(known)} that could have experts"
            )

    def window(self, layer: int) -> int | None:
        """Sliding window of `layer` in tokens, None = full attention."""
        return self.windows[layer] if self.windows else None

    def experts(self, layer: int) -> MoEConfig | None:
        """The experts of `layer`, None = a plain feed-forward."""
        return None if layer in self.dense_layers else self.moe


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A target: decoder blocks between an embedding and a head.

    `max_positions` is the context: prompt and answer together never exceed it.
    `eos_token_ids` end a generation. `tie_embeddings` = the head is the embedding.
    """

    block: BlockConfig
    vocab_size: int
    max_positions: int
    tie_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class DrafterConfig:
    """An EAGLE-3 or P-EAGLE drafter (arXiv 2503.01840, arXiv 2602.01469).

    `parallel` tells the two apart: a parallel drafter (P-EAGLE) drafts K tokens
    in one pass with `mask_token_id` and the learned `mask_hidden`; the other
    feeds its own output back, a pass a token. They are never interchanged.

    `aux_layer_ids[i] = l` means the target's residual stream after l decoder
    layers (0 = the embeddings). An empty tuple means the target's final hidden
    state alone, after the target's final norm, with no `fc`.

    `draft_vocab_size` == `vocab_size` means no draft vocabulary; otherwise the
    parameters hold `d2t`, the target id of every draft id.
    `own_embedding` / `own_head`: False = the target's is lent.
    `bos_token_id` and `eos_token_ids` are kept for other engines; here the target's count.
    """

    block: BlockConfig
    parallel: bool
    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    aux_layer_ids: tuple[int, ...]
    mask_token_id: int | None = None
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    own_embedding: bool = False
    own_head: bool = True
    logit_scale: float = 1.0
    trained_num_draft_tokens: int | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.block.moe is not None or self.block.sinks:
            raise InputError("drafter: found experts or attention sinks, expected neither")
        if self.norm_before_fc and self.fc_norm:
            raise InputError("norm_before_fc and fc_norm: found both true, expected at most one")
        if self.parallel and self.mask_token_id is None:
            raise InputError(
                "mask token id: found none, expected one in a parallel drafter's config "
                "(mask_token_id, pard_token or ptd_token_id)"
            )
        if self.mask_token_id is not None and not 0 <= self.mask_token_id < self.vocab_size:
            raise InputError(
                f"mask token id (mask_token_id, pard_token or ptd_token_id): found "
                f"{self.mask_token_id}, expected 0 to {self.vocab_size - 1}"
            )
        if not self.aux_layer_ids:
            if self.parallel:
                raise InputError(
                    "use_aux_hidden_state: found false in a parallel drafter, expected true "
                    "(its mask_hidden stands in for auxiliary hidden states)"
                )
            if self.target_hidden_size != self.block.hidden_size:
                raise InputError(
                    f"hidden_size: found {self.block.hidden_size}, expected the target's "
                    f"{self.target_hidden_size} in a drafter without auxiliary hidden states"
                )
        if not 0 < self.draft_vocab_size <= self.vocab_size:
            raise InputError(
                f"draft_vocab_size: found {self.draft_vocab_size}, expected 1 to {self.vocab_size}"
            )

    @property
    def num_chunks(self) -> int:
        """How many target hidden states a feature is made of."""
        return max(1, len(self.aux_layer_ids))

    @property
    def has_fc(self) -> bool:
        """Whether a projection brings the target's states to the drafter's width."""
        return bool(self.aux_layer_ids)

    @property
    def feature_size(self) -> int:
        """Width of the raw feature handed over by the target, `num_chunks * target_hidden_size`."""
        return self.num_chunks * self.target_hidden_size

    @property
    def method(self) -> Method:
        """The drafting method that this drafter was trained for."""
        return "p-eagle" if self.parallel else "eagle3"


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How one request is answered. `temperature` 0 is greedy; filters apply in the
    order temperature, top-k, top-p, min-p (0 or 1.0 switches each of them off).

    `seed` None draws one from the operating system. `stop` are strings that end the
    text (not part of it). `ignore_eos` goes on past the end-of-sequence token.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "stop", tuple([self.stop] if isinstance(self.stop, str) else self.stop)
        )
        if self.max_new_tokens < 1:
            raise InputError(f"max_new_tokens: found {self.max_new_tokens}, expected 1 or more")
        if not 0 <= self.temperature < float("inf"):
            raise InputError(f"temperature: found {self.temperature}, expected 0 (greedy) or more")
        if self.top_k < 0:
            raise InputError(f"top_k: found {self.top_k}, expected 0 (off) or more")
        if not 0 < self.top_p <= 1:
            raise InputError(f"top_p: found {self.top_p}, expected a number in (0, 1]")
        if not 0 <= self.min_p <= 1:
            raise InputError(f"min_p: found {self.min_p}, expected a number in [0, 1]")
        if self.seed is not None and not 0 <= self.seed < 2**32:
            raise InputError(f"seed: found {self.seed}, expected 0 to 2**32 - 1")
        if any(not s for s in self.stop):
            raise InputError("stop: found an empty string, expected non-empty strings")


def check_num_draft_tokens(num_draft_tokens: int) -> None:
    """Raises InputError unless K is one that can be drafted."""
    if not 1 <= num_draft_tokens <= MAX_DRAFT_TOKENS:
        raise InputError(
            f"num_draft_tokens: found {num_draft_tokens}, expected 1 to {MAX_DRAFT_TOKENS}"
        )
