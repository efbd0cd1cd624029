"""Records tests/goldens/training: P-EAGLE's loss and gradient on one text, by speculators 0.9.

Run in an environment with torch 2.13, speculators 0.9.0 and transformers (no jax needed), from the
root of the repository:

    python -m tests.parity.make_training_goldens [OUT_DIR]

The drafter is a case of make_drafter_goldens; the elements are speculators' own draw; the loss is
its KL divergence. One document: speculators lets chains of packed documents cross into the next,
and chains that would start before the text are left out here. `input_ids`, target states and
loss mask are handed over already shifted, as its data pipeline does, so that row p pairs
aux_hidden[p] with token p+1 and is compared with the target at p+1. The loss mask marks rows
whose predicted token, p+2, is in the answer.
"""

# mypy: disable-error-code="import-not-found"
from __future__ import annotations

import argparse
import shutil
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import speculators.models.peagle.core as peagle_core
import torch
from safetensors.torch import save_file
from speculators.losses import resolve_loss_config

from tests.parity.make_drafter_goldens import CASES, VOCAB, build

GOLDENS = Path(__file__).resolve().parent.parent / "goldens"
CASE = "peagle_sliding"
NUM_TOKENS, NUM_DEPTHS, FIRST_ANSWER = 30, 5, 8


def write_case(name: str, out: Path) -> None:
    """Writes <out>/<name>/{config.json, model.safetensors, io.npz}: the checkpoint's tensors are
    gradients, but for d2t."""
    (case,) = (case for case in CASES if case.name == name)
    model = build(case)
    rng = np.random.default_rng(zlib.crc32(name.encode()) + 2)
    torch.manual_seed(0)

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.from_numpy(rng.normal(0, scale, shape).astype(np.float32))

    width = model.hidden_size
    tokens = torch.from_numpy(rng.integers(0, VOCAB, NUM_TOKENS))
    aux = normal(NUM_TOKENS, len(case.layer_ids) * width)
    states = normal(NUM_TOKENS, width, scale=3.0)
    head = normal(VOCAB, width, scale=2.0 * width**-0.5)
    kept = model.d2t + torch.arange(len(model.d2t))
    with torch.no_grad():
        model.verifier_norm.weight.copy_(torch.from_numpy(rng.uniform(0.5, 1.5, width)))
        model.verifier_lm_head.weight.copy_(head[kept])
        hidden = model.verifier_norm(states)
    for parameter_name, parameter in model.named_parameters():
        parameter.requires_grad_(not parameter_name.startswith("verifier_"))

    answer = torch.arange(NUM_TOKENS) >= FIRST_ANSWER
    # Of the rows p < NUM_TOKENS - 1, the last predicts a token that the text does not have.
    loss_mask = torch.cat([answer[2:], torch.tensor([False])])
    anchor, depth = draw(loss_mask)
    sampler = peagle_core.generate_cod_sample_indices
    peagle_core.generate_cod_sample_indices = lambda **_: (anchor, depth)
    try:
        _, loss, metrics = model(
            hidden_states=aux[None, :-1],
            input_ids=tokens[None, 1:],
            document_ids=torch.zeros(1, NUM_TOKENS - 1, dtype=torch.long),
            loss_mask=loss_mask[None].float(),
            verifier_last_hidden_states=states[None, 1:],
            loss_config=resolve_loss_config("kl_div", "eager"),
            num_depths=NUM_DEPTHS,
        )
    finally:
        peagle_core.generate_cod_sample_indices = sampler
    loss.backward()

    folder = out / name
    folder.mkdir(parents=True, exist_ok=True)
    accuracy = [
        metrics[f"position_{d}_acc_sum"] / metrics[f"position_{d}_acc_total"]
        for d in range(NUM_DEPTHS)
    ]
    io: dict[str, Any] = {
        "token_ids": tokens.numpy().astype(np.int32),
        "answer": answer.numpy(),
        "aux_hidden": aux.numpy(),
        "hidden": hidden.numpy(),
        "target_head": head.numpy(),
        "anchor": anchor.numpy().astype(np.int32),
        "depth": depth.numpy().astype(np.int32),
        "count": np.float32(loss_mask[anchor + depth].sum()),
        "loss": loss.detach().numpy(),
        "accuracy": torch.stack(accuracy).numpy(),
    }
    np.savez(folder / "io.npz", **io)
    tensors = {
        key: parameter.grad.contiguous()
        for key, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    tensors["d2t"] = model.d2t
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    shutil.copy(GOLDENS / "drafters" / name / "config.json", folder / "config.json")
    counts = np.bincount(io["depth"])
    print(f"{name}: loss {float(loss.detach()):.4f}, elements by depth {counts}")


def draw(loss_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Speculators' elements, without those before the text and those that cannot be whole."""
    anchor, depth = peagle_core.generate_cod_sample_indices(
        seq_length=len(loss_mask), loss_mask=loss_mask, num_depths=NUM_DEPTHS
    )
    keep = (anchor >= 0) & (anchor + depth < len(loss_mask))
    return anchor[keep], depth[keep]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, nargs="?", default=GOLDENS / "training")
    torch.set_num_threads(1)  # the order of sums, hence the last bits, must not vary
    write_case(CASE, parser.parse_args().out)


if __name__ == "__main__":
    main()
