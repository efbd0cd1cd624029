"""P-EAGLE's loss written out: a list of elements, a square mask, whole logits.

No scan, no blocks, no segments, no layout: what the objective must equal, forward and backward.
Also tiny networks and packed batches to compare them on.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from peagle_jax.config import BlockConfig, DrafterConfig, ModelConfig
from peagle_jax.models import decoder, drafter
from peagle_jax.models.drafter import Drafter
from peagle_jax.training.batch import PackedBatch
from peagle_jax.training.cod import Chains
from peagle_jax.training.loss import LossConfig
from peagle_jax.training.target import TargetView

# Programs here run once on tiny arrays: what counts is how soon they are compiled.
QUICK: Any = {"xla_backend_optimization_level": 0}
quick_jit = functools.partial(jax.jit, compiler_options=QUICK)

VOCAB, DRAFT_VOCAB, MASK_ID = 64, 40, 7
HIDDEN = 32
BLOCK = BlockConfig(HIDDEN, 40, 1, num_heads=4, num_kv_heads=2, head_dim=8)
TARGET = ModelConfig(
    BlockConfig(HIDDEN, 40, 2, num_heads=2, num_kv_heads=1, head_dim=8),
    VOCAB,
    max_positions=128,
)


def drafter_config(
    num_layers: int = 1, windows: tuple[int | None, ...] = (), **changes: Any
) -> DrafterConfig:
    """Grouped queries, a draft vocabulary; all tables its own."""
    config = DrafterConfig(
        block=dataclasses.replace(BLOCK, num_layers=num_layers, windows=windows),
        parallel=True,
        vocab_size=VOCAB,
        draft_vocab_size=DRAFT_VOCAB,
        target_hidden_size=HIDDEN,
        aux_layer_ids=(0, 1, 2),
        mask_token_id=MASK_ID,
        own_embedding=True,
    )
    return dataclasses.replace(config, **changes)


def drafter_params(config: DrafterConfig, seed: int = 0) -> tuple[Any, Any]:
    """(trained, frozen): random, norms near 1, kernels that keep the variance; queries and keys
    larger, so that attention is far from uniform. The draft vocabulary is in no order."""
    params = _random(drafter.abstract_params(config), np.random.default_rng(seed))
    ids = np.random.default_rng(seed + 1).permutation(VOCAB)[: config.draft_vocab_size]
    if "draft_to_target" in params:
        params["draft_to_target"] = ids.astype(np.int32)
    params = jax.device_put(params)
    frozen = {k: v for k, v in params.items() if k == "draft_to_target"}
    return {k: v for k, v in params.items() if k not in frozen}, frozen


def target_params(config: ModelConfig = TARGET, seed: int = 5) -> Any:
    return jax.device_put(_random(decoder.abstract_params(config), np.random.default_rng(seed)))


def _random(tree: Any, rng: np.random.Generator) -> Any:
    def fill(path: Any, leaf: Any) -> np.ndarray:
        names = [entry.key for entry in path]
        values = rng.standard_normal(leaf.shape)
        if names[-1] == "scale":
            values = 1 + 0.2 * values
        elif names[-1] == "kernel":
            gain = 2.0 if names[-2] in ("q_proj", "k_proj") else 1.0
            values = gain * values / np.sqrt(leaf.shape[-1])
        return values.astype(leaf.dtype)

    return jax.tree_util.tree_map_with_path(fill, tree)


def packed_batch(documents: list[list[int]], length: int, seed: int = 2) -> PackedBatch:
    """Rows of documents of these lengths; two thirds of each document, from its first third on,
    is an answer, but for one token in it."""
    rng = np.random.default_rng(seed)
    shape = (len(documents), length)
    ids, positions = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    answer = np.zeros(shape, bool)
    for row, sizes in enumerate(documents):
        start = 0
        for index, size in enumerate(sizes, start=1):
            ids[row, start : start + size] = index
            positions[row, start : start + size] = np.arange(size)
            answer[row, start + size // 3 : start + size] = True
            answer[row, start + 2 * size // 3] = False
            start += size
        assert start <= length
    tokens = rng.integers(0, VOCAB, shape).astype(np.int32)
    return PackedBatch(*map(jnp.asarray, (tokens, ids, positions, answer)))


def row_keys(seed: int, batch: PackedBatch) -> Any:
    """A key for each row of the batch."""
    return jax.random.split(jax.random.key(seed), batch.tokens.shape[0])


def random_view(batch: PackedBatch, config: DrafterConfig, seed: int = 3) -> TargetView:
    rng = np.random.default_rng(seed)
    shape = batch.tokens.shape
    features = rng.standard_normal((*shape, config.feature_size)).astype(np.float32)
    hidden = rng.standard_normal((*shape, HIDDEN)).astype(np.float32)
    return TargetView(jnp.asarray(features), jnp.asarray(hidden))


def chains_of(elements: list[set[tuple[int, int]]]) -> Chains:
    """Chains in one segment from each row's (anchor, depth) with depth > 0."""
    lengths = [
        {a: max(d for b, d in row if a == b) for a, _ in row} for row in elements
    ]  # fmt: skip
    for row, found in zip(elements, lengths, strict=True):
        assert row == {(a, d) for a, most in found.items() for d in range(1, most + 1)}
    depths = max(max(found.values()) for found in lengths)
    slots = tuple(
        max(sum(most >= d for most in found.values()) for found in lengths)
        for d in range(1, depths + 1)
    )
    anchor = np.zeros((len(elements), 1, slots[0]), np.int32)
    length = np.zeros_like(anchor)
    for index, found in enumerate(lengths):
        for j, (a, most) in enumerate(sorted(found.items(), key=lambda item: -item[1])):
            anchor[index, 0, j], length[index, 0, j] = a, most
    return Chains(jnp.asarray(anchor), jnp.asarray(length), slots)


