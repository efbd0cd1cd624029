"""Records tests/goldens/drafters: tiny random drafters with logits computed by speculators 0.9.

Run in an environment with torch 2.13, speculators 0.9.0 and transformers (no jax needed):

    python tests/parity/make_drafter_goldens.py [OUT_DIR] [--only NAME]

Everything is seeded by the case's name, so a second run writes the same bytes.

P-EAGLE. One decode draft step = real rows at positions 0..n-1, then K-1 mask rows at n..n+K-2. In
speculators' terms: the elements (anchor p, depth 0) for every p < n and the chain (n-1, d) for
d in 1..K-1. The logits come from `PEagleDraftModel.forward` itself; only its sampling of elements
is replaced (by that list) and its loss is intercepted (to read the logits). `input_ids` are handed
over already shifted, as speculators' data pipeline does: row p pairs aux_hidden[p] with token p+1.

EAGLE-3. Real rows 0..n-1 as above, then K-1 steps; step j feeds the token drafted by the row before
it and that row's output hidden state (before the final norm, after it with `norm_output`) at
position n-1+j. Each step reruns speculators' own embedding, layers, norm, head, rotary embedding
and mask function over all rows, without a cache. Where no layer has a window, the result is also
compared with `Eagle3DraftModel.forward` (its test-time-training unroll, fed the drafted tokens).
With a window the two differ on purpose: the unroll keeps the anchor's window, whereas a decoding
step at a later position sees a window that has moved on, which is what serving engines compute.
"""

# mypy: disable-error-code="import-not-found"
from __future__ import annotations

import argparse
import dataclasses
import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import speculators.models.eagle3.core as eagle3_core
import speculators.models.peagle.core as peagle_core
import torch
from safetensors.torch import save_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.eagle3.attention import create_combined_mask_mod
from speculators.models.eagle3.config import Eagle3SpeculatorConfig
from speculators.models.peagle.config import PEagleSpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig, Qwen3Config

Model = Any  # PEagleDraftModel or Eagle3DraftModel
VOCAB, DRAFT_VOCAB, MASK_ID = 96, 40, 7
NUM_TOKENS = 26
STEPS = ((9, 5), (21, 3))  # (real rows n, drafted tokens K) of the recorded draft steps
BASE_LAYER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
SLIDING, FULL = "sliding_attention", "full_attention"


@dataclasses.dataclass(frozen=True)
class Case:
    """A drafter: what differs from the base, and how its checkpoint is written."""

    name: str
    layer: dict[str, Any] = dataclasses.field(default_factory=dict)
    flags: dict[str, Any] = dataclasses.field(default_factory=dict)
    model_type: str = "llama"
    draft_vocab: int = DRAFT_VOCAB
    target_width: int | None = None  # None: the drafter's own width
    layer_ids: tuple[int, ...] = (1, 3, 5)
    lent: tuple[str, ...] = ()  # modules left out of the checkpoint: the target's are lent
    flat: bool = False  # write the flat config that serving engines read
    logit_scale: float = 1.0

    @property
    def parallel(self) -> bool:
        return self.name.startswith("peagle")


