"""Tiny random targets with drafters that are often right.

All embeddings share one direction, so every context shares a part of its next-token
distribution; the rest depends on the context. A drafter is fitted in closed form: its
`fc` is the least-squares map from the target's features to the hidden state one token
later, its mask rows stand for the mean of these states, its head is nearly the target's.
So its drafts are accepted and rejected at every position.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from peagle_jax.batching import Batch, Request
from peagle_jax.config import BlockConfig, DrafterConfig, ModelConfig, SamplingParams
from peagle_jax.decoding import generate, sampling
from peagle_jax.decoding.sampling import RequestArrays
from peagle_jax.decoding.speculate import Speculator
from peagle_jax.models import decoder, drafter
from peagle_jax.models.cache import KVCache

HIDDEN = 16
VOCAB = 23
BLOCK = BlockConfig(
    hidden_size=HIDDEN,
    intermediate_size=24,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
)

# Every filter alone, all together, and greedy rows among them.
PARAMS = (
    SamplingParams(),
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_k=3),
    SamplingParams(temperature=1.0, top_p=0.8),
    SamplingParams(temperature=1.0, min_p=0.15),
    SamplingParams(temperature=0.7, top_k=5, top_p=0.9, min_p=0.05),
    SamplingParams(temperature=1.0, top_k=6, top_p=0.85, min_p=0.1),
)


def target_config(**changes: Any) -> ModelConfig:
    return dataclasses.replace(ModelConfig(BLOCK, VOCAB, max_positions=1024), **changes)


def drafter_config(
    target: ModelConfig, *, parallel: bool, num_layers: int = 1, **changes: Any
) -> DrafterConfig:
    """By default without a draft vocabulary, with a head of its own."""
    hidden = target.block.hidden_size
    config = DrafterConfig(
        block=dataclasses.replace(BLOCK, hidden_size=hidden, num_layers=num_layers),
        parallel=parallel,
        vocab_size=target.vocab_size,
        draft_vocab_size=target.vocab_size,
        target_hidden_size=hidden,
        aux_layer_ids=(0, 1, 2),
        mask_token_id=target.vocab_size - 1 if parallel else None,
    )
    return dataclasses.replace(config, **changes)


def target_params(config: ModelConfig, seed: int = 0) -> dict[str, Any]:
    """Random, with peaked but not constant next-token distributions."""
    params = _random(decoder.abstract_params(config), np.random.default_rng(seed))
    table = params["embed_tokens"]["embedding"]
    shared = np.random.default_rng(1234).standard_normal(config.block.hidden_size)
    params["embed_tokens"]["embedding"] = (shared + 0.8 * table / table.std()).astype(np.float32)
    head = params["lm_head"]["kernel"]
    params["lm_head"]["kernel"] = (0.4 * head / head.std()).astype(np.float32)
    return params


def drafter_params(
    config: DrafterConfig,
    fit: tuple[np.ndarray, np.ndarray],
    head: np.ndarray,
    head_noise: float,
    seed: int = 1,
) -> dict[str, Any]:
    """`fit`: the map [hidden, features] from features to the next hidden state, and the mean of
    these states. Draft ids, if any, are target ids in no order."""
    rng = np.random.default_rng(seed)
    params = _random(drafter.abstract_params(config), rng)
    to_next, mean = fit
    # The layers disturb the fitted guess a little: all of the network takes part.
    for layer in range(config.block.num_layers):
        for module, name in (("self_attn", "o_proj"), ("mlp", "down_proj")):
            params[f"layers_{layer}"][module][name]["kernel"] *= np.float32(0.3 / (1 + layer))
    params["fc"]["kernel"] = to_next
    if "draft_to_target" in params:
        ids = rng.permutation(config.vocab_size)[: config.draft_vocab_size].astype(np.int32)
        params["draft_to_target"] = ids
        head = head[ids]
    noise = head_noise * rng.standard_normal(head.shape)
    params["lm_head"]["kernel"] = (head + noise).astype(np.float32)
    if config.parallel:
        params["mask_hidden"] = np.linalg.lstsq(to_next, mean, rcond=None)[0].astype(np.float32)
    return params


def fit_features(
    config: ModelConfig, params: dict[str, Any], aux_layer_ids: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray]:
    """Least squares on text that the target samples itself; see `drafter_params`."""
    rows, length = 48, 24
    start = jnp.zeros(rows, jnp.int32)
    noise = jax.random.gumbel(jax.random.key(0), (rows, length, config.vocab_size))
    network = decoder.Decoder(config)

    @jax.jit
    def improve(tokens: Any) -> Any:
        """Every token drawn again after those before it; the noise is fixed, so each
        call makes one more position final."""
        cache = KVCache.init(config.block, rows, length, jnp.float32)
        out = network.apply({"params": params}, tokens, start, cache, aux_layer_ids)
        logits = network.apply({"params": params}, out.hidden, method="logits")
        drawn = jnp.argmax(logits + noise, axis=-1)
        return jnp.concatenate([tokens[:, :1], drawn[:, :-1]], axis=1), out

    tokens = jax.random.randint(jax.random.key(1), (rows, length), 0, config.vocab_size)
    for _ in range(length):
        tokens, out = improve(tokens)
    hidden = np.asarray(out.hidden)[:, 1:].reshape(-1, config.block.hidden_size)
    features = np.asarray(out.features)[:, :-1].reshape(len(hidden), -1)
    to_next = np.linalg.lstsq(features, hidden, rcond=1e-4)[0].T
    return to_next.astype(np.float32), hidden.mean(axis=0)


def _random(tree: Any, rng: np.random.Generator) -> Any:
    """Norm scales near 1; everything else normal, scaled by its last dimension."""

    def fill(path: Any, leaf: Any) -> np.ndarray:
        values = rng.standard_normal(leaf.shape)
        if path[-1].key == "scale":
            values = 1 + 0.1 * values
        else:
            values = values / np.sqrt(leaf.shape[-1])
        return values.astype(leaf.dtype)

    return jax.tree_util.tree_map_with_path(fill, tree)


@dataclasses.dataclass(frozen=True)
class Tiny:
    """A target, its parameters, and a drafter for each method."""

    target: ModelConfig
    drafters: dict[str, DrafterConfig]
    trees: dict[str, Any]

    def speculator(self, method: str, num_draft_tokens: int = 0, **options: Any) -> Speculator:
        drafter = self.drafters.get(method.split("+")[0])
        return Speculator(self.target, drafter, method, num_draft_tokens, **options)  # type: ignore[arg-type]

    def params(self, method: str) -> dict[str, Any]:
        tree = {"target": self.trees["target"]}
        method = method.split("+")[0]
        return {**tree, "drafter": self.trees[method]} if method in self.trees else tree

    def with_target(self, **changes: Any) -> Tiny:
        """The same parameters under another target configuration."""
        return dataclasses.replace(self, target=dataclasses.replace(self.target, **changes))


def make(
    draft_vocab_size: int | None = None,
    vocab_size: int = VOCAB,
    head_noise: float = 0.05,
    drafter_layers: int = 1,
    in_form: Callable[[dict[str, Any]], Any] = lambda tree: tree,
    **changes: Any,
) -> Tiny:
    """Target and both drafters; the P-EAGLE drafter has a draft vocabulary if asked.

    `head_noise`: standard deviation of the drafters' heads around the target's (0.4). `in_form`
    makes the target's parameters from full ones."""
    target = target_config(vocab_size=vocab_size, **changes)
    full = target_params(target)
    tree = jax.device_put(in_form(full))
    drafters = {
        "p-eagle": drafter_config(
            target,
            parallel=True,
            draft_vocab_size=draft_vocab_size or vocab_size,
            num_layers=drafter_layers,
        ),
        "eagle3": drafter_config(
            target, parallel=False, norm_output=True, num_layers=drafter_layers
        ),
    }
    fit = fit_features(target, tree, drafters["p-eagle"].aux_layer_ids)
    trees = {"target": tree}
    for method, config in drafters.items():
        trees[method] = drafter_params(config, fit, full["lm_head"]["kernel"], head_noise)
    return Tiny(target, drafters, jax.device_put(trees))


