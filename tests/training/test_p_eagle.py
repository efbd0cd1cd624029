"""The P-EAGLE objective against its loss written out, against decoding, against speculators."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from peagle_jax.config import SamplingParams
from peagle_jax.convert.checkpoint import load_drafter
from peagle_jax.decoding import generate
from peagle_jax.decoding.sampling import Draws
from peagle_jax.errors import InputError
from peagle_jax.training.batch import PackedBatch
from peagle_jax.training.cod import Chains, ChainSampling, sample_chains
from peagle_jax.training.loss import LossConfig
from peagle_jax.training.masks import SegmentRows, no_keys
from peagle_jax.training.networks import Networks
from peagle_jax.training.p_eagle import PEagleObjective
from peagle_jax.training.params import MASK_EMBEDDING, Trainable, split
from peagle_jax.training.target import TargetView, view_target
from tests.decoding import tiny
from tests.training import dense_reference as dense

GOLDENS = Path(__file__).resolve().parent.parent / "goldens"
LOSS = LossConfig(kl=1.0, ce=0.3, tv=0.5, depth_weights=(1.0, 0.9, 0.7, 0.5), block_size=16)
SAMPLING = ChainSampling(num_depths=4, keep_ratio=0.8, min_keep_ratio=0.3)
DOCUMENTS = [[13, 16, 9], [30, 4, 3]]
LENGTH = 40


def objective(drafter: Any, **options: Any) -> PEagleObjective:
    return PEagleObjective(drafter, dense.TARGET, **{"sampling": SAMPLING, "loss": LOSS, **options})


@pytest.mark.parametrize(
    ("drafter", "over"),
    [
        (dense.drafter_config(2, windows=(None, 3)), "all"),
        (
            dense.drafter_config(draft_vocab_size=dense.VOCAB, own_embedding=False, own_head=False),
            "answers",
        ),
    ],
    ids=["windows", "lent_tables"],
)
def test_loss_and_gradient_equal_the_dense_ones(drafter: Any, over: Any) -> None:
    """Several documents a row, padding, one depth weight a depth, all three losses."""
    batch = dense.packed_batch(DOCUMENTS, LENGTH)
    view, target = dense.random_view(batch, drafter), dense.target_params()
    trained, frozen = dense.drafter_params(drafter)
    sampling = dataclasses.replace(SAMPLING, over=over)
    chains = sample_chains(sampling, batch, dense.row_keys(3, batch))
    elements = dense.elements_of(chains)
    assert all(max(d for _, d in row) == 3 for row in elements)

    def reference(trained: Any) -> Any:
        params = {**trained, **frozen}
        return dense.loss(drafter, params, target, batch, view, elements, LOSS) / 7

    expected_loss, expected = dense.quick_jit(jax.value_and_grad(reference))(trained)
    method = objective(drafter, sampling=sampling).gradient
    loss, sums, gradient = dense.quick_jit(method)(
        trained, frozen, target, batch, view, chains, 7.0
    )
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    dense.assert_trees_close(gradient, expected, 1e-5)
    weighted = np.asarray(sums.loss) @ np.array(LOSS.depth_weights) / 7
    np.testing.assert_allclose(weighted, loss, rtol=1e-5)
    np.testing.assert_array_equal(sums.count, count_by_depth(batch, elements))


def count_by_depth(batch: PackedBatch, elements: list[set[tuple[int, int]]]) -> list[int]:
    """Elements whose label is in their document and in an answer."""
    documents, answer = np.asarray(batch.documents), np.asarray(batch.answer)
    counts = [0] * 4
    for row, below in enumerate(elements):
        for a, d in {(a, 0) for a in range(LENGTH - 2)} | below:
            label = a + d + 2
            counts[d] += (
                label < LENGTH
                and documents[row, a] != 0
                and documents[row, a] == documents[row, label]
                and answer[row, label]
            )
    return counts


def step(drafter: Any, trained: Any, frozen: Any, seed: int = 8, **options: Any) -> Any:
    """Loss, sums and gradient of one batch."""
    batch = dense.packed_batch(DOCUMENTS, LENGTH)
    method = dense.quick_jit(objective(drafter, **options).value_and_grad)
    keys = dense.row_keys(seed, batch)
    return method(trained, frozen, dense.target_params(), batch, keys, 2.0)


@pytest.fixture(scope="module")
def whole_step() -> Any:
    """All of a drafter is trained, in float32."""
    drafter = dense.drafter_config()
    return step(drafter, *dense.drafter_params(drafter))


def test_value_and_grad_is_the_gradient_at_the_targets_view_and_the_keys_chains(
    whole_step: Any,
) -> None:
    drafter = dense.drafter_config()
    batch, target = dense.packed_batch(DOCUMENTS, LENGTH), dense.target_params()
    trained, frozen = dense.drafter_params(drafter)
    view = view_target(dense.TARGET, target, batch, drafter.aux_layer_ids, jnp.float32)
    method = dense.quick_jit(objective(drafter).gradient)
    losses = []
    for seed in (8, 9):
        chains = sample_chains(SAMPLING, batch, dense.row_keys(seed, batch))
        loss, _, gradient = method(trained, frozen, target, batch, view, chains, 2.0)
        losses.append(float(loss))
        if seed == 8:
            dense.assert_trees_close(whole_step[2], gradient, 1e-5)
    assert losses[0] == pytest.approx(float(whole_step[0]), rel=1e-6)
    assert losses[1] != pytest.approx(losses[0], rel=1e-3)


@pytest.fixture(scope="module")
def models() -> tiny.Tiny:
    return tiny.make(drafter_layers=2)


@pytest.mark.parametrize("windows", [(), (2, None)])
def test_a_whole_chain_drafts_what_decoding_drafts(
    windows: tuple[int | None, ...], models: tiny.Tiny
) -> None:
    """The draft after a prefill: its last real row is the anchor, its mask rows the chain."""
    k, lengths = 4, (2, 5, 11)
    config = models.drafters["p-eagle"]
    config = dataclasses.replace(config, block=dataclasses.replace(config.block, windows=windows))
    models = dataclasses.replace(models, drafters={"p-eagle": config})
    # A verification by rejection asks for the logits; a temperature of 1 leaves them as they are.
    speculator = models.speculator("p-eagle", k, verification="rejection")
    params = models.params("p-eagle")
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, tiny.VOCAB - 1, n).tolist() for n in lengths]
    requests = [SamplingParams(max_new_tokens=8, temperature=1.0)] * len(prompts)
    tokens, counts, table = tiny.make_batch(prompts, requests, max(lengths), 8).arrays()
    options: Any = {"speculator": speculator, "max_new_tokens": 8}
    state = generate.jit_prefill(params, tokens, counts, table, **options)
    shape = (len(prompts), k)
    drawn = Draws(jnp.zeros((*shape, 2), jnp.uint32), jnp.zeros((*shape, tiny.VOCAB)))
    draft = jax.jit(speculator.draft, static_argnums=4)
    expected = draft(params, state, table, drawn, k).logits

    # The same texts as training rows: the prompt and the first token of the answer.
    length = max(lengths) + k
    text = np.zeros((len(prompts), length), np.int32)
    for row, prompt in enumerate(prompts):
        text[row, : len(prompt) + 1] = [*prompt, int(state.last_token[row])]
    ones = jnp.ones(text.shape, jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(length), text.shape)
    batch = PackedBatch(jnp.asarray(text), ones, positions, ones == 1)
    view = view_target(models.target, params["target"], batch, config.aux_layer_ids, jnp.float32)
    anchor = jnp.asarray(lengths, jnp.int32)[:, None] - 1
    chains = Chains(anchor, jnp.full_like(anchor, k - 1), (1,) * (k - 1))
    rows = SegmentRows(batch.documents, 0, length, chains)
    networks = Networks(models.target, config, params["drafter"], {}, params["target"], jnp.float32)
    stream, _ = PEagleObjective(config, models.target).run_rows(
        networks,
        batch,
        view,
        rows,
        no_keys(config.block, len(prompts), length, jnp.float32),
    )
    logits = np.asarray(networks.draft_logits(stream))
    for row, n in enumerate(lengths):
        found = logits[row, [n - 1, *range(length, length + k - 1)]]
        np.testing.assert_allclose(found, expected[row], rtol=0, atol=1e-4)
        assert np.ptp(found, axis=0).max() > 0.1


def test_loss_and_gradient_equal_speculators() -> None:
    """One document, speculators' own draw, KL alone; its gradients are stored as a checkpoint."""
    folder = GOLDENS / "training" / "peagle_sliding"
    recorded = np.load(folder / "io.npz")
    config, params = load_drafter(GOLDENS / "drafters" / "peagle_sliding")
    _, expected = load_drafter(folder)
    ids = expected.pop("draft_to_target")
    frozen = {"draft_to_target": params.pop("draft_to_target")}
    np.testing.assert_array_equal(ids, frozen["draft_to_target"])

    tokens = jnp.asarray(recorded["token_ids"])[None]
    length = tokens.shape[1]
    ones = jnp.ones((1, length), jnp.int32)
    batch = PackedBatch(
        tokens, ones, jnp.arange(length)[None], jnp.asarray(recorded["answer"])[None]
    )
    pairs = zip(recorded["anchor"].tolist(), recorded["depth"].tolist(), strict=True)
    chains = dense.chains_of([{(a, d) for a, d in pairs if d > 0}])
    view = TargetView(
        jnp.asarray(recorded["aux_hidden"])[None], jnp.asarray(recorded["hidden"])[None]
    )
    target = dataclasses.replace(dense.TARGET, block=config.block, vocab_size=config.vocab_size)
    head = {"lm_head": {"kernel": jnp.asarray(recorded["target_head"])}}
    head["embed_tokens"] = {"embedding": head["lm_head"]["kernel"]}
    sampling = ChainSampling(num_depths=len(chains.slots) + 1)
    method = dense.quick_jit(PEagleObjective(config, target, sampling).gradient)
    count = float(recorded["count"])
    loss, sums, gradient = method(params, frozen, head, batch, view, chains, count)
    assert float(jnp.sum(sums.count)) == count
    np.testing.assert_allclose(loss, recorded["loss"], rtol=1e-4)
    dense.assert_trees_close(gradient, expected, 1e-4)
    accuracy = np.asarray(sums.correct) / np.asarray(sums.count)
    np.testing.assert_allclose(accuracy, recorded["accuracy"], atol=1e-6)