CASES = (
    Case("peagle_base"),
    Case("peagle_norm_before_residual", flags={"norm_before_residual": True}),
    Case("peagle_norm_before_fc", flags={"norm_before_fc": True}),
    Case("peagle_fc_norm_norm_output", flags={"fc_norm": True, "norm_output": True}),
    Case("peagle_biases", layer={"attention_bias": True, "mlp_bias": True}),
    Case("peagle_qwen3", layer={"num_hidden_layers": 3}, model_type="qwen3"),
    Case(
        "peagle_sliding",
        layer={"layer_types": [FULL, SLIDING], "sliding_window": 6},
    ),
    Case(
        "peagle_qwen3_all_sliding",
        layer={"layer_types": [SLIDING, SLIDING], "sliding_window": 5, "use_sliding_window": True},
        model_type="qwen3",
        flags={"norm_before_residual": True},
    ),
    Case("peagle_full_vocab", draft_vocab=VOCAB, layer={"num_hidden_layers": 1}),
    Case("peagle_lent", draft_vocab=VOCAB, lent=("embed_tokens", "lm_head")),
    Case("peagle_lent_head_draft_vocab", lent=("lm_head",)),
    Case("peagle_lent_embedding", lent=("embed_tokens",)),
    Case("peagle_llama3_rope", layer={"rope_parameters": LLAMA3_ROPE}),
    Case(
        "peagle_linear_rope",
        layer={"rope_parameters": {"rope_type": "linear", "rope_theta": 2e4, "factor": 2.5}},
    ),
    Case("peagle_target_width", target_width=24, flags={"fc_norm": True}),
    Case("peagle_target_width_norm_before_fc", target_width=40, flags={"norm_before_fc": True}),
    Case("peagle_four_chunks", layer_ids=(0, 2, 4, 6)),
    Case(
        "peagle_large_eps", layer={"rms_norm_eps": 0.05, "num_attention_heads": 2, "head_dim": 16}
    ),
    Case("peagle_flat_logit_scale", flat=True, logit_scale=0.35, flags={"norm_before_fc": True}),
    Case("eagle3_base", flags={"norm_before_residual": True}, layer={"num_hidden_layers": 1}),
    Case("eagle3_two_layers", layer={"num_hidden_layers": 2}),
    Case("eagle3_norm_output", flags={"norm_output": True, "norm_before_residual": True}),
    Case("eagle3_norm_before_fc", flags={"norm_before_fc": True}, layer={"num_hidden_layers": 1}),
    Case("eagle3_fc_norm_norm_output", flags={"fc_norm": True, "norm_output": True}),
    Case("eagle3_qwen3_biases", layer={"attention_bias": True}, model_type="qwen3"),
    Case(
        "eagle3_sliding",
        layer={"layer_types": [SLIDING, FULL], "sliding_window": 4},
    ),
    Case("eagle3_lent", draft_vocab=VOCAB, lent=("embed_tokens", "lm_head")),
    Case("eagle3_llama3_rope", layer={"rope_parameters": LLAMA3_ROPE}),
    Case("eagle3_target_width", target_width=24, flags={"norm_before_residual": True}),
    Case("eagle3_final_hidden", flat=True, layer_ids=(), layer={"num_hidden_layers": 1}),
)


def layer_config(case: Case) -> LlamaConfig | Qwen3Config:
    """The transformers config of the drafter's layers."""
    config_class = {"llama": LlamaConfig, "qwen3": Qwen3Config}[case.model_type]
    config = config_class(**{**BASE_LAYER, **case.layer})
    config._attn_implementation = "eager"
    return config


def build(case: Case) -> Model:
    """The speculators model of `case` with every parameter random and none trivial."""
    method = "peagle" if case.parallel else "eagle3"
    common = {
        "transformer_layer_config": layer_config(case),
        "draft_vocab_size": case.draft_vocab,
        "eagle_aux_hidden_state_layer_ids": list(case.layer_ids) or None,
        "target_hidden_size": case.target_width,
        "speculators_config": SpeculatorsConfig(
            algorithm=method,
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=5)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
        ),
        **case.flags,
    }
    if case.parallel:
        config = PEagleSpeculatorConfig(
            architectures=["PEagleDraftModel"], mask_token_id=MASK_ID, **common
        )
        model = peagle_core.PEagleDraftModel(config)
    else:
        config = Eagle3SpeculatorConfig(architectures=["Eagle3DraftModel"], **common)
        model = eagle3_core.Eagle3DraftModel(config)
    if case.target_width is not None:
        widen(model, case.target_width, len(case.layer_ids))
    randomise(model, np.random.default_rng(zlib.crc32(case.name.encode())))
    return model.eval()


def widen(model: Model, width: int, chunks: int) -> None:
    """Speculators itself only trains drafters as wide as their target: resize what meets it."""
    norm_class, eps = type(model.norm), model.norm.variance_epsilon
    model.fc = torch.nn.Linear(chunks * width, model.hidden_size, bias=False)
    if model.input_norm is not None:
        model.input_norm = norm_class(chunks * width, eps=eps)
    if model.fc_norm is not None:
        model.fc_norm = torch.nn.ModuleList(norm_class(width, eps=eps) for _ in range(chunks))
    if hasattr(model, "mask_hidden"):
        model.mask_hidden = torch.nn.Parameter(torch.empty(1, 1, chunks * width))


def randomise(model: Model, rng: np.random.Generator) -> None:
    """Norms in 0.5..1.5, biases of 0.3, kernels that keep the variance; queries and keys larger,
    so that attention is far from uniform. The draft vocabulary is a sorted random subset."""
    for name, parameter in sorted(model.named_parameters()):
        if name.startswith("verifier_"):
            continue
        shape = tuple(parameter.shape)
        if "norm" in name:
            value = rng.uniform(0.5, 1.5, shape)
        elif name.endswith("bias"):
            value = rng.normal(0, 0.3, shape)
        elif name in ("embed_tokens.weight", "mask_hidden"):
            value = rng.normal(0, 1, shape)
        else:
            gain = 2.0 if "q_proj" in name or "k_proj" in name else 1.0
            value = rng.normal(0, gain / np.sqrt(shape[-1]), shape)
        with torch.no_grad():
            parameter.copy_(torch.from_numpy(value))
    if model.use_draft_vocab:
        chosen = np.sort(rng.permutation(VOCAB)[: model.draft_vocab_size])
        model.d2t.copy_(torch.from_numpy(chosen - np.arange(len(chosen))))
        model.t2d[torch.from_numpy(chosen)] = True