def elements_of(chains: Chains) -> list[set[tuple[int, int]]]:
    """Each row's (anchor, depth) with depth > 0, of all segments."""
    rows = []
    anchors, valid = np.asarray(chains.anchors), np.asarray(chains.valid)
    for row in range(anchors.shape[0]):
        pairs = [
            (int(a), int(d))
            for part in range(anchors.shape[1])
            for a, d, real in zip(anchors[row, part], chains.depth, valid[row, part], strict=True)
            if real
        ]
        assert len(pairs) == len(set(pairs))
        rows.append(set(pairs))
    return rows


def sees(query: tuple[int, int], key: tuple[int, int], documents: Any, window: int | None) -> bool:
    """What a draft step finds in its cache: the row at every position up to the query's own, a
    real one up to the anchor and the chain's after it, as far as the window reaches."""
    (a, d), (b, e) = query, key
    position = b + e
    held = (b, e) == ((position, 0) if position <= a else (a, position - a))
    near = window is None or position > a + d - window
    return held and position <= a + d and near and documents[a] == documents[b]


def loss(
    config: DrafterConfig,
    params: Any,
    target: Any,
    batch: PackedBatch,
    view: TargetView,
    elements: list[set[tuple[int, int]]],
    loss_config: LossConfig,
) -> Any:
    """Sum of all elements' losses; differentiable in `params`."""
    total = jnp.zeros(())
    for row, below in enumerate(elements):
        total += _row_loss(config, params, target, batch, view, row, below, loss_config)
    return total


def _row_loss(
    config: DrafterConfig,
    params: Any,
    target: Any,
    batch: PackedBatch,
    view: TargetView,
    row: int,
    below: set[tuple[int, int]],
    loss_config: LossConfig,
) -> Any:
    tokens, documents, positions, answer = (
        np.asarray(x)[row] for x in (batch.tokens, batch.documents, batch.positions, batch.answer)
    )
    real = [(a, 0) for a in range(len(tokens) - 1) if documents[a]]
    listed = [*real, *sorted(below, key=lambda e: (e[1], e[0]))]
    anchor, depth = np.array(listed).T
    network = Drafter(config)

    def apply(*args: Any, method: str) -> Any:
        return network.apply({"params": params}, *args, method=method)

    def attend_layer(window: int | None) -> Any:
        mask = np.array([[sees(q, k, documents, window) for k in listed] for q in listed])

        def attend(q: Any, k: Any, v: Any) -> Any:
            group = q.shape[2] // k.shape[2]
            k, v = (jnp.repeat(x, group, axis=2) for x in (k, v))
            scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
            weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), axis=-1)
            return jnp.einsum("bhqk,bkhd->bqhd", weights, v), None

        return attend

    inputs = jnp.asarray(np.where(depth == 0, tokens[anchor + 1], config.mask_token_id))
    lent = target["embed_tokens"]["embedding"]
    features = apply(view.features[row, anchor], method="project")
    features = jnp.where(depth[:, None] == 0, features, apply(method="mask_feature"))
    stream, _ = apply(
        apply(inputs, lent, method="embed")[None],
        features[None],
        jnp.asarray(positions[anchor] + depth)[None],
        [attend_layer(config.block.window(i)) for i in range(config.block.num_layers)],
        method="run_layers",
    )
    log_q = jax.nn.log_softmax(apply(stream[0], target["lm_head"]["kernel"], method="logits"))

    ids = np.asarray(params.get("draft_to_target", np.arange(config.vocab_size)))
    label = anchor + depth + 2
    counts = np.array(
        [
            at < len(tokens) and documents[at] == documents[a] and answer[at]
            for at, a in zip(label, anchor, strict=True)
        ]
    )
    label = np.minimum(label, len(tokens) - 1)
    p = jax.nn.softmax(view.hidden[row, label - 1] @ target["lm_head"]["kernel"][ids].T)
    each = loss_config.kl * jnp.sum(p * (jnp.log(p) - log_q), axis=-1)
    each += loss_config.tv * 0.5 * jnp.sum(jnp.abs(p - jnp.exp(log_q)), axis=-1)
    is_label = ids == tokens[label][:, None]  # nowhere, if it is outside the draft vocabulary
    each += loss_config.ce * -jnp.sum(jnp.where(is_label, log_q, 0), axis=-1)
    scales = np.array(loss_config.depth_weights or (1.0,) * (depth.max() + 1))
    return jnp.sum(jnp.where(counts, scales[depth] * each, 0))


def assert_trees_close(found: Any, expected: Any, relative: float) -> None:
    """Every leaf within `relative` of its own largest value, and no leaf trivial."""
    found, expected = (jax.tree_util.tree_leaves_with_path(tree) for tree in (found, expected))
    assert [path for path, _ in found] == [path for path, _ in expected]
    for (path, one), (_, other) in zip(found, expected, strict=True):
        largest = float(np.abs(other).max())
        name = jax.tree_util.keystr(path)
        assert largest > 0, f"{name}: nothing to compare"
        np.testing.assert_allclose(one, other, rtol=0, atol=relative * largest, err_msg=name)
