"""Acceptance from real decoding on a tiny pair: counts, spread, and no second compilation."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from peagle_jax import api
from peagle_jax.config import SamplingParams
from peagle_jax.errors import InputError
from peagle_jax.runner import Pair
from peagle_jax.training import evaluate
from peagle_jax.training.evaluate import decoded_acceptance, decoded_plainly
from tests.decoding import tiny

PROMPTS = [[3, 1, 4], [1, 5], [9, 2, 6, 5], [3, 5, 8], [9, 7], [2, 2, 2]]
CATEGORIES = ["b", "a", "b", "a", "c", "b"]
SIZES = {"max_new_tokens": 20, "batch_size": 4}
SAMPLED = SamplingParams(temperature=1.0, seed=7)


@pytest.fixture(scope="module")
def pair() -> Pair:
    models = tiny.make()
    drafter = models.drafters["p-eagle"]
    return Pair(models.target, drafter, models.params("p-eagle"), None, "float32")


@pytest.fixture(scope="module")
def report(pair):
    return decoded_acceptance(
        pair, PROMPTS, num_draft_tokens=3, params=SAMPLED, categories=CATEGORIES, **SIZES
    )


def test_counts_are_those_of_generate(pair, report):
    each = [SamplingParams(max_new_tokens=20, temperature=1.0, seed=7 + i) for i in range(6)]
    outputs = api.generate(pair, PROMPTS, each, num_draft_tokens=3, batch_size=4)
    assert [o.token_ids for o in report.outputs] == [o.token_ids for o in outputs]
    assert report.drafts == sum(o.stats.num_drafts for o in outputs)
    accepted = np.sum([o.stats.accepted_per_position for o in outputs], axis=0)
    assert report.accepted_per_position == tuple(accepted)
    assert report.accepted == accepted.sum() > 0
    assert report.tokens == 6 * 20
    assert report.acceptance_length == 1 + accepted.sum() / report.drafts
    assert report.per_position == tuple(accepted / report.drafts)
    assert sum(report.per_position) == pytest.approx(report.acceptance_length - 1)


def test_categories_pool_their_own_prompts(report):
    assert list(report.by_category) == ["b", "a", "c"]
    assert [part.prompts for part in report.by_category.values()] == [3, 2, 1]
    for name, part in report.by_category.items():
        own = [o.stats for o, c in zip(report.outputs, CATEGORIES, strict=True) if c == name]
        assert part.drafts == sum(stats.num_drafts for stats in own)
        assert part.accepted == sum(stats.num_accepted for stats in own)
        assert part.standard_error == evaluate.standard_error(
            [stats.num_drafts for stats in own], [stats.num_accepted for stats in own]
        )
    assert report.by_category["c"].standard_error is None
    assert report.standard_error > 0


def test_json_holds_the_figures(report):
    found = report.to_json()
    assert found["acceptance_length"] == report.acceptance_length
    assert found["per_position"] == list(report.per_position)
    assert found["by_category"]["a"]["drafts"] == report.by_category["a"].drafts
    assert found["tokens_per_second"] == report.tokens / report.seconds > 0
    assert report.seconds < sum(o.stats.seconds for o in report.outputs)  # a batch counts once
    assert "outputs" not in found


def test_another_drafter_of_the_same_shapes_compiles_nothing(pair, report, monkeypatch):
    """The trainer's use: one pair, its drafter replaced, as often as wanted."""
    compiled = dict(pair.compiled)
    worse = jax.tree.map(lambda leaf: leaf, pair.params["drafter"])
    worse["lm_head"]["kernel"] = -worse["lm_head"]["kernel"]
    monkeypatch.setitem(pair.params, "drafter", worse)
    copy = dataclasses.replace(pair, params=dict(pair.params))
    for one in (pair, copy):
        again = decoded_acceptance(one, PROMPTS, num_draft_tokens=3, params=SAMPLED, **SIZES)
        assert again.compile_seconds == 0.0
        assert again.acceptance_length < report.acceptance_length - 0.1
        assert [o.token_ids for o in again.outputs] == [o.token_ids for o in report.outputs]
    assert pair.compiled == compiled == copy.compiled
    assert report.compile_seconds > 0 or len(compiled) > 1


