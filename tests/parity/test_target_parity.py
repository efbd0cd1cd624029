"""Target logits, features and router choices against transformers, live, on tiny random models of
every family that travel as a checkpoint on disk (so that conversion is compared as well)."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from peagle_jax.config import ModelConfig
from peagle_jax.convert.checkpoint import load_target
from peagle_jax.models.cache import KVCache
from peagle_jax.models.decoder import Decoder, DecoderOutput
from peagle_jax.models.moe import Router
from peagle_jax.models.paged_cache import Cache

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
# The contexts below go on past 16, and past every window.
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "beta_fast": 2.0,  # these two put the blend over dimensions 0.2 to 2.5 of 6
    "beta_slow": 0.2,
    "truncate": False,
    "original_max_position_embeddings": 16,
}
WINDOW = 7
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
SLIDING = {"sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 1}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
GPT_OSS = {
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "intermediate_size": 48,
    "head_dim": 12,
    "sliding_window": WINDOW,
    "attention_bias": True,
    "swiglu_limit": 0.7,  # low enough to bound something here
}
# (family, changes): each family's own parts, and rotary embeddings on one of them.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gqa": ("Llama", {}),
    "mha_large_eps": ("Llama", {"num_key_value_heads": 4, "rms_norm_eps": 0.05}),
    "tied": ("Llama", {"tie_word_embeddings": True}),
    "attention_bias": ("Llama", {"attention_bias": True}),
    "mlp_bias": ("Llama", {"mlp_bias": True}),
    "head_dim": ("Llama", {"head_dim": 20}),
    "llama3_rope": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "linear_rope": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 2e4, "factor": 2.5}},
    ),
    "all_at_once": (
        "Llama",
        {
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "head_dim": 10,
            "tie_word_embeddings": True,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": LLAMA3_ROPE,
        },
    ),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2_sliding": ("Qwen2", SLIDING),
    "qwen3": ("Qwen3", {"head_dim": 20, "attention_bias": True}),
    "qwen3_sliding_yarn": (
        "Qwen3",
        {
            **SLIDING,
            "head_dim": 16,
            "rope_parameters": {**YARN_ROPE, "truncate": True, "attention_factor": 0.8},
        },
    ),
    "qwen3_moe": ("Qwen3Moe", {**EXPERTS, "head_dim": 20, "norm_topk_prob": True}),
    "qwen3_moe_some_dense": ("Qwen3Moe", {**EXPERTS, "mlp_only_layers": [1]}),
    "gpt_oss": ("GptOss", {**GPT_OSS, "rope_parameters": YARN_ROPE}),
}
SPARSE = ("qwen3_moe", "qwen3_moe_some_dense", "gpt_oss")
NUM_LAYERS = BASE["num_hidden_layers"]
AUX_LAYER_IDS = (0, 2, NUM_LAYERS)  # the embeddings, a middle depth, before the final norm
LENGTHS = (34, 23)  # two sequences; past the 16 positions that LLAMA3_ROPE starts from
TOLERANCE = 1e-4


def make_reference(family: str, changes: dict[str, Any]) -> Any:
    """A random model in which no parameter is trivial and attention is not uniform."""
    config = getattr(transformers, f"{family}Config")(**{**BASE, **changes})
    config._attn_implementation = "eager"  # the others leave sinks out, or want a GPU
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    rng = np.random.default_rng(len(repr(changes)))
    for name, parameter in sorted(model.named_parameters()):
        shape = tuple(parameter.shape)
        if "norm" in name:
            value = rng.uniform(0.5, 1.5, shape)
        elif name.endswith(("bias", "sinks")):
            value = rng.normal(0, 0.3, shape)
        else:
            gain = 2.0 if "q_proj" in name or "k_proj" in name else 1.0
            value = rng.normal(0, gain / np.sqrt(config.hidden_size), shape)
        parameter.data.copy_(torch.from_numpy(value))
    return model.eval()


@dataclasses.dataclass
class Expected:
    """One sequence through the reference: logits [T, V], the residual stream [T, H] after i
    layers, i = 0 .. L, and each router's choices [T, chosen]."""

    logits: np.ndarray
    streams: dict[int, np.ndarray]
    choices: list[np.ndarray]


def reference_outputs(model: Any, tokens: np.ndarray) -> Expected:
    before_norm: list[Any] = []
    choices: list[np.ndarray] = []
    hooks = [
        model.model.norm.register_forward_pre_hook(lambda _m, args: before_norm.append(args[0]))
    ]
    for name, module in model.named_modules():
        if type(module).__name__.endswith("TopKRouter"):
            hooks.append(
                module.register_forward_hook(lambda _m, _a, out: choices.append(out[2].numpy()))
            )
            assert "mlp" in name
    with torch.no_grad():
        out = model(torch.from_numpy(tokens.astype(np.int64))[None], output_hidden_states=True)
    for hook in hooks:
        hook.remove()
    streams = {i: h[0].numpy() for i, h in enumerate(out.hidden_states[:-1])}
    streams[len(out.hidden_states) - 1] = before_norm[0][0].numpy()
    return Expected(out.logits[0].numpy(), streams, choices)


