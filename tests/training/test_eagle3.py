"""The EAGLE-3 objective against decoding: its cache, its passes, its drafts."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from peagle_jax.config import SamplingParams
from peagle_jax.decoding import generate
from peagle_jax.decoding.sampling import Draws
from peagle_jax.errors import InputError
from peagle_jax.models.cache import KVCache
from peagle_jax.models.drafter import Drafter
from peagle_jax.training.batch import PackedBatch
from peagle_jax.training.eagle3 import Eagle3Objective
from peagle_jax.training.loss import LossConfig
from peagle_jax.training.networks import Networks
from peagle_jax.training.params import Trainable, split
from peagle_jax.training.target import view_target
from tests.decoding import tiny
from tests.training import dense_reference as dense

LOSS = LossConfig(kl=1.0, ce=0.3, tv=0.5, depth_weights=(1.0, 0.8, 0.6), block_size=16)
PASSES = 3
DOCUMENTS = [[13, 10, 6], [24, 4, 3]]
LENGTH = 32


@pytest.fixture(scope="module")
def models() -> tiny.Tiny:
    return tiny.make(drafter_layers=2)


def drafter_config(*layers_and_windows: Any, **changes: Any) -> Any:
    return dense.drafter_config(*layers_and_windows, parallel=False, mask_token_id=None, **changes)


def objective(drafter: Any, **options: Any) -> Eagle3Objective:
    return Eagle3Objective(drafter, dense.TARGET, **{"num_depths": PASSES, "loss": LOSS, **options})


def decoded_loss(
    config: Any, params: Any, target: Any, batch: PackedBatch, view: Any
) -> tuple[Any, np.ndarray]:
    """Drafted from caches: every anchor of every document a sequence of its own, which holds the
    document from its start. Whole logits. Differentiable in `params`. Also counts by depth."""
    network = Drafter(config)
    lent, head = target["embed_tokens"]["embedding"], target["lm_head"]["kernel"]
    ids = np.asarray(params.get("draft_to_target", np.arange(config.vocab_size))).tolist()

    def apply(*args: Any, method: str = "__call__") -> Any:
        return network.apply({"params": params}, *args, method=method)

    def embed(tokens: Any) -> Any:
        return apply(jnp.asarray(tokens), lent, method="embed")

    documents = np.asarray(batch.documents)
    listed = [
        (row, start, size, anchor)
        for row in range(len(documents))
        for document in range(1, documents[row].max() + 1)
        for start, size in [
            (np.argmax(documents[row] == document), np.sum(documents[row] == document))
        ]
        for anchor in range(size)
    ]
    row, start, size, anchor = np.array(listed, np.int32).T

    def at(x: Any, index: Any) -> Any:
        """Of each sequence's document, values at an index [sequences, ..]."""
        extra = (1,) * (np.ndim(index) - 1)
        rows, starts, sizes = (y.reshape(-1, *extra) for y in (row, start, size))
        return x[rows, starts + np.minimum(index, sizes - 1)]

    longest = np.arange(size.max())[None]
    cache = KVCache.init(config.block, len(listed), LENGTH + PASSES, jnp.float32)
    stream, cache = apply(
        embed(at(np.asarray(batch.tokens), longest + 1)),
        apply(at(view.features, longest), method="project"),
        jnp.zeros(len(listed), jnp.int32),
        cache,
    )
    stream = stream[np.arange(len(listed)), anchor][:, None]
    total, counts = jnp.zeros(()), []
    for depth in range(PASSES):
        if depth:
            stream, cache = apply(
                embed(at(np.asarray(batch.tokens), anchor + depth + 1))[:, None],
                apply(stream, method="next_feature"),
                jnp.asarray(anchor + depth, jnp.int32),
                cache,
            )
        log_q = jax.nn.log_softmax(apply(stream[:, 0], head, method="logits"))
        label = anchor + depth + 2
        p = jax.nn.softmax(at(view.hidden, label - 1) @ head[np.array(ids)].T)
        one = LOSS.kl * jnp.sum(p * (jnp.log(p) - log_q), axis=1)
        one += LOSS.tv * 0.5 * jnp.sum(jnp.abs(p - jnp.exp(log_q)), axis=1)
        found = [ids.index(t) if t in ids else -1 for t in at(np.asarray(batch.tokens), label)]
        draft_id = np.array(found)
        one -= LOSS.ce * (draft_id >= 0) * log_q[np.arange(len(listed)), draft_id]
        counted = (label < size) & at(np.asarray(batch.answer), label)
        assert LOSS.depth_weights is not None
        total += LOSS.depth_weights[depth] * jnp.sum(jnp.where(counted, one, 0))
        counts.append(counted.sum())
    return total, np.array(counts)