def test_drafts_change_no_answer(pair, report):
    plain, total = decoded_plainly(pair, PROMPTS, params=SAMPLED, **SIZES)
    assert [o.token_ids for o in plain] == [o.token_ids for o in report.outputs]
    assert (total.tokens, total.num_drafts) == (120, 0)
    assert 0 < total.seconds < sum(o.stats.seconds for o in plain)


def test_prompts_share_no_noise_and_runs_repeat(pair):
    """Seeds None and 0 are the same; a prompt twice is two samples; the last seed wraps."""
    twice = [PROMPTS[0]] * 2
    ids = {}
    for seed in (None, 0, 2**32 - 1):
        params = SamplingParams(temperature=1.0, seed=seed)
        outputs, _ = decoded_plainly(pair, twice, params=params, **SIZES)
        ids[seed] = [o.token_ids for o in outputs]
    assert ids[None] == ids[0]
    assert ids[0][0] != ids[0][1]
    assert ids[2**32 - 1][1] == ids[0][0]


def test_limits_of_the_call_win_and_no_draft_is_no_gain(pair):
    """The prompt's own pass gives the one token asked for: nothing is ever drafted."""
    seen = []
    report = decoded_acceptance(
        pair,
        PROMPTS,
        num_draft_tokens=3,
        max_new_tokens=1,
        batch_size=4,
        params=SamplingParams(max_new_tokens=99),
        progress=lambda *counts: seen.append(counts),
    )
    assert (report.tokens, report.drafts, report.acceptance_length) == (6, 0, 1.0)
    assert report.per_position == (0.0, 0.0, 0.0)
    assert report.standard_error is None
    assert report.by_category == {}
    assert seen == [(4, 6), (6, 6)]


def test_standard_error_by_hand():
    # Ratio 6/8; residuals 1.5, -1.5, 0; sqrt(3/2 * 4.5) / 8.
    assert evaluate.standard_error([2, 2, 4], [3, 0, 3]) == pytest.approx(np.sqrt(6.75) / 8)
    assert evaluate.standard_error([5, 5], [2, 2]) == 0.0
    assert evaluate.standard_error([5], [2]) is None
    assert evaluate.standard_error([5, 0], [2, 0]) is None
    assert evaluate.standard_error([], []) is None


def test_standard_error_is_the_bootstraps():
    """Prompts drawn again with replacement, the ratio pooled each time."""
    rng = np.random.default_rng(0)
    drafts = rng.integers(5, 90, 60)
    accepted = rng.binomial(drafts * 3, rng.beta(2, 5, 60))
    again = rng.integers(0, 60, (4000, 60))
    ratios = accepted[again].sum(axis=1) / drafts[again].sum(axis=1)
    found = evaluate.standard_error(drafts.tolist(), accepted.tolist())
    assert found == pytest.approx(ratios.std(), rel=0.08)


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ([1, 2], [1, 2], None),
        ([1, 2, 3], [1, 9, 3], 1),
        ([1, 2], [1, 2, 3], 2),
        ([1], [], 0),
    ],
)
def test_first_difference(one, other, expected):
    assert evaluate.first_difference(one, other) == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_draft_tokens": 0}, "num_draft_tokens: found 0, expected 1 to 32"),
        ({"max_new_tokens": 0}, "max_new_tokens: found 0, expected 1 or more"),
        ({"batch_size": 0}, "batch_size: found 0, expected 1 or more"),
        ({"categories": ["a"]}, "categories: found 1, expected one for each of the 6 prompts"),
        ({"prompts": []}, "prompts: found none, expected at least one"),
        ({"prompts": [[1], [99]]}, "prompt 1: found token id 99, expected 0 to 22"),
    ],
)
def test_bad_input_is_refused_before_compilation(pair, changes, message):
    before = dict(pair.compiled)
    arguments = {"prompts": PROMPTS, "num_draft_tokens": 9, **SIZES, **changes}
    with pytest.raises(InputError) as error:
        decoded_acceptance(pair, **arguments)
    assert message in str(error.value)
    assert pair.compiled == before


def test_a_pair_without_a_drafter_is_refused(pair):
    alone = dataclasses.replace(pair, drafter=None)
    with pytest.raises(InputError, match="drafter: found none"):
        decoded_acceptance(alone, PROMPTS, num_draft_tokens=3, **SIZES)
