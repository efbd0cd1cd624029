"""What batches have shown of drafts decides how the next one is decoded."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from peagle_jax import api, prospects, runner, step_costs
from peagle_jax.batching import make_batches, make_requests
from peagle_jax.config import SamplingParams
from peagle_jax.decoding.draft_length import FIRST_RATE, HOPED_RATE
from peagle_jax.outlook import Outlook
from peagle_jax.runner import Pair
from tests.decoding import tiny

CHEAP = np.array([1.0, 1.1, 1.2, 1.3], np.float32)
DEAR = np.array([1.0, 1.5, 2.0, 3.0], np.float32)
HOPELESS = np.array([1.0, 9.0, 9.0, 9.0], np.float32)


@pytest.fixture
def pair() -> Pair:
    models = tiny.make(draft_vocab_size=16, max_positions=80)
    params = models.params("p-eagle")
    return Pair(models.target, models.drafters["p-eagle"], params, None, "float32")


def speculator(pair: Pair) -> Any:
    fixed = api.make_speculator(pair, "p-eagle", 3)
    return dataclasses.replace(fixed, lengths=(0, 1, 2, 3))


def test_a_first_batch_drafts_where_it_may_pay(pair) -> None:
    outlook = Outlook(speculator(pair))
    np.testing.assert_array_equal(outlook.of_next(CHEAP), [np.float32(FIRST_RATE)] * 3)
    # 1.6 tokens for 1.5 of the time: 1.07 times as fast.
    assert outlook.of_next(DEAR) is not None
    assert outlook.of_next(HOPELESS) is None


def test_bad_batches_end_drafting_and_it_is_tried_again(pair) -> None:
    outlook = Outlook(speculator(pair))
    outlook.learn(np.full((4, 3), 0.3, np.float32))  # four sequences weigh a half
    np.testing.assert_allclose(outlook.rates, (FIRST_RATE + 0.3) / 2)
    assert outlook.of_next(DEAR) is None
    assert outlook.of_next(CHEAP) is not None
    outlook.without_drafts(prospects.STEPS_UNTIL_TRIED - 1)
    assert outlook.of_next(DEAR) is None
    outlook.without_drafts(1)
    np.testing.assert_array_equal(outlook.of_next(DEAR), [np.float32(HOPED_RATE)] * 3)
    assert outlook.of_next(DEAR) is None  # one batch tries
    outlook.learn(np.full((12, 3), 0.8, np.float32))
    np.testing.assert_allclose(outlook.rates, 0.25 * 0.45 + 0.75 * 0.8, rtol=1e-6)
    assert outlook.of_next(DEAR) is not None


def test_one_bad_answer_does_not_end_drafting(pair) -> None:
    outlook = Outlook(speculator(pair))
    costs = np.array([1.0, 1.3, 1.6, 2.0], np.float32)
    outlook.learn(np.full((1, 3), 0.2, np.float32))
    assert outlook.of_next(costs) is not None


@pytest.mark.parametrize("stop", [(), ("zz",)])
def test_a_batch_without_hope_is_plain_decoding(pair, stop, monkeypatch) -> None:
    subjects = []

    def remembered(subject: Any, lengths: Any, measured: Any) -> np.ndarray:
        subjects.append(subject)
        return costs

    monkeypatch.setattr(step_costs, "remembered", remembered)
    pair = dataclasses.replace(pair, tokenizer=Text())
    prompts = [[1, 2, 3], [4, 5], list(range(1, 15)) * 5]
    params = SamplingParams(max_new_tokens=8, ignore_eos=True, stop=stop)
    requests = make_requests(pair.tokenizer, pair.target, prompts, [params] * 3)
    chosen = speculator(pair)
    costs = CHEAP
    drafted, total = runner.run_requests(pair, chosen, requests, 1)
    assert total.num_drafts > 0
    costs = HOPELESS
    pair.compiled.clear()
    plain, total = runner.run_requests(pair, chosen, requests, 1)
    assert (total.num_drafts, total.num_draft_tokens) == (0, 0)
    assert [o.token_ids for o in plain] == [o.token_ids for o in drafted]
    programs = {key[1] for key in pair.compiled if key[0] in ("whole", "prefill", "advance")}
    assert programs == {chosen.without_drafts}
    # What steps cost is asked for each size of prompts, not for each prompt.
    sizes = {(b.rows, b.prompt_size) for b in make_batches(requests, 1)}
    assert len(sizes) == 2
    assert {subject[2:] for subject in subjects} == sizes
    assert len(subjects) == 2 * len(sizes)


class Text:
    """A token is a letter."""

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return "".join(chr(ord("a") + i) for i in ids)
