"""Draft lengths that are chosen step by step: the choice, and that no token depends on it."""

from __future__ import annotations

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from peagle_jax import step_costs
from peagle_jax.batching import Batch
from peagle_jax.config import SamplingParams
from peagle_jax.decoding import draft_length, generate, sampling
from peagle_jax.decoding.draft_length import FIRST_RATE, MOST_PENDING, SHARED_WEIGHT, WEIGHT
from tests.decoding import tiny
from tests.decoding.tiny import Tiny

LENGTHS = (0, 1, 3)
PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8, 9, 7, 9]]
NEW = 70  # more than twice what may be pending


@pytest.fixture(scope="module")
def models() -> Tiny:
    return tiny.make(draft_vocab_size=16)


def batch(params: SamplingParams = SamplingParams(), new: int = NEW) -> Batch:
    each = [
        SamplingParams(
            temperature=params.temperature, seed=row, max_new_tokens=new, ignore_eos=True
        )
        for row in range(len(PROMPTS))
    ]
    return tiny.make_batch(PROMPTS, each, 8, new)


def choose(rates, costs, active=None, gave_up=None, full=None) -> tuple[int, list[bool]]:
    """The draft length, and who gives up."""
    rates = jnp.asarray(rates, jnp.float32)
    every, none = jnp.ones(len(rates), bool), jnp.zeros(len(rates), bool)
    index, gives_up = draft_length.choose(
        rates,
        every if active is None else jnp.asarray(active),
        none if gave_up is None else jnp.asarray(gave_up),
        none if full is None else jnp.asarray(full),
        jnp.asarray(costs),
        LENGTHS,
    )
    return LENGTHS[int(index)], gives_up.tolist()


def chosen(rates, costs, **options) -> int:
    return choose(rates, costs, **options)[0]


@pytest.mark.parametrize(
    ("rates", "costs", "length"),
    [
        # Tokens a step: 1, 1.5 and 1.5 + .25 + .125 = 1.875.
        ([[0.5, 0.5, 0.5]], [1.0, 1.2, 1.4], 3),
        ([[0.5, 0.5, 0.5]], [1.0, 1.2, 1.6], 1),
        ([[0.5, 0.5, 0.5]], [1.0, 1.6, 2.0], 0),
        # A draft that gains less than 3 % is none.
        ([[0.5, 0.0, 0.0]], [1.0, 1.45, 2.0], 1),
        ([[0.5, 0.0, 0.0]], [1.0, 1.46, 2.0], 0),
        # The sequence that drafts badly outweighs the good one: 2, 2 + 1 + 0, 2 + 1 + .. = 3.
        ([[1.0, 0.0, 0.0], [0.0, 0.9, 0.9]], [1.0, 1.4, 1.6], 1),
        ([[1.0, 0.0, 0.0], [0.0, 0.9, 0.9]], [1.0, 1.6, 1.6], 0),
    ],
)
def test_most_tokens_a_millisecond(rates, costs, length) -> None:
    assert chosen(rates, costs) == length


def test_finished_sequences_have_no_say() -> None:
    rates = [[0.9, 0.9, 0.9], [0.0, 0.0, 0.0]]
    assert chosen(rates, [1.0, 1.5, 2.3]) == 0
    assert chosen(rates, [1.0, 1.5, 2.3], active=[True, False]) == 3


def test_who_gave_up_gains_nothing() -> None:
    rates = [[0.9, 0.9, 0.9], [0.9, 0.9, 0.9]]
    assert choose(rates, [1.0, 1.5, 2.3]) == (3, [False, False])
    assert choose(rates, [1.0, 1.5, 2.3], gave_up=[False, True]) == (0, [False, False])


POOR, GOOD = [0.01, 0.01, 0.01], [0.9, 0.9, 0.9]


@pytest.mark.parametrize(
    ("rates", "costs", "options", "expected"),
    [
        # Where more cannot be kept a draft is made as long as it is cheap: 0.48 of a step.
        ([POOR, POOR], [1.0, 1.47, 5.0], {"full": [False, True]}, (1, [False, False])),
        ([POOR, POOR], [1.0, 1.49, 5.0], {"full": [False, False]}, (0, [True, True])),
        ([POOR, POOR], [1.0, 1.47, 5.0], {"full": [False, False]}, (0, [False, False])),
        # It would pay if all others drafted too: they may, later.
        (
            [GOOD, GOOD],
            [1.0, 1.5, 9.0],
            {"full": [True, False], "gave_up": [False, True]},
            (1, [False, False]),
        ),
        # Nobody gives up twice, nor after the end.
        ([POOR, POOR], [1.0, 2.0, 5.0], {"gave_up": [True, False]}, (0, [False, True])),
        ([POOR, POOR], [1.0, 2.0, 5.0], {"active": [True, False]}, (0, [True, False])),
        ([POOR, GOOD], [1.0, 1.1, 5.0], {"full": [1, 0], "active": [False, True]}, (1, [0, 0])),
    ],
)
def test_a_drafter_is_fed_where_it_is_worth_it(rates, costs, options, expected) -> None:
    options = {name: np.asarray(value, bool) for name, value in options.items()}
    assert choose(rates, costs, **options) == expected


