"""The caches hold, at every confirmed position, what the real tokens and features give; a
draft's logits are those of a pass from scratch. (Keys of a drafter's own guesses left at
accepted positions lower its acceptance without changing a token: only this shows them.)"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from peagle_jax.config import SamplingParams
from peagle_jax.decoding import generate
from peagle_jax.decoding.sampling import Draws
from peagle_jax.decoding.speculate import Speculator
from peagle_jax.models.cache import KVCache
from peagle_jax.models.decoder import Decoder
from peagle_jax.models.drafter import Drafter
from tests.decoding import tiny
from tests.decoding.tiny import Tiny

K, STEPS, NEW_TOKENS = 4, 8, 48
VOCAB = 7  # few tokens: many are accepted
LENGTHS = (2, 3, 6, 7, 11, 16)
SIZE = 64  # positions that a pass from scratch covers


@pytest.fixture(scope="module")
def models() -> Tiny:
    return tiny.make(vocab_size=VOCAB, drafter_layers=2)


@functools.partial(jax.jit, static_argnames="speculator")
def from_scratch(params: Any, tokens: Any, length: Any, *, speculator: Speculator) -> Any:
    """Both caches and the K rows of draft logits, of `tokens` x_0 .. x_length.

    tokens [batch, SIZE], anything past x_length; length [batch]. Every pass covers all
    positions and starts with an empty cache."""
    config, batch = speculator.drafter, len(tokens)
    assert config is not None
    start, rows = jnp.zeros(batch, jnp.int32), jnp.arange(batch)
    table = params["target"]["embed_tokens"]["embedding"]
    out = Decoder(speculator.target).apply(
        {"params": params["target"]},
        tokens,
        start,
        KVCache.init(speculator.target.block, batch, SIZE, jnp.float32),
        config.aux_layer_ids,
    )

    def apply(*args: Any, method: str = "__call__") -> Any:
        return Drafter(config).apply({"params": params["drafter"]}, *args, method=method)

    def whole_pass(following: Any, features: Any) -> Any:
        cache = KVCache.init(config.block, batch, SIZE, jnp.float32)
        return apply(table[following], features, start, cache)

    real = (jnp.arange(SIZE) < length[:, None])[..., None]
    following = jnp.roll(tokens, -1, axis=1)
    features = apply(out.features, method="project")
    if config.parallel:
        following = jnp.where(real[..., 0], following, config.mask_token_id or 0)
        features = jnp.where(real, features, apply(method="mask_feature"))
        stream, cache = whole_pass(following, features)
        at = length[:, None] - 1 + jnp.arange(K)
        logits = apply(jnp.take_along_axis(stream, at[..., None], axis=1), method="logits")
        return out.cache, cache, logits
    all_logits = []
    for j in range(K):
        stream, cache = whole_pass(following, features)
        last = stream[rows, length - 1 + j]
        logits = apply(last, method="logits")
        all_logits.append(logits)
        draft = apply(jnp.argmax(logits, axis=-1), method="target_ids")
        following = following.at[rows, length + j].set(draft)
        features = features.at[rows, length + j].set(apply(last, method="next_feature"))
    return out.cache, cache, jnp.stack(all_logits, axis=1)


def assert_same_prefix(found: KVCache, expected: KVCache, lengths: Any, what: str) -> None:
    for layer, (one, other) in enumerate(zip(found.layers, expected.layers, strict=True)):
        for row, n in enumerate(lengths):
            for kind in ("keys", "values"):
                np.testing.assert_allclose(
                    np.asarray(getattr(one, kind))[row, :, :n],
                    np.asarray(getattr(other, kind))[row, :, :n],
                    atol=2e-5,
                    err_msg=f"{what}: {kind} of layer {layer}, row {row}",
                )


@pytest.mark.parametrize("method", ["p-eagle", "eagle3"])
def test_caches_and_draft_logits_equal_those_from_scratch(method, models) -> None:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCAB - 1, n).tolist() for n in LENGTHS]
    requests = [
        SamplingParams(max_new_tokens=NEW_TOKENS, temperature=0.7 * (row % 2), seed=row)
        for row in range(len(LENGTHS))
    ]
    batch = tiny.make_batch(prompts, requests, max(LENGTHS), NEW_TOKENS)
    tokens, lengths, table = batch.arrays()
    speculator = models.speculator(method, K, draft_sampling="greedy")
    params = models.params(method)
    options = {"speculator": speculator, "max_new_tokens": NEW_TOKENS}
    state = generate.jit_prefill(params, tokens, lengths, table, **options)
    rows = (len(LENGTHS), K)
    drawn = Draws(jnp.zeros((*rows, 2), jnp.uint32), jnp.zeros((*rows, VOCAB)))
    # A verification by rejection asks for the logits: scaled, and with no noise the same drafts.
    asking = dataclasses.replace(speculator, draft_sampling="sample", verification="rejection")
    draft = jax.jit(asking.draft, static_argnums=4)
    scale = np.array([one.temperature or 1.0 for one in requests])[:, None, None]

    guessed: Any = None
    counts: list[Any] = []
    for _ in range(STEPS):
        n, emitted = np.asarray(state.length), np.asarray(state.emitted)
        text = np.zeros((len(LENGTHS), SIZE), np.int32)
        for row, prompt in enumerate(prompts):
            known = [*prompt, *np.asarray(state.output)[row, : emitted[row]]]
            assert len(known) == n[row] + 1
            text[row, : len(known)] = known
        target_cache, draft_cache, logits = from_scratch(
            params, jnp.asarray(text), state.length, speculator=speculator
        )
        pending = np.asarray(state.pending_count)
        assert_same_prefix(state.target_cache, target_cache, n, "target")
        # Before a draft the newest confirmed rows are still to come ...
        assert_same_prefix(state.draft_cache, draft_cache, n - pending, "drafter, before")
        drafted = draft(params, state, table, drawn, K)
        drafts, draft_logits, after = drafted.tokens, drafted.logits, drafted.cache
        # ... and after it none is.
        assert_same_prefix(after, draft_cache, n, "drafter, after")
        np.testing.assert_allclose(draft_logits * scale, logits, atol=2e-5)
        assert ((drafts >= 0) & (drafts < VOCAB)).all()
        if guessed is not None:
            # The K-1 guessed rows of the last draft, where accepted, are not what is there now.
            before, start = guessed
            for row in range(len(LENGTHS)):
                stop = start[row] + min(pending[row], K) - 1
                old, new = (
                    np.asarray(cache.layers[0].keys)[row, :, start[row] : stop]
                    for cache in (before, after)
                )
                assert (np.abs(old - new).max(axis=(0, 2)) > 1e-3).all()
        guessed = after, n
        state = generate.jit_advance(params, state, table, lengths, num_steps=1, **options)
        counts.append(np.asarray(state.pending_count))
    assert not state.finished.any()
    # Steps of one token and of several were among them.
    assert np.min(np.stack(counts)) == 1
    assert np.max(np.stack(counts)) >= 4
