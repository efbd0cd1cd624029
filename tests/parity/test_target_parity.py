"""Target logits and features against transformers' LlamaForCausalLM, live, on tiny random models
that travel as a checkpoint on disk (so that conversion is compared as well)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from peagle_jax.convert.checkpoint import load_target
from peagle_jax.models.cache import KVCache
from peagle_jax.models.decoder import Decoder, DecoderOutput

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
BASE: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
CASES: dict[str, dict[str, Any]] = {
    "gqa": {},
    "mha_large_eps": {"num_key_value_heads": 4, "rms_norm_eps": 0.05},
    "tied": {"tie_word_embeddings": True},
    "attention_bias": {"attention_bias": True},
    "mlp_bias": {"mlp_bias": True},
    "head_dim": {"head_dim": 20},
    "llama3_rope": {"rope_parameters": LLAMA3_ROPE},
    "linear_rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 2e4, "factor": 2.5}},
    "all_at_once": {
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 10,
        "tie_word_embeddings": True,
        "attention_bias": True,
        "mlp_bias": True,
        "rope_parameters": LLAMA3_ROPE,
    },
}
NUM_LAYERS = BASE["num_hidden_layers"]
AUX_LAYER_IDS = (0, 2, NUM_LAYERS)  # the embeddings, a middle depth, before the final norm
LENGTHS = (34, 23)  # two sequences; past the 16 positions that LLAMA3_ROPE starts from
TOLERANCE = 1e-4


def make_reference(overrides: dict[str, Any]) -> Any:
    """A random LlamaForCausalLM in which no parameter is trivial and attention is not uniform."""
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**BASE, **overrides}))
    rng = np.random.default_rng(len(repr(overrides)))
    for name, parameter in sorted(model.named_parameters()):
        shape = tuple(parameter.shape)
        if "norm" in name:
            value = rng.uniform(0.5, 1.5, shape)
        elif name.endswith("bias"):
            value = rng.normal(0, 0.3, shape)
        else:
            gain = 2.0 if "q_proj" in name or "k_proj" in name else 1.0
            value = rng.normal(0, gain / np.sqrt(shape[-1]), shape)
        parameter.data.copy_(torch.from_numpy(value))
    return model.eval()


def reference_outputs(model: Any, tokens: np.ndarray) -> tuple[np.ndarray, dict[int, np.ndarray]]:
    """Logits [T, V] and the residual stream [T, H] after i layers, i = 0 .. L, of one sequence."""
    before_norm: list[Any] = []
    hook = model.model.norm.register_forward_pre_hook(lambda _m, args: before_norm.append(args[0]))
    with torch.no_grad():
        out = model(torch.from_numpy(tokens.astype(np.int64))[None], output_hidden_states=True)
    hook.remove()
    streams = {i: h[0].numpy() for i, h in enumerate(out.hidden_states[:-1])}
    streams[len(out.hidden_states) - 1] = before_norm[0][0].numpy()
    return out.logits[0].numpy(), streams


class Pair:
    """A reference model, the same model loaded here, and two sequences run through the former."""

    def __init__(self, overrides: dict[str, Any], folder: Path):
        reference = make_reference(overrides)
        reference.save_pretrained(folder)
        self.config, self.params = load_target(folder)
        rng = np.random.default_rng(0)
        self.tokens = [rng.integers(0, BASE["vocab_size"], n) for n in LENGTHS]
        self.expected = [reference_outputs(reference, tokens) for tokens in self.tokens]

    def rows(self, start: tuple[int, ...], count: int) -> jnp.ndarray:
        """Tokens [2, count] from each sequence's own start; past its end, token 0."""
        padded = [np.pad(t, (0, count)) for t in self.tokens]
        window = [t[s : s + count] for t, s in zip(padded, start, strict=True)]
        return jnp.asarray(np.stack(window), jnp.int32)

    def run(
        self, start: tuple[int, ...], count: int, cache: KVCache
    ) -> tuple[np.ndarray, DecoderOutput]:
        """Logits [2, count, V] and the output of rows start .. of both sequences."""
        decoder, variables = Decoder(self.config, jnp.float32), {"params": self.params}
        out = decoder.apply(
            variables, self.rows(start, count), jnp.asarray(start, jnp.int32), cache, AUX_LAYER_IDS
        )
        assert isinstance(out, DecoderOutput)
        logits = decoder.apply(variables, out.hidden, method="logits")
        return np.asarray(logits), out

    def check(
        self, start: tuple[int, ...], count: tuple[int, ...], logits: np.ndarray, out: DecoderOutput
    ) -> None:
        """Rows start .. start + count of each sequence equal the reference's."""
        for b, (expected_logits, streams) in enumerate(self.expected):
            rows = slice(start[b], start[b] + count[b])
            features = np.concatenate([streams[i][rows] for i in AUX_LAYER_IDS], axis=-1)
            found_logits, found_features = logits[b, : count[b]], out.features[b, : count[b]]
            np.testing.assert_allclose(found_logits, expected_logits[rows], rtol=0, atol=TOLERANCE)
            np.testing.assert_allclose(found_features, features, rtol=0, atol=TOLERANCE)


@pytest.fixture(scope="module", params=CASES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(CASES[request.param], tmp_path_factory.mktemp(request.param))


def test_prefill_equals_transformers(pair: Pair) -> None:
    cache = KVCache.init(pair.config.block, 2, 64, jnp.float32)
    logits, out = pair.run((0, 0), max(LENGTHS), cache)
    assert np.std(logits) > 0.5  # the comparison below means something
    pair.check((0, 0), LENGTHS, logits, out)


def test_cached_decode_equals_transformers(pair: Pair) -> None:
    """Prompts of 20 and 9 tokens in one padded call, two single tokens, two 4-row chunks: every
    sequence at its own position, over slots that the padding or the chunk before has written."""
    prompt, cache = (20, 9), KVCache.init(pair.config.block, 2, 64, jnp.float32)
    logits, out = pair.run((0, 0), max(prompt), cache)
    pair.check((0, 0), prompt, logits, out)
    start = prompt
    # The last chunk begins two rows back: the rollback of two rejected tokens.
    for count, advance in ((1, 1), (1, 1), (4, 2), (4, 4)):
        logits, out = pair.run(start, count, out.cache)
        pair.check(start, (count, count), logits, out)
        start = (start[0] + advance, start[1] + advance)


@pytest.mark.parametrize("pair", ["gqa"], indirect=True)
def test_features_default_to_the_final_hidden_state(pair: Pair) -> None:
    """Without aux layer ids a drafter gets what the head gets: the state after the final norm."""
    cache = KVCache.init(pair.config.block, 2, 64, jnp.float32)
    zero = jnp.zeros(2, jnp.int32)
    out = Decoder(pair.config, jnp.float32).apply(
        {"params": pair.params}, pair.rows((0, 0), 20), zero, cache
    )
    assert isinstance(out, DecoderOutput)
    np.testing.assert_array_equal(out.features, out.hidden)
    stream = pair.expected[0][1][NUM_LAYERS][:20]
    scale = np.asarray(pair.params["norm"]["scale"])
    eps = pair.config.block.rms_norm_eps
    expected = stream / np.sqrt((stream**2).mean(-1, keepdims=True) + eps) * scale
    np.testing.assert_allclose(out.features[0], expected, rtol=0, atol=TOLERANCE)