def test_drafting_is_worth_it_where_it_gains_more_than_prefill_costs() -> None:
    def worth(rates, costs) -> bool:
        rates, costs = jnp.array(rates, jnp.float32), jnp.array(costs, jnp.float32)
        return bool(draft_length.worth_drafting(rates, costs, LENGTHS))

    assert worth([[0.5, 0, 0]], [1.0, 1.42, 9.0])
    assert not worth([[0.5, 0, 0]], [1.0, 1.44, 9.0])
    assert worth([[0.2, 0, 0], [0.8, 0, 0]], [1.0, 1.42, 9.0])


def test_rates_follow_what_was_seen() -> None:
    rates = jnp.full((4, 3), 0.5)
    accepted, active = jnp.array([0, 1, 2, 2]), jnp.array([True, True, True, False])
    up, down = 0.5 + WEIGHT * 0.5, 0.5 - WEIGHT * 0.5
    found = draft_length.observe(rates, accepted, 2, active)
    # Of the draft after a refused one, and of the third, which was not made, nothing is known.
    alone = np.array([[down, 0.5, 0.5], [up, down, 0.5], [up, up, 0.5]])
    # What three saw of the first draft, 1/6 more than expected, all learn by two thirds.
    drafting = np.add(alone, [SHARED_WEIGHT * 2 / 3 * 1 / 6, 0, 0])
    # A row without a sequence takes what the others have on average.
    np.testing.assert_allclose(found, [*drafting, np.mean(drafting, axis=0)])
    one = draft_length.observe(rates[:1], accepted[:1], 2, active[:1])
    np.testing.assert_allclose(one, alone[:1])
    np.testing.assert_array_equal(draft_length.observe(rates, accepted * 0, 0, active), rates)
    np.testing.assert_array_equal(draft_length.observe(rates, accepted, 2, active & False), rates)


