"""Packed documents through the target: each as if it were alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from peagle_jax.config import MoEConfig
from peagle_jax.models.cache import KVCache
from peagle_jax.models.decoder import Decoder
from peagle_jax.training.batch import PackedBatch
from peagle_jax.training.packed_attention import attend_packed
from peagle_jax.training.target import target_head, view_target
from tests.decoding.tiny import BLOCK, VOCAB, target_config, target_params

LENGTH = 32
ROWS = ((9, 14, 6), (32,))  # documents of each row; the first row ends in 3 of padding
AUX = (0, 1, 2)


def make_batch(seed: int = 0) -> PackedBatch:
    rng = np.random.default_rng(seed)
    documents = np.zeros((len(ROWS), LENGTH), np.int32)
    positions = np.zeros((len(ROWS), LENGTH), np.int32)
    for row, lengths in enumerate(ROWS):
        start = 0
        for index, length in enumerate(lengths):
            documents[row, start : start + length] = index + 1
            positions[row, start : start + length] = np.arange(length)
            start += length
    tokens = rng.integers(0, VOCAB, documents.shape).astype(np.int32)
    return PackedBatch(*map(jnp.asarray, (tokens, documents, positions, documents > 0)))


@pytest.mark.parametrize(
    ("changes", "aux"),
    [
        ({}, AUX),
        ({"windows": (None, 5)}, AUX),
        ({"windows": (3, 7)}, (1,)),
        ({}, ()),
        ({"windows": (5, None), "sinks": True, "moe": MoEConfig(4, 2, 8)}, AUX),
    ],
)
def test_every_document_is_as_if_alone(changes, aux):
    config = target_config(block=dataclasses.replace(BLOCK, **changes))
    params = jax.device_put(target_params(config))
    batch = make_batch()
    view = jax.jit(lambda p, b: view_target(config, p, b, aux, jnp.float32))(params, batch)
    places = [
        (row, start, length)
        for row, lengths in enumerate(ROWS)
        for start, length in zip(np.cumsum((0, *lengths)), lengths, strict=False)
    ]
    # One sequence a document, through the cache; what follows a document does not matter.
    alone = [np.resize(batch.tokens[row, start : start + n], LENGTH) for row, start, n in places]
    zeros = jnp.zeros(len(places), jnp.int32)
    cache = KVCache.init(config.block, len(places), LENGTH, jnp.float32)
    expected = jax.jit(lambda p, t: Decoder(config).apply({"params": p}, t, zeros, cache, aux))(
        params, jnp.asarray(np.stack(alone))
    )
    for index, (row, start, n) in enumerate(places):
        for mine, theirs in (
            (view.hidden, expected.hidden),
            (view.features, expected.features),
        ):
            np.testing.assert_allclose(mine[row, start : start + n], theirs[index, :n], atol=1e-5)


def test_no_gradient_reaches_the_target():
    config = target_config()

    def total(params: Any) -> jax.Array:
        view = view_target(config, params, make_batch(), AUX, jnp.float32)
        return view.hidden.sum() + view.features.sum()

    grads = jax.jit(jax.grad(total))(jax.device_put(target_params(config)))
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(grads))


def qkv(length: int, passes: int = 1, seed: int = 0) -> list[tuple[jax.Array, ...]]:
    rng = np.random.default_rng(seed)

    def normal(heads: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal((2, length, heads, 8)), jnp.float32)

    return [(normal(4), normal(2), normal(2)) for _ in range(passes)]


@pytest.mark.parametrize("block", [5, 8, 31])
@pytest.mark.parametrize("window", [None, 2, 6])
def test_query_blocks_change_nothing(block, window):
    """Neither outputs nor gradients, along chains too."""
    documents = make_batch().documents
    passes = qkv(LENGTH, 3)

    def out(block: int) -> Any:
        def run(passes: Any) -> jax.Array:
            earlier: tuple[Any, ...] = ()
            for q, k, v in passes:
                attended, carried = attend_packed(documents, window, earlier, block)(q, k, v)
                earlier = (*earlier, carried)
            return jnp.sum(jnp.sin(attended))

        return jax.jit(jax.value_and_grad(run))(passes)

    value, grads = out(block)
    expected, expected_grads = out(LENGTH)
    np.testing.assert_allclose(value, expected, atol=1e-4)
    for mine, theirs in zip(jax.tree.leaves(grads), jax.tree.leaves(expected_grads), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)


@pytest.mark.parametrize("window", [None, 1, 2, 6])
def test_a_chain_sees_what_its_start_saw_and_itself(window):
    """Against attention written out for one row at a time."""
    documents = np.asarray(make_batch().documents)
    passes = qkv(LENGTH, 3)
    earlier = tuple((k, v) for _, k, v in passes[:-1])
    q = np.asarray(passes[-1][0])
    attended, _ = attend_packed(jnp.asarray(documents), window, earlier)(*passes[-1])
    depth = 2
    for row, at in ((0, 0), (0, 8), (0, 9), (0, 22), (1, 31), (1, 17)):
        seen = [
            (0, other)
            for other in range(at + 1)
            if documents[row, other] == documents[row, at]
            and (window is None or other > at + depth - window)
        ]
        seen += [(d, at) for d in (1, 2) if window is None or d > depth - window]
        for head in range(4):
            keys, values = (
                np.stack([np.asarray(passes[d][part])[row, i, head // 2] for d, i in seen])
                for part in (1, 2)
            )
            scores = keys @ q[row, at, head] / np.sqrt(8)
            weights = np.exp(scores - scores.max())
            expected = weights @ values / weights.sum()
            np.testing.assert_allclose(attended[row, at, head], expected, atol=1e-5)


def test_memory_is_linear_in_length():
    """Scores of all rows would be 4 heads * 4096 * 4096 floats, 268 MB."""
    length = 4096
    shapes = [jax.ShapeDtypeStruct((1, length, heads, 8), jnp.float32) for heads in (4, 2, 2)]
    documents = jnp.ones((1, length), jnp.int32)

    def total(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jnp.sum(attend_packed(documents, None, query_block=64)(q, k, v)[0])

    compiled = jax.jit(jax.grad(total, argnums=(0, 1, 2))).lower(*shapes).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 40e6


@pytest.mark.parametrize("tied", [False, True])
def test_the_target_head_over_a_draft_vocabulary(tied):
    config = target_config(tie_embeddings=tied)
    params = jax.device_put(target_params(target_config()))
    if tied:
        del params["lm_head"]
    hidden = jnp.asarray(np.random.default_rng(0).standard_normal((3, 16)), jnp.float32)
    logits = Decoder(config).apply({"params": params}, hidden, method="logits")
    ids = jnp.array([4, 0, 22, 7])
    np.testing.assert_allclose(hidden @ target_head(config, params).T, logits, atol=1e-5)
    some = hidden @ target_head(config, params, ids).T
    np.testing.assert_allclose(some, logits[:, ids], atol=1e-5)