class Pair:
    """A reference model, the same model loaded here, and two sequences run through the former."""

    def __init__(self, family: str, changes: dict[str, Any], folder: Path):
        reference = make_reference(family, changes)
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
        self,
        start: tuple[int, ...],
        count: int,
        cache: Cache,
        real: tuple[int, ...] | None = None,
    ) -> tuple[np.ndarray, DecoderOutput]:
        """Logits [2, count, V] and the output of rows start .. of both sequences."""
        run = functools.partial(forward, self.config, AUX_LAYER_IDS)
        counts = None if real is None else jnp.asarray(real, jnp.int32)
        at = jnp.asarray(start, jnp.int32)
        logits, out = run(self.params, self.rows(start, count), at, cache, counts)
        return np.asarray(logits), out

    def check(
        self, start: tuple[int, ...], count: tuple[int, ...], logits: np.ndarray, out: DecoderOutput
    ) -> None:
        """Rows start .. start + count of each sequence equal the reference's."""
        for b, expected in enumerate(self.expected):
            rows = slice(start[b], start[b] + count[b])
            features = np.concatenate([expected.streams[i][rows] for i in AUX_LAYER_IDS], axis=-1)
            found_logits, found_features = logits[b, : count[b]], out.features[b, : count[b]]
            np.testing.assert_allclose(found_logits, expected.logits[rows], rtol=0, atol=TOLERANCE)
            np.testing.assert_allclose(found_features, features, rtol=0, atol=TOLERANCE)


@functools.partial(jax.jit, static_argnums=(0, 1))
def forward(
    config: ModelConfig,
    aux_layer_ids: tuple[int, ...],
    params: Any,
    tokens: Any,
    start: Any,
    cache: Cache,
    counts: Any,
) -> tuple[Any, Any]:
    decoder, variables = Decoder(config, jnp.float32), {"params": params}
    out = decoder.apply(variables, tokens, start, cache, aux_layer_ids, counts)
    assert isinstance(out, DecoderOutput)
    return decoder.apply(variables, out.hidden, method="logits"), out


@pytest.fixture(scope="module", params=CASES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(*CASES[request.param], tmp_path_factory.mktemp(request.param))


def test_prefill_equals_transformers(pair: Pair) -> None:
    cache = KVCache.init(pair.config.block, 2, 64, jnp.float32)
    logits, out = pair.run((0, 0), max(LENGTHS), cache)
    assert np.std(logits) > 0.5  # the comparison below means something
    pair.check((0, 0), LENGTHS, logits, out)


def test_cached_decode_equals_transformers(pair: Pair) -> None:
    """Prompts of 20 and 9 tokens in one padded call, two single tokens, two 4-row chunks: every
    sequence at its own position, over slots that the padding or the chunk before has written.
    Layers with a window keep rings, which the prompts are longer than."""
    prompt, cache = (20, 9), KVCache.init(pair.config.block, 2, 64, jnp.float32, span=4)
    windows = [pair.config.block.window(i) for i in range(NUM_LAYERS)]
    assert [layer.ring for layer in cache.layers] == [window is not None for window in windows]
    assert all(layer.capacity == (16 if layer.ring else 64) for layer in cache.layers)
    logits, out = pair.run((0, 0), max(prompt), cache, prompt)
    pair.check((0, 0), prompt, logits, out)
    start = prompt
    # The last chunk begins two rows back: the rollback of two rejected tokens.
    for count, advance in ((1, 1), (1, 1), (4, 2), (4, 4)):
        logits, out = pair.run(start, count, out.cache)
        pair.check(start, (count, count), logits, out)
        start = (start[0] + advance, start[1] + advance)


@pytest.mark.parametrize("pair", SPARSE, indirect=True)
def test_routers_choose_the_same_experts(pair: Pair) -> None:
    cache = KVCache.init(pair.config.block, 2, 64, jnp.float32)
    _, variables = Decoder(pair.config, jnp.float32).apply(
        {"params": pair.params},
        pair.rows((0, 0), max(LENGTHS)),
        jnp.zeros(2, jnp.int32),
        cache,
        capture_intermediates=lambda module, _: isinstance(module, Router),
        mutable=["intermediates"],
    )
    layers = [i for i in range(NUM_LAYERS) if pair.config.block.experts(i) is not None]
    for b, expected in enumerate(pair.expected):
        assert len(expected.choices) == len(layers)
        for layer, choices in zip(layers, expected.choices, strict=True):
            router = variables["intermediates"][f"layers_{layer}"]["mlp"]["router"]
            chosen, _ = router["__call__"][0]
            np.testing.assert_array_equal(chosen[b, : LENGTHS[b]], choices)
            assert len(np.unique(choices)) >= 5  # hardly an expert is idle


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
    stream = pair.expected[0].streams[NUM_LAYERS][:20]
    scale = np.asarray(pair.params["norm"]["scale"])
    eps = pair.config.block.rms_norm_eps
    expected = stream / np.sqrt((stream**2).mean(-1, keepdims=True) + eps) * scale
    np.testing.assert_allclose(out.features[0], expected, rtol=0, atol=TOLERANCE)