@pytest.mark.parametrize(
    ("method", "temperature"),
    [("p-eagle", 0.0), ("eagle3", 1.0), ("prompt-lookup", 1.0), ("p-eagle+tree+lookup", 1.0)],
)
def test_tokens_equal_plain_decoding(method, temperature, models) -> None:
    params = SamplingParams(temperature=temperature)
    plain = tiny.run(models, models.speculator("none"), batch(params))
    speculator = models.speculator(method, 3, lengths=LENGTHS)
    drafts = []
    for costs in ([1.0, 1.01, 1.02], [1.0, 1.3, 60.0], [1.0, 1.4, 1.7], [1.0, 50.0, 60.0]):
        found = tiny.run(
            models, speculator, batch(params), step_costs=jnp.array(costs, jnp.float32)
        )
        assert found.rows() == plain.rows()
        drafts.append(int(found.num_drafts.sum()))
    # Cheap ones are tried again now and then, others are given up, dear ones never made.
    assert drafts[1] >= (NEW // MOST_PENDING) * len(PROMPTS)
    assert drafts[0] > drafts[3] == 0
    assert drafts[2] > 0


@pytest.mark.parametrize("method", ["p-eagle", "eagle3", "p-eagle+tree"])
def test_one_length_always_is_the_fixed_one(method, models) -> None:
    fixed = tiny.run(models, models.speculator(method, 3), batch())
    costs = jnp.asarray(step_costs.forced(LENGTHS, 2))
    found = tiny.run(
        models, models.speculator(method, 3, lengths=LENGTHS), batch(), step_costs=costs
    )
    assert found.rows() == fixed.rows()
    np.testing.assert_array_equal(found.num_drafts, fixed.num_drafts)
    np.testing.assert_array_equal(found.accepted, fixed.accepted)


@pytest.mark.parametrize("method", ["p-eagle", "eagle3"])
def test_a_drafter_that_was_not_asked_catches_up(method, models) -> None:
    """Drafts after steps without any are those of a drafter that saw every step."""
    one = batch(SamplingParams(temperature=1.0), new=40)
    prompts, lengths, table = one.arrays()
    params = models.params(method)

    def drafts_by_length(speculator, order) -> dict[tuple[int, int], list[int]]:
        state = generate.jit_prefill(
            params, prompts, lengths, table, speculator=speculator, max_new_tokens=40
        )
        step = jax.jit(functools.partial(advance, speculator))
        found = {}
        for index in order:
            # Without a rate none pays, but the longest are cheap enough to be fed for.
            costs = (
                step_costs.forced(LENGTHS, index)
                if index
                else np.array([1.0, 1.1, 1.1], np.float32)
            )
            state = state.replace(rates=jnp.full_like(state.rates, 0.6 if index else 0.0))
            drafts, state = step(params, state, table, costs)
            for row in range(len(PROMPTS)):
                found[row, int(before(state, row))] = drafts[row].tolist()
        return found

    def advance(speculator, params, state, table, costs):
        positions = state.length[:, None] + 1 + jnp.arange(4)
        drawn = sampling.draws(table, positions, models.target.vocab_size)
        drafts = speculator.draft(params, state, table, drawn.rows(slice(3)), 3).tokens
        if speculator.lengths:
            state = state.replace(step_costs=costs)
        after = speculator.step(params, state, table)
        return drafts, after.replace(history=state.length[:, None])

    def before(state, row):
        return state.history[row, 0]

    always = drafts_by_length(models.speculator(method, 3), [2] * 12)
    mixed = drafts_by_length(
        models.speculator(method, 3, lengths=LENGTHS), [0, 0, 0, 2, 0, 1, 1, 0, 0, 0, 0, 0, 2, 2]
    )
    both = always.keys() & mixed.keys()
    assert len(both) > 15
    assert {key: mixed[key] for key in both} == {key: always[key] for key in both}
    assert len({tuple(drafts) for drafts in mixed.values()}) > 5


def test_rates_begin_anew(models) -> None:
    state = models.speculator("p-eagle", 3, lengths=LENGTHS).init_state(2, 8, 8)
    np.testing.assert_array_equal(state.rates, np.full((2, 3), FIRST_RATE, np.float32))
    assert models.speculator("p-eagle", 3).init_state(2, 8, 8).rates.shape == (2, 0)


def test_lengths_rise_from_none_to_the_most(models) -> None:
    for lengths in ((1, 3), (0, 3, 1), (0, 1), (0, 1, 1, 3)):
        with pytest.raises(ValueError, match="draft lengths"):
            models.speculator("p-eagle", 3, lengths=lengths)


def test_costs_are_medians_and_are_remembered(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(step_costs, "cache_folder", lambda: tmp_path)
    times = iter([9, 9, 9, 0.01, 0.03, 0.05, 0.02, 0.02, 0.01, 0.03, 0.04, 0.06])
    calls = []

    def seconds_of(costs):
        calls.append(int(np.argmin(costs)))
        return next(times)

    def measured():
        return step_costs.measure(LENGTHS, seconds_of)

    first = step_costs.remembered(("a", 1), LENGTHS, measured)
    np.testing.assert_allclose(first, [20, 30, 50], rtol=1e-6)
    assert calls == [0, 1, 2] * 4
    np.testing.assert_array_equal(step_costs.remembered(("a", 1), LENGTHS, measured), first)
    assert len(calls) == 12
    (kept,) = tmp_path.glob("step_costs/*.json")
    whole = kept.read_text()
    for torn in ("{", "[]", *(json.dumps({"milliseconds": m}) for m in ([1, 2], [1, 2, 0]))):
        kept.write_text(torn)
        times = iter([9, 9, 9, 0.01, 0.03, 0.05, 0.02, 0.02, 0.01, 0.03, 0.04, 0.06])
        np.testing.assert_array_equal(step_costs.remembered(("a", 1), LENGTHS, measured), first)
        assert kept.read_text() == whole
    kept.write_text('{"milliseconds": [1, NaN, 3]}')
    times = iter([0.01] * 12)
    np.testing.assert_allclose(
        step_costs.remembered(("a", 1), LENGTHS, measured), [10] * 3, rtol=1e-6
    )


def test_plain_decoding_keeps_nothing_for_a_drafter(models) -> None:
    prompts, lengths, table = batch(new=8).arrays()
    options = {"speculator": models.speculator("none"), "max_new_tokens": 8}
    params = models.params("none")
    state = generate.jit_prefill(params, prompts, lengths, table, **options)
    state = generate.jit_advance(params, state, table, lengths, num_steps=4, **options)
    assert state.emitted.tolist() == [5, 5, 5]
    assert state.pending_count.tolist() == [1, 1, 1]