def test_a_mask_row_trained_apart_gets_that_rows_gradient(whole_step: Any) -> None:
    """Instead of the whole embedding's; the text's own mask tokens, if any, count too."""
    drafter = dense.drafter_config()
    trained, frozen = dense.drafter_params(drafter)
    choice = Trainable(embedding="mask_row", head="all")
    target = dense.target_params()
    parts = split(drafter, {**trained, **frozen}, dense.TARGET, target, choice)
    apart = step(parts.config, parts.trained, parts.frozen)[2]
    expected = {**whole_step[2]}
    row = expected.pop("embed_tokens")["embedding"][dense.MASK_ID]
    dense.assert_trees_close(apart, {**expected, MASK_EMBEDDING: row}, 1e-5)


def test_bfloat16_activations_leave_gradients_in_the_parameters_type(whole_step: Any) -> None:
    drafter = dense.drafter_config()
    narrow = step(drafter, *dense.drafter_params(drafter), dtype="bfloat16")
    assert {leaf.dtype for leaf in jax.tree.leaves(narrow)} == {jnp.dtype("float32")}
    np.testing.assert_allclose(narrow[0], whole_step[0], rtol=0.02)
    one, other = (np.asarray(x[2]["fc"]["kernel"]).ravel() for x in (narrow, whole_step))
    assert np.corrcoef(one, other)[0, 1] > 0.99


def test_one_depth_has_no_mask_rows() -> None:
    drafter = dense.drafter_config()
    options: Any = {"sampling": ChainSampling(num_depths=1), "loss": LossConfig()}
    loss, sums, gradient = step(drafter, *dense.drafter_params(drafter), **options)
    assert sums.count.shape == (1,)
    assert float(loss) == pytest.approx(float(sums.loss[0]) / 2)
    assert not np.any(gradient["mask_hidden"])
    assert np.any(gradient["fc"]["kernel"])


def test_bad_choices_are_refused_before_compilation() -> None:
    sequential = dense.drafter_config(parallel=False, mask_token_id=None)
    with pytest.raises(InputError, match="autoregressive"):
        objective(sequential)
    with pytest.raises(InputError, match="found 4 weights, expected 3"):
        objective(dense.drafter_config(), sampling=ChainSampling(num_depths=3))
