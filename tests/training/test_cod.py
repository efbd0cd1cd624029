"""The draw of chains against its definition: counts, wholeness, borders, uniformity."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from peagle_jax.errors import InputError
from peagle_jax.training.cod import ChainSampling, bears_loss, sample_chains
from tests.training.dense_reference import elements_of, packed_batch, row_keys

SAMPLING = ChainSampling(num_depths=6, keep_ratio=0.7, min_keep_ratio=0.3)
# Rows of several documents; the last row is one document, all of it.
DOCUMENTS = [[20, 13, 9], [5, 3, 30], [48]]
LENGTH = 48

draw = jax.jit(sample_chains, static_argnums=0)


def counts_of(elements: set[tuple[int, int]], depths: int) -> list[int]:
    return [sum(d == depth for _, d in elements) for depth in range(1, depths)]


@pytest.mark.parametrize("over", ["answers", "all"])
@pytest.mark.parametrize("segments", [1, 3])
def test_chains_are_whole_and_stay_where_they_may(over: Any, segments: int) -> None:
    config = dataclasses.replace(SAMPLING, over=over, segments=segments)
    batch = packed_batch(DOCUMENTS, LENGTH)
    documents, answer = np.asarray(batch.documents), np.asarray(batch.answer)
    for seed in range(4):
        chains = draw(config, batch, row_keys(seed, batch))
        # Longest first: the elements of a depth are the first chains.
        assert (np.diff(chains.length, axis=-1) <= 0).all()
        anchors, lengths = np.asarray(chains.anchor), np.asarray(chains.length)
        used = lengths > 0
        part = (anchors + 1) // (LENGTH // segments)
        assert (part == np.arange(segments)[:, None])[used].all()
        for row, elements in enumerate(elements_of(chains)):
            assert len(elements) == lengths[row].sum()
            for a, d in elements:
                assert d == 1 or (a, d - 1) in elements
                assert documents[row, a] == documents[row, a + d + 2] != 0
                if over == "answers":
                    assert answer[row, a + 2 : a + d + 3].all()


def test_depth_d_keeps_n_times_its_ratio_where_there_are_as_many() -> None:
    """One document in a row, so that only its last few positions are no candidates."""
    config = dataclasses.replace(SAMPLING, over="all")
    batch = packed_batch([[48], [30]], LENGTH)
    ratios = [0.7, 0.49, 0.343, 0.3, 0.3]
    assert config.ratios == pytest.approx(ratios)
    assert config.slots(LENGTH) == (34, 24, 17, 15, 15)
    for seed in range(3):
        drawn = elements_of(draw(config, batch, row_keys(seed, batch)))
        for n, elements in zip((48, 30), drawn, strict=True):
            expected = [round(n * ratio) for ratio in ratios]
            found = counts_of(elements, 6)
            # The deepest are bounded by who of the depth above does not run into the end.
            assert found[:4] == expected[:4]
            assert expected[4] - 1 <= found[4] <= expected[4]


def test_answers_count_as_n_and_room_bounds_the_draw() -> None:
    batch = packed_batch([[48]], LENGTH)
    answers = int(bears_loss(batch).sum())
    (elements,) = elements_of(draw(SAMPLING, batch, row_keys(1, batch)))
    assert counts_of(elements, 6)[:2] == [round(answers * 0.7), round(answers * 0.49)]
    small = dataclasses.replace(SAMPLING, room=0.25)
    assert small.slots(LENGTH) == (9, 6, 5, 4, 4)
    chains = draw(small, batch, row_keys(1, batch))
    assert chains.anchor.shape == (1, 1, 9)
    assert counts_of(elements_of(chains)[0], 6)[:3] == [9, 6, 5]


def test_each_segment_has_its_own_n() -> None:
    """An answer in the first of two segments leaves the second without chains."""
    batch = packed_batch([[24, 24]], LENGTH)
    batch = dataclasses.replace(batch, answer=batch.answer & (batch.documents == 1))
    chains = draw(dataclasses.replace(SAMPLING, segments=2), batch, row_keys(0, batch))
    n = int(bears_loss(batch).sum())
    counts = np.sum(np.asarray(chains.length) >= 1, axis=-1)
    np.testing.assert_array_equal(counts, [[round(0.7 * n), 0]])


@pytest.mark.parametrize("segments", [1, 2])
def test_which_anchors_are_kept_is_uniform(segments: int) -> None:
    """At every depth, over many draws: each anchor that can reach it about equally often, and
    each pair together as often as two of a random subset."""
    config = ChainSampling(4, 0.6, 0.3, over="all", segments=segments)
    batch = packed_batch([[24]], 24)
    draws = 3000
    keys = jax.random.split(jax.random.key(0), (draws, 1))
    chains = jax.jit(jax.vmap(lambda key: sample_chains(config, batch, key)))(keys)
    kept = np.zeros((draws, 24), np.int32)
    anchors, lengths = (np.asarray(x).reshape(draws, -1) for x in (chains.anchor, chains.length))
    for i in range(draws):
        used = lengths[i] > 0
        kept[i, anchors[i, used]] = lengths[i, used]
    size = 24 // segments
    for depth in (1, 2):
        # Anchors of the first segment; in a row of one segment those far from its end.
        inside = kept[:, : size - 1 if segments > 1 else size - 6] >= depth
        times = inside.sum(axis=0)
        chance = times.mean() / draws
        assert 0.2 < chance < 0.9
        statistic = np.sum((times - times.mean()) ** 2) / (draws * chance * (1 - chance))
        assert 0.001 < stats.chi2.sf(statistic, len(times) - 1) < 0.999
        if segments > 1 and depth == 1:
            # m of the segment's c candidates: a pair is kept with chance m (m - 1) / c (c - 1).
            c, m = inside.shape[1], round(0.6 * size)
            both = inside.T.astype(float) @ inside / draws
            pairs = both[np.triu_indices(c, 1)]
            np.testing.assert_allclose(pairs.mean(), m * (m - 1) / (c * (c - 1)), rtol=1e-6)
            assert np.abs(pairs - pairs.mean()).max() < 5 * np.sqrt(0.25 / draws)


def test_a_draw_is_a_function_of_its_key() -> None:
    batch = packed_batch(DOCUMENTS, LENGTH)
    one, same, other = (draw(SAMPLING, batch, row_keys(k, batch)) for k in (5, 5, 6))
    np.testing.assert_array_equal(one.anchor, same.anchor)
    assert elements_of(one) != elements_of(other)
    # Rows of a batch draw apart.
    twice = packed_batch([[48], [48]], LENGTH)
    first, second = elements_of(draw(SAMPLING, twice, row_keys(0, twice)))
    assert first != second


def test_rows_without_an_answer_or_any_text_have_no_chains() -> None:
    batch = packed_batch([[6], []], 16)
    batch = dataclasses.replace(batch, answer=jnp.zeros_like(batch.answer))
    assert elements_of(draw(SAMPLING, batch, row_keys(0, batch))) == [set(), set()]
    every = dataclasses.replace(SAMPLING, over="all")
    some, none = elements_of(draw(every, batch, row_keys(0, batch)))
    assert {d for _, d in some} == {1, 2, 3}
    assert none == set()


def test_which_rows_bear_loss() -> None:
    batch = packed_batch([[6, 3]], 12)
    batch = dataclasses.replace(
        batch, answer=jnp.asarray([[0, 0, 1, 0, 1, 1, 1, 1, 1, 1, 1, 1]], bool)
    )
    found = bears_loss(batch)[0].astype(int).tolist()
    assert found == [1, 0, 1, 1, 0, 0, 1, 0, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_depths", 0),
        ("keep_ratio", 0.0),
        ("room", 1.5),
        ("min_keep_ratio", -0.1),
        ("segments", 0),
    ],
)
def test_values_out_of_range_are_refused(field: str, value: Any) -> None:
    with pytest.raises(InputError, match=f"found {value!r}, expected"):
        dataclasses.replace(SAMPLING, **{field: value})


def test_segments_that_do_not_divide_a_row_are_refused() -> None:
    with pytest.raises(InputError, match="found 48, expected a multiple of segments = 5"):
        dataclasses.replace(SAMPLING, segments=5).slots(48)
