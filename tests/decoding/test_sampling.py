"""Filters against a sorting reference; samples against the exact distribution."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from scipy import stats

from peagle_jax.config import SamplingParams
from peagle_jax.decoding import sampling
from tests.decoding import exact
from tests.decoding.exact import SAMPLES, SIGNIFICANCE, p_value, probabilities
from tests.decoding.tiny import PARAMS, make_batch

VOCAB = 11
process = jax.jit(sampling.process_logits)


def as_table(params: list[SamplingParams]) -> sampling.RequestArrays:
    return make_batch([[0]] * len(params), params, 1, 1).arrays()[2]


# Built in the test: making one checks its types, and that draws random numbers.
requests = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.7, 1.0]) | st.floats(0.125, 3.0, width=32),
        "top_k": st.just(0) | st.integers(1, VOCAB + 2),
        "top_p": st.just(1.0) | st.floats(0.0625, 1.0, width=32),
        "min_p": st.just(0.0) | st.floats(0.03125, 1.0, width=32),
    }
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    # Quarters: equal logits, which all filters must treat alike, are common.
    quarters=arrays.arrays(np.int8, (4, 2, VOCAB), elements=st.integers(-24, 24)),
    choices=st.lists(requests, min_size=4, max_size=4),
)
def test_filters_equal_the_sorting_reference(quarters, choices) -> None:
    params = [SamplingParams(**choice) for choice in choices]
    logits = quarters.astype(np.float32) / 4
    processed = np.asarray(process(jnp.asarray(logits), as_table(params)))
    for row, one in enumerate(params):
        if one.temperature == 0:
            np.testing.assert_array_equal(processed[row], logits[row])
            continue
        for values, found in zip(logits[row], processed[row], strict=True):
            keep, margin = exact.kept(values, one)
            assume(margin > 1e-5)  # rounding may decide the others
            np.testing.assert_array_equal(np.isfinite(found), keep)
            scaled = values[keep] / np.float32(one.temperature)
            np.testing.assert_allclose(found[keep], scaled, rtol=1e-6)
            assert (found[~keep] == -np.inf).all()


@pytest.mark.parametrize(
    ("params", "keeps"),
    [
        # Probabilities at temperature 1: 0.4 0.2 0.2 0.1 0.05 0.05.
        (SamplingParams(temperature=1.0, top_k=1), [0]),
        (SamplingParams(temperature=1.0, top_k=2), [0, 1, 2]),
        (SamplingParams(temperature=1.0, top_k=4), [0, 1, 2, 3]),
        (SamplingParams(temperature=1.0, top_k=6), [0, 1, 2, 3, 4, 5]),
        (SamplingParams(temperature=1.0, top_k=99), [0, 1, 2, 3, 4, 5]),
        (SamplingParams(temperature=1.0, top_p=0.39), [0]),
        (SamplingParams(temperature=1.0, top_p=0.41), [0, 1, 2]),
        (SamplingParams(temperature=1.0, top_p=0.81), [0, 1, 2, 3]),
        (SamplingParams(temperature=1.0, top_p=0.95), [0, 1, 2, 3, 4, 5]),
        (SamplingParams(temperature=1.0, min_p=0.49), [0, 1, 2]),
        (SamplingParams(temperature=1.0, min_p=0.51), [0]),
        (SamplingParams(temperature=1.0, min_p=0.12), [0, 1, 2, 3, 4, 5]),
        (SamplingParams(temperature=1.0, min_p=1.0), [0]),
        # Temperature 0.5 squares them, 16:4:4:1:1/4:1/4, before top-p counts: 0.63 0.16 0.16 ..
        (SamplingParams(temperature=0.5, top_p=0.6), [0]),
        (SamplingParams(temperature=1.0, top_p=0.6), [0, 1, 2]),
        # top-p counts what top-k left: of 0.5 0.25 0.25 the first is half.
        (SamplingParams(temperature=1.0, top_k=3, top_p=0.45), [0]),
        (SamplingParams(temperature=1.0, top_k=3, top_p=0.9, min_p=0.6), [0]),
    ],
)
def test_filters_by_hand(params: SamplingParams, keeps: list[int]) -> None:
    logits = jnp.log(jnp.array([0.4, 0.2, 0.2, 0.1, 0.05, 0.05]))[None, None]
    processed = process(logits, as_table([params]))[0, 0]
    assert np.flatnonzero(np.isfinite(processed)).tolist() == keeps


def test_large_vocabulary() -> None:
    """Heavy-tailed logits over a real model's number of tokens."""
    logits = np.random.default_rng(0).standard_t(4, (len(PARAMS), 1, 49_152)).astype(np.float32)
    params = [
        SamplingParams(temperature=p.temperature, top_k=20 * p.top_k, top_p=p.top_p, min_p=p.min_p)
        for p in PARAMS
    ]
    processed = np.asarray(process(jnp.asarray(logits), as_table(params)))
    for row, one in enumerate(params):
        if one.temperature == 0:
            np.testing.assert_array_equal(processed[row], logits[row])
            continue
        keep, margin = exact.kept(logits[row, 0], one)
        # Float32 sums over the vocabulary may move the border by a token.
        assert abs(int(keep.sum()) - int(np.isfinite(processed[row]).sum())) <= (margin < 1e-4)


