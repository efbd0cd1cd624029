"""Tiny random checkpoints, written by the libraries alone, not by the code under test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from peagle_jax.config import BlockConfig, ModelConfig

HIDDEN, TARGET_HIDDEN, INTERMEDIATE = 16, 16, 24
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 4
VOCAB, DRAFT_VOCAB, LAYERS = 40, 12, 2
BF16 = np.dtype(ml_dtypes.bfloat16)

TARGET = ModelConfig(
    block=BlockConfig(HIDDEN, INTERMEDIATE, 8, HEADS, KV_HEADS, HEAD_DIM),
    vocab_size=VOCAB,
    max_positions=64,
)

DRAFTER_JSON: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "num_hidden_layers": LAYERS,
    "vocab_size": VOCAB,
    "draft_vocab_size": DRAFT_VOCAB,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 64,
    "ptd_token_id": 5,
}


def drafter_tensors(
    seed: int = 0,
    dtype: Any = np.float32,
    *,
    num_aux: int = 3,
    layers: int = LAYERS,
    parallel: bool = True,
    bias: bool = False,
    qk_norm: bool = False,
    norm_before_fc: bool = False,
    fc_norm: bool = False,
    own_embedding: bool = False,
    draft_vocab: int = DRAFT_VOCAB,
) -> dict[str, np.ndarray]:
    """A drafter's tensors under vLLM's names, random but for the draft vocabulary."""
    rng = np.random.default_rng(seed)
    feature = num_aux * TARGET_HIDDEN
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (HIDDEN, feature),
        "norm.weight": (HIDDEN,),
        "lm_head.weight": (draft_vocab, HIDDEN),
        "layers.0.hidden_norm.weight": (HIDDEN,),
    }
    for i in range(layers):
        width = HIDDEN if i else 2 * HIDDEN
        sizes = {"q": HEADS * HEAD_DIM, "k": KV_HEADS * HEAD_DIM, "v": KV_HEADS * HEAD_DIM}
        for name, rows in sizes.items():
            shapes[f"layers.{i}.self_attn.{name}_proj.weight"] = (rows, width)
            if bias:
                shapes[f"layers.{i}.self_attn.{name}_proj.bias"] = (rows,)
            if qk_norm and name != "v":
                shapes[f"layers.{i}.self_attn.{name}_norm.weight"] = (HEAD_DIM,)
        shapes[f"layers.{i}.self_attn.o_proj.weight"] = (HIDDEN, HEADS * HEAD_DIM)
        if bias:
            shapes[f"layers.{i}.self_attn.o_proj.bias"] = (HIDDEN,)
        for name, shape in {
            "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
            "mlp.up_proj": (INTERMEDIATE, HIDDEN),
            "mlp.down_proj": (HIDDEN, INTERMEDIATE),
            "input_layernorm": (HIDDEN,),
            "post_attention_layernorm": (HIDDEN,),
        }.items():
            shapes[f"layers.{i}.{name}.weight"] = shape
    if parallel:
        shapes["mask_hidden"] = (1, 1, feature)
    if norm_before_fc:
        shapes["input_norm.weight"] = (feature,)
    if fc_norm:
        shapes |= {f"fc_norm.{i}.weight": (TARGET_HIDDEN,) for i in range(num_aux)}
    if own_embedding:
        shapes["embed_tokens.weight"] = (VOCAB, HIDDEN)
    tensors = {name: rng.normal(size=shape).astype(dtype) for name, shape in shapes.items()}
    if draft_vocab < VOCAB:
        ids = np.sort(rng.permutation(VOCAB)[:draft_vocab])
        tensors["d2t"] = ids - np.arange(draft_vocab)
        tensors["t2d"] = np.isin(np.arange(VOCAB), ids)
    return tensors


def write_checkpoint(
    folder: Path, config: dict[str, Any] | None, tensors: dict[str, np.ndarray]
) -> Path:
    """`folder` with config.json and model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder
