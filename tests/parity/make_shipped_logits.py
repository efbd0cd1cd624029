"""Records tests/goldens/fixture_logits.npz: the shipped drafter's logits, by speculators 0.9.

Run in an environment with torch 2.13, speculators 0.9.0 and transformers (no jax needed), from the
root of the repository:

    python -m tests.parity.make_shipped_logits --embedding EMBEDDING.npy [DRAFTER_DIR]

The text, the target's states and the anchors stay those of the file: only `logits` is computed
again, one draft step an anchor, by `PEagleDraftModel.forward` as make_drafter_goldens runs it.
"""

# mypy: disable-error-code="import-not-found"
from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import speculators.models.peagle.core as peagle_core
import torch
from safetensors.torch import load_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.peagle.config import PEagleSpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig

from tests.parity.make_drafter_goldens import peagle_step

ROOT = Path(__file__).resolve().parent.parent.parent
LAYER_KEYS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
    "rms_norm_eps",
    "attention_bias",
    "mlp_bias",
)


def load(folder: Path) -> Any:
    """A checkpoint in vLLM's layout as speculators' model, float32; its embedding, which is the
    target's, stays unset where the checkpoint has none."""
    config = json.loads((folder / "config.json").read_text())
    layer = LlamaConfig(
        **{key: config[key] for key in LAYER_KEYS if key in config},
        rope_parameters={"rope_type": "default", "rope_theta": config["rope_theta"]},
    )
    layer._attn_implementation = "eager"
    model = peagle_core.PEagleDraftModel(
        PEagleSpeculatorConfig(
            architectures=["PEagleDraftModel"],
            transformer_layer_config=layer,
            draft_vocab_size=config["draft_vocab_size"],
            eagle_aux_hidden_state_layer_ids=config["eagle_config"][
                "eagle_aux_hidden_state_layer_ids"
            ],
            mask_token_id=config["ptd_token_id"],
            norm_before_residual=config["norm_before_residual"],
            speculators_config=SpeculatorsConfig(
                algorithm="peagle",
                proposal_methods=[
                    GreedyTokenProposalConfig(speculative_tokens=config["speculative_tokens"])
                ],
                default_proposal_method="greedy",
                verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
            ),
        )
    )
    tensors = load_file(folder / "model.safetensors")
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    missing = [key for key in missing if not key.startswith(("verifier_", "embed_tokens"))]
    if missing or unexpected:
        raise SystemExit(f"{folder}: missing {missing}, unexpected {unexpected}")
    return model.float().eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    shipped = ROOT / "checkpoints" / "smollm2-135m-p-eagle"
    parser.add_argument("drafter", nargs="?", type=Path, default=shipped)
    add = parser.add_argument
    add("--embedding", type=Path, required=True, help="the target's embedding table, .npy [V, H]")
    options = parser.parse_args()

    path = ROOT / "tests" / "goldens" / "fixture_logits.npz"
    recorded = dict(np.load(path))
    model = load(options.drafter)
    with torch.no_grad():
        model.embed_tokens.weight.copy_(torch.from_numpy(np.load(options.embedding)))
    anchor, depth = recorded["anchor"], recorded["depth"]
    k = int(depth.max()) + 1
    shifted = torch.from_numpy(recorded["token_ids"][1:].astype(np.int64))[None]
    aux = torch.from_numpy(recorded["aux_hidden"][:-1])[None]
    logits = np.zeros((len(anchor), model.lm_head.out_features), np.float32)
    for a in np.unique(anchor):
        n = int(a) + 1  # real rows
        width = n + k - 1
        # Rows past the text are masks: neither their tokens nor their states are read.
        pad = max(0, width - shifted.shape[1])
        tokens = torch.nn.functional.pad(shifted, (0, pad))
        states = torch.nn.functional.pad(aux, (0, 0, 0, pad))
        with torch.no_grad():
            step = peagle_step(model, tokens, states, n, k).numpy()
        rows = np.flatnonzero(anchor == a)
        logits[rows] = step[a + depth[rows]]
    recorded["logits"] = logits
    np.savez(path, **recorded)
    print(f"{path}: logits {logits.shape}, std {logits.std():.2f}")


if __name__ == "__main__":
    main()