# --- samples ------------------------------------------------------------------------

LOGITS = np.random.default_rng(5).normal(0, 0.9, VOCAB).astype(np.float32)
LOGITS[3] = LOGITS[7]
SAMPLED = [p for p in PARAMS if p.temperature]


@jax.jit
def draw(table, positions):
    logits = jnp.broadcast_to(LOGITS, (*positions.shape, VOCAB))
    noise = sampling.gumbel_noise(table, positions, VOCAB)
    return sampling.choose(sampling.process_logits(logits, table), noise)


def names(params: SamplingParams) -> str:
    return f"t{params.temperature}-k{params.top_k}-p{params.top_p}-m{params.min_p}"


@pytest.mark.parametrize("params", SAMPLED, ids=names)
def test_seeds_sample_the_distribution(params: SamplingParams) -> None:
    """A request each: consecutive seeds at one position, and the next one beside it."""
    table = exact.table(params, np.arange(SAMPLES))
    positions = jnp.broadcast_to(jnp.array([17, 18]), (SAMPLES, 2))
    samples = np.asarray(draw(table, positions))
    expected = probabilities(LOGITS, params)
    assert p_value(samples[:, 0], expected) > SIGNIFICANCE
    # Positions are independent of each other, and so are neighbouring seeds.
    joint = np.outer(expected, expected)
    assert p_value(samples, joint) > SIGNIFICANCE
    assert p_value(samples[:, 0].reshape(-1, 2), joint) > SIGNIFICANCE


@pytest.mark.parametrize("params", SAMPLED, ids=names)
def test_positions_sample_the_distribution(params: SamplingParams) -> None:
    """One request with one seed, at as many positions."""
    samples = np.asarray(draw(exact.table(params, np.array([42])), jnp.arange(SAMPLES)[None]))[0]
    expected = probabilities(LOGITS, params)
    assert p_value(samples, expected) > SIGNIFICANCE
    assert p_value(samples.reshape(-1, 2), np.outer(expected, expected)) > SIGNIFICANCE


def test_greedy_and_sampled_rows_in_one_batch() -> None:
    params = SAMPLED[-1]
    greedy = np.arange(2 * SAMPLES) % 2 == 0
    table = exact.table(params, np.arange(2 * SAMPLES), greedy)
    samples = np.asarray(draw(table, jnp.full((2 * SAMPLES, 1), 3)))[:, 0]
    assert (samples[greedy] == LOGITS.argmax()).all()
    assert p_value(samples[~greedy], probabilities(LOGITS, params)) > SIGNIFICANCE