def make_batch(
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    prompt_size: int,
    max_new_tokens: int,
) -> Batch:
    """One row a prompt."""
    requests = [
        Request(i, tuple(ids), one)
        for i, (ids, one) in enumerate(zip(prompts, params, strict=True))
    ]
    return Batch(tuple(requests), len(requests), prompt_size, max_new_tokens)


@dataclasses.dataclass(frozen=True)
class Result:
    """What `generate_tokens` gave, on the host."""

    tokens: np.ndarray
    lengths: np.ndarray
    hit_eos: np.ndarray
    num_drafts: np.ndarray
    accepted: np.ndarray

    def row(self, row: int) -> list[int]:
        return self.tokens[row, : self.lengths[row]].tolist()

    def rows(self) -> list[list[int]]:
        return [self.row(row) for row in range(len(self.lengths))]


def run(
    tiny: Tiny,
    speculator: Speculator,
    batch: Batch,
    table: RequestArrays | None = None,
    **options: Any,
) -> Result:
    """The compiled loop on a batch; `table` takes the place of its sampling parameters."""
    prompts, lengths, own = batch.arrays()
    tokens, counts, stats = generate.jit_generate_tokens(
        tiny.params(speculator.method),
        jnp.asarray(prompts),
        jnp.asarray(lengths),
        own if table is None else table,
        speculator=speculator,
        max_new_tokens=batch.max_new_tokens,
        **options,
    )
    parts = (tokens, counts, stats.hit_eos, stats.num_drafts, stats.accepted_per_position)
    return Result(*map(np.asarray, parts))


def own_choices(tiny: Tiny, batch: Batch, result: Result) -> list[list[int]]:
    """What the target chooses at every place of the answers in `result`: by one pass over prompt
    and answer, with no ring, no loop and no end conditions."""
    requests = batch.requests
    whole = [[*request.token_ids, *result.row(row)] for row, request in enumerate(requests)]
    size = batch.prompt_size + batch.max_new_tokens
    tokens = np.zeros((len(whole), size), np.int32)
    for row, ids in enumerate(whole):
        tokens[row, : len(ids)] = ids
    chosen = np.asarray(_choices(tiny.target, tiny.trees["target"], tokens, batch.arrays()[2]))
    lengths = [len(request.token_ids) for request in requests]
    return [
        chosen[row, n - 1 : len(ids) - 1].tolist()
        for row, (n, ids) in enumerate(zip(lengths, whole, strict=True))
    ]


@functools.partial(jax.jit, static_argnums=0)
def _choices(target: ModelConfig, params: Any, tokens: Any, table: RequestArrays) -> Any:
    rows, size = tokens.shape
    network, variables = decoder.Decoder(target), {"params": params}
    cache = KVCache.init(target.block, rows, size, jnp.float32)
    start = jnp.zeros(rows, jnp.int32)
    hidden = network.apply(variables, tokens, start, cache).hidden
    logits = network.apply(variables, hidden, method="logits")
    positions = jnp.broadcast_to(1 + jnp.arange(size), (rows, size))
    noise = sampling.gumbel_noise(table, positions, target.vocab_size)
    return sampling.choose(sampling.process_logits(logits, table), noise)