@pytest.mark.parametrize(
    ("drafter", "remat"),
    [
        (drafter_config(2, (None, 2), norm_output=True), True),
        (
            drafter_config(
                draft_vocab_size=dense.VOCAB, own_embedding=False, own_head=False, fc_norm=True
            ),
            False,
        ),
    ],
    ids=["windows", "lent_tables"],
)
def test_loss_and_gradient_equal_those_of_decoding(drafter: Any, remat: bool) -> None:
    batch = dense.packed_batch(DOCUMENTS, LENGTH)
    view, target = dense.random_view(batch, drafter), dense.target_params()
    trained, frozen = dense.drafter_params(drafter)

    def reference(trained: Any) -> Any:
        total, counts = decoded_loss(drafter, {**trained, **frozen}, target, batch, view)
        return total / 7, counts

    value_and_grad = jax.jit(jax.value_and_grad(reference, has_aux=True))
    (expected_loss, counts), expected = value_and_grad(trained)
    method = objective(drafter, remat=remat).gradient
    loss, sums, gradient = jax.jit(method)(trained, frozen, target, batch, view, 7.0)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    # In float32 this is 0.1e-5 to 1.1e-5, by the order in which products of few rows are summed.
    dense.assert_trees_close(gradient, expected, 2e-5)
    np.testing.assert_array_equal(sums.count, counts)
    assert counts[0] > counts[1] > counts[2] > 10


@pytest.mark.parametrize("windows", [(None, None), (4, 2)])
def test_passes_equal_the_drafts_of_decoding(windows: Any, models: tiny.Tiny) -> None:
    """A draft after a prefill, and the text that it would become."""
    k, lengths = 4, (2, 5, 11)
    config = models.drafters["eagle3"]
    config = dataclasses.replace(config, block=dataclasses.replace(config.block, windows=windows))
    models = dataclasses.replace(models, drafters={"eagle3": config})
    speculator = models.speculator("eagle3", k, verification="rejection")  # which keeps logits
    params = models.params("eagle3")
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, tiny.VOCAB, n).tolist() for n in lengths]
    requests = [SamplingParams(max_new_tokens=8)] * len(prompts)
    tokens, counts, table = tiny.make_batch(prompts, requests, max(lengths), 8).arrays()
    options: Any = {"speculator": speculator, "max_new_tokens": 8}
    state = generate.jit_prefill(params, tokens, counts, table, **options)
    shape = (len(prompts), k)
    drawn = Draws(jnp.zeros((*shape, 2), jnp.uint32), jnp.zeros((*shape, tiny.VOCAB)))
    draft = jax.jit(speculator.draft, static_argnums=4)
    drafted = draft(params, state, table, drawn, k)
    drafts, expected = drafted.tokens, drafted.logits

    # All three texts, packed into one row.
    texts = [
        [*prompt, int(state.last_token[row]), *np.asarray(drafts[row]).tolist()]
        for row, prompt in enumerate(prompts)
    ]
    starts = np.cumsum([0, *map(len, texts)])
    batch = PackedBatch(
        tokens=jnp.asarray(np.concatenate(texts)[None], jnp.int32),
        documents=jnp.asarray(np.repeat([1, 2, 3], [len(text) for text in texts])[None]),
        positions=jnp.asarray(np.concatenate([np.arange(len(text)) for text in texts])[None]),
        answer=jnp.ones((1, starts[-1]), bool),
    )
    networks = Networks(
        models.target, config, params["drafter"], {}, params["target"], jnp.dtype("float32")
    )
    view = view_target(
        models.target, params["target"], batch, config.aux_layer_ids, jnp.dtype("float32")
    )
    method = Eagle3Objective(config, models.target, num_depths=k).run_passes
    streams = jax.jit(lambda: jnp.stack(method(networks, batch, view.features)))()
    for row, length in enumerate(lengths):
        logits = networks.draft_logits(streams[:, 0, starts[row] + length - 1])
        np.testing.assert_allclose(logits, expected[row], atol=1e-4)
        assert np.ptp(expected[row], axis=0).max() > 0.1  # passes do differ


def test_a_step_lowers_the_loss(models: tiny.Tiny) -> None:
    """The whole contract, in bfloat16 under float32 parameters: a step down the gradient."""
    config, target = models.drafters["eagle3"], models.trees["target"]
    parts = split(config, models.trees["eagle3"], models.target, target, Trainable("frozen"))
    batch = dense.packed_batch([[20, 12]], LENGTH)
    batch = batch.replace(tokens=batch.tokens % tiny.VOCAB)  # type: ignore[attr-defined]
    chosen = Eagle3Objective(parts.config, models.target, num_depths=3, dtype="bfloat16")
    method = jax.jit(chosen.value_and_grad)

    def run(trained: Any) -> Any:
        return method(trained, parts.frozen, target, batch, jax.random.key(0), 50.0)

    loss, sums, gradient = run(parts.trained)
    assert gradient.keys() == parts.trained.keys()
    assert "lm_head" not in gradient
    jax.tree.map(lambda p, g: np.testing.assert_equal(g.shape, p.shape), parts.trained, gradient)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(gradient)} == {"float32"}
    np.testing.assert_allclose(loss, sums.loss.sum() / 50, rtol=1e-6)
    # A short step lowers the loss by what the gradient promises.
    step = 1e-4
    lower, _, _ = run(jax.tree.map(lambda p, g: p - step * g, parts.trained, gradient))
    promised = step * sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(gradient))
    np.testing.assert_allclose(loss - lower, promised, rtol=0.2)


def test_drafters_and_passes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InputError, match="found a parallel one, expected an autoregressive one"):
        objective(dense.drafter_config())
    with pytest.raises(InputError, match="depth_weights: found 3 weights, expected 5"):
        objective(drafter_config(), num_depths=5)
    with pytest.raises(InputError, match="num_draft_tokens: found 0"):
        objective(drafter_config(), num_depths=0)