def feature(model: Model, aux: torch.Tensor, case: Case) -> torch.Tensor:
    """Chunks of target states [1, T, chunks * width] to drafter features [1, T, hidden]."""
    if not case.layer_ids:
        return aux  # the target's final hidden state is the feature, unprojected
    if model.input_norm is not None:
        aux = model.input_norm(aux)
    if model.fc_norm is not None:
        chunks = aux.chunk(len(model.fc_norm), dim=-1)
        aux = torch.cat([norm(c) for norm, c in zip(model.fc_norm, chunks, strict=True)], dim=-1)
    return model.fc(aux)


def peagle_step(model: Model, shifted: torch.Tensor, aux: torch.Tensor, n: int, k: int):
    """Logits [n + k - 1, draft_vocab] of one parallel draft step, by speculators' own forward."""
    anchor = torch.cat([torch.arange(n), torch.full((k - 1,), n - 1)])
    depth = torch.cat([torch.zeros(n, dtype=torch.long), torch.arange(1, k)])
    seen: list[torch.Tensor] = []

    def take_logits(*, logits: torch.Tensor, **_: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        seen.append(logits[0])
        return torch.zeros(()), {}

    # Chains reach past the real rows, so the sequence that holds them is n + k - 1 long; its last
    # k - 1 tokens and states are never read at depth 0.
    length = n + k - 1
    sampler, metrics = peagle_core.generate_cod_sample_indices, peagle_core.compute_metrics
    peagle_core.generate_cod_sample_indices = lambda **_: (anchor, depth)
    peagle_core.compute_metrics = take_logits
    try:
        model(
            hidden_states=aux[:, :length],
            input_ids=shifted[:, :length],
            document_ids=torch.zeros(1, length, dtype=torch.long),
            verifier_last_hidden_states=torch.zeros(1, length, model.hidden_size),
        )
    finally:
        peagle_core.generate_cod_sample_indices, peagle_core.compute_metrics = sampler, metrics
    return seen[0]


def eagle3_steps(
    model: Model, shifted: torch.Tensor, aux: torch.Tensor, n: int, k: int, case: Case
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [n + k - 1, draft_vocab] of an autoregressive draft and the k drafted target ids."""
    tokens, features = shifted[:, :n], feature(model, aux[:, :n], case)
    drafted: list[torch.Tensor] = []
    for _ in range(k):
        length = tokens.shape[1]
        positions = torch.arange(length)[None]
        hidden = torch.cat([model.embed_tokens(tokens), features], dim=-1)
        rotary = model.rotary_emb(hidden, positions)
        for i, layer in enumerate(model.layers):
            window = model.sliding_window if i in model.sliding_window_indices else None
            mask_mod = create_combined_mask_mod(torch.zeros(length), length, sliding_window=window)
            mask = model._create_mask_fn(mask_mod, None, None, length, length, device="cpu")
            hidden = layer(
                hidden, attention_mask=mask, position_ids=positions, position_embeddings=rotary
            )
        normed = model.norm(hidden)
        logits = model.lm_head(normed)[0]
        best = logits[-1].argmax()
        drafted.append(best + model.d2t[best] if model.use_draft_vocab else best)
        fed_back = normed if model.config.norm_output else hidden
        tokens = torch.cat([tokens, drafted[-1][None, None]], dim=1)
        features = torch.cat([features, fed_back[:, -1:]], dim=1)
    return logits, torch.stack(drafted)


def check_with_unroll(
    model: Model, shifted: torch.Tensor, aux: torch.Tensor, n: int, logits, drafted
) -> None:
    """The chain of anchor n-1 in speculators' training unroll gives the same logits."""
    k = len(drafted)
    tokens = torch.cat([shifted[:, :n], drafted[None, : k - 1], shifted[:, n + k - 1 :]], dim=1)
    seen: list[torch.Tensor] = []
    handle = model.lm_head.register_forward_hook(lambda _m, _i, out: seen.append(out[0, n - 1]))
    try:
        model(
            hidden_states=aux,
            input_ids=tokens,
            document_ids=torch.zeros_like(tokens),
            position_ids=torch.arange(tokens.shape[1])[None],
            ttt_steps=k,
        )
    finally:
        handle.remove()
    torch.testing.assert_close(torch.stack(seen), logits[n - 1 :], rtol=1e-4, atol=2e-5)


def write_config(folder: Path, model: Model, case: Case) -> None:
    """config.json: as speculators writes it, or the flat one of the served checkpoints."""
    if not case.flat:
        model.config.save_pretrained(folder)
        # transformers copies a custom config's source beside it: not a part of the case.
        (folder / "config.py").unlink(missing_ok=True)
        return
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **{k: v for k, v in {**BASE_LAYER, **case.layer}.items() if k != "rope_parameters"},
        "rope_theta": BASE_LAYER["rope_parameters"]["rope_theta"],
        "hidden_act": "silu",
        "draft_vocab_size": case.draft_vocab,
        "logit_scale": case.logit_scale,
        **case.flags,
    }
    if case.parallel:
        config["ptd_token_id"] = MASK_ID
    ids = {"eagle_aux_hidden_state_layer_ids": list(case.layer_ids)} if case.layer_ids else {}
    config["eagle_config"] = {**ids, "use_aux_hidden_state": bool(case.layer_ids)}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def write_case(case: Case, out: Path) -> None:
    """Writes <out>/<name>/{config.json, model.safetensors, io.npz}.

    io.npz: token_ids int32 [T], aux_hidden float32 [T, chunks * width], steps int32 [S, 2] of
    (n, K), and for each step s logits_s float32 [n + K - 1, draft_vocab] (real rows, then the
    rows of the drafted chain) and, for EAGLE-3, drafted_s int32 [K] (target ids);
    target_embed_tokens / target_lm_head float32 [V, H] where they are lent.
    """
    folder = out / case.name
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(zlib.crc32(case.name.encode()) + 1)
    model = build(case)
    io: dict[str, Any] = {
        "token_ids": rng.integers(0, VOCAB, NUM_TOKENS).astype(np.int32),
        "steps": np.array(STEPS, np.int32),
    }
    width = case.target_width or model.hidden_size
    chunks = max(1, len(case.layer_ids))
    scales = np.repeat(2.0 ** np.arange(chunks), width)  # deeper states are larger, as in reality
    io["aux_hidden"] = (rng.normal(0, 1, (NUM_TOKENS, len(scales))) * scales).astype(np.float32)
    if "lm_head" in case.lent:
        head = rng.normal(0, model.hidden_size**-0.5, (VOCAB, model.hidden_size)).astype(np.float32)
        io["target_lm_head"] = head
        rows = model.t2d if model.use_draft_vocab else torch.ones(VOCAB, dtype=torch.bool)
        model.lm_head.weight.data.copy_(torch.from_numpy(head)[rows])
    if "embed_tokens" in case.lent:
        io["target_embed_tokens"] = model.embed_tokens.weight.detach().numpy()

    shifted = torch.from_numpy(io["token_ids"][1:].astype(np.int64))[None]
    aux = torch.from_numpy(io["aux_hidden"][:-1])[None]
    with torch.no_grad():
        for s, (n, k) in enumerate(STEPS):
            if case.parallel:
                logits = peagle_step(model, shifted, aux, n, k)
            else:
                logits, drafted = eagle3_steps(model, shifted, aux, n, k, case)
                if case.layer_ids and not model.uses_sliding_window_attn:
                    check_with_unroll(model, shifted, aux, n, logits, drafted)
                io[f"drafted_{s}"] = drafted.numpy().astype(np.int32)
            io[f"logits_{s}"] = (logits * case.logit_scale).numpy()
    np.savez(folder / "io.npz", **io)

    unused = () if case.layer_ids else ("fc.",)
    left_out = ("verifier_", *unused, *(f"{name}." for name in case.lent))
    state = model.state_dict()
    tensors = {k: v.contiguous() for k, v in state.items() if not k.startswith(left_out)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    write_config(folder, model, case)
    spread = float(np.std(io["logits_0"]))
    print(f"{case.name}: {len(tensors)} tensors, logits std {spread:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = Path(__file__).resolve().parent.parent / "goldens" / "drafters"
    parser.add_argument("out", type=Path, nargs="?", default=default)
    parser.add_argument("--only", help="write the case of this name alone")
    args = parser.parse_args()
    torch.set_num_threads(1)  # the order of sums, hence the last bits, must not vary
    for case in CASES:
        if args.only in (None, case.name):
            write_case(case, args.out)


if __name__ == "__main__":
    main()