def test_each_row_has_its_own_parameters() -> None:
    """All parameter sets in one batch: each row's samples fit its own distribution alone."""
    n = len(SAMPLED)
    table = jax.tree.map(
        lambda *columns: jnp.concatenate(columns),
        *(exact.table(p, np.arange(i, n * SAMPLES, n)) for i, p in enumerate(SAMPLED)),
    )
    samples = np.asarray(draw(table, jnp.full((n * SAMPLES, 1), 8)))[:, 0].reshape(n, SAMPLES)
    wrong = 0
    for i, row in enumerate(samples):
        for params in SAMPLED:
            expected = probabilities(LOGITS, params)
            fits = p_value(row, expected) > SIGNIFICANCE
            same = np.allclose(expected, probabilities(LOGITS, SAMPLED[i]))
            assert fits == same, (names(SAMPLED[i]), names(params))
            wrong += not same
    assert wrong >= n * (n - 2)


def test_the_check_finds_filters_in_the_wrong_order() -> None:
    """Samples with top-p counted before the temperature."""
    params = SamplingParams(temperature=0.6, top_p=0.7)
    before = probabilities(LOGITS, SamplingParams(temperature=1.0, top_p=0.7))
    wrong = np.where(before > 0, LOGITS, -np.inf)
    right = np.asarray(probabilities(LOGITS, params))
    assert (before > 0).sum() > (right > 0).sum()
    weights = np.exp(wrong / 0.6)
    samples = np.random.default_rng(0).choice(VOCAB, SAMPLES, p=weights / weights.sum())
    assert p_value(samples, right) < SIGNIFICANCE


def test_streams_are_independent() -> None:
    """Token, acceptance and recovery noise of the same positions."""
    params = SamplingParams(temperature=1.0)
    table = exact.table(params, np.arange(SAMPLES))
    positions = jnp.full((SAMPLES, 1), 5)
    token, recover = (
        np.asarray(sampling.gumbel_noise(table, positions, VOCAB, stream))[:, 0]
        for stream in (sampling.STREAM_TOKEN, sampling.STREAM_RECOVER)
    )
    accept = np.asarray(sampling.uniform_noise(table, positions, sampling.STREAM_ACCEPT))[:, 0]
    uniform = np.full(VOCAB, 1 / VOCAB)
    joint = np.stack([token.argmax(-1), recover.argmax(-1)], axis=1)
    assert p_value(joint, np.outer(uniform, uniform)) > SIGNIFICANCE
    for noise in (token, recover):
        cells = np.stack([noise.argmax(-1), (8 * accept).astype(int)], axis=1)
        assert p_value(cells, np.outer(uniform, np.full(8, 1 / 8))) > SIGNIFICANCE
    assert stats.kstest(accept, "uniform").pvalue > SIGNIFICANCE
    assert stats.kstest(token.ravel(), "gumbel_r").pvalue > SIGNIFICANCE
    assert 0 <= accept.min() < accept.max() < 1


def test_noise_depends_on_seed_and_position_alone() -> None:
    """Not on the row, the batch, other requests or the other parameters."""
    table = exact.table(SamplingParams(temperature=1.0), np.array([5, 6, 2**32 - 1]))
    noise = np.asarray(sampling.gumbel_noise(table, jnp.array([[1, 2], [2, 3], [7, 8]]), VOCAB))
    other = exact.table(SamplingParams(temperature=0.3, top_k=2), np.array([2**32 - 1, 5]))
    again = np.asarray(sampling.gumbel_noise(other, jnp.array([[6, 7, 8], [0, 1, 2]]), VOCAB))
    np.testing.assert_array_equal(noise[2], again[0, 1:])
    np.testing.assert_array_equal(noise[0], again[1, 1:])
    # Seed 5 at position 2, seed 6 at 2: neither equal to another (seed, position).
    rows = np.concatenate([noise.reshape(-1, VOCAB), again[:, 0]])
    assert len(np.unique(rows, axis=0)) == len(rows)
    greedy = exact.table(SamplingParams(temperature=1.0), np.array([5, 6]), np.array([True, False]))
    mixed = np.asarray(sampling.gumbel_noise(greedy, jnp.array([[1], [2]]), VOCAB))
    assert (mixed[0] == 0).all()
    np.testing.assert_array_equal(mixed[1, 0], noise[1, 0])
