"""Coupled verification gives plain decoding's own tokens: every method, K, draft mode,
sampling parameter, batch and slot."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace

import numpy as np
import pytest

from peagle_jax import api, batching, runner
from peagle_jax.batching import Batch
from peagle_jax.config import SamplingParams
from peagle_jax.runner import Output, Pair
from tests.decoding import tiny
from tests.decoding.tiny import PARAMS, Result, Tiny

EOS = (21, 4)
PROMPT_SIZE, NEW_TOKENS = 32, 32
# The longest prompts meet the end of the context before NEW_TOKENS.
MAX_POSITIONS = 56
LENGTHS = (1, 2, 3, 5, 9, 17, 26, 32)

# (method, K, draft mode): each K and mode of both methods, not all of their products.
CASES = (
    ("p-eagle", 1, "sample"),
    ("p-eagle", 3, "greedy"),
    ("p-eagle", 5, "sample"),
    ("p-eagle", 8, "greedy"),
    ("eagle3", 1, "greedy"),
    ("eagle3", 3, "sample"),
    ("eagle3", 5, "greedy"),
    ("eagle3", 8, "sample"),
    ("prompt-lookup", 3, "greedy"),
    ("prompt-lookup", 8, "greedy"),
    ("p-eagle+tree", 7, "sample"),
    ("p-eagle+tree", 12, "greedy"),
)
SMALL_BATCH_CASES = (
    ("none", 0, "sample"),
    ("p-eagle", 5, "sample"),
    ("eagle3", 3, "sample"),
    ("prompt-lookup", 3, "greedy"),
    ("p-eagle+lookup", 3, "sample"),
    ("p-eagle+tree+lookup", 7, "sample"),
)


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(7)
    return [rng.integers(0, tiny.VOCAB - 1, n).tolist() for n in LENGTHS]


def tables() -> list[list[SamplingParams]]:
    """Every parameter set on every prompt, half of them past the end of sequence; then greedy
    rows alone and unfiltered rows alone, which take shorter paths."""
    rotations = [
        [
            replace(PARAMS[(row + r) % len(PARAMS)], seed=100 * r + row)
            for row in range(len(LENGTHS))
        ]
        for r in range(len(PARAMS))
    ]
    rotations.append([SamplingParams(ignore_eos=row % 2 == 0) for row in range(len(LENGTHS))])
    rotations.append([SamplingParams(temperature=1.0, seed=row) for row in range(len(LENGTHS))])
    return [
        [replace(p, max_new_tokens=NEW_TOKENS, ignore_eos=p.ignore_eos or r % 2 == 1) for p in rows]
        for r, rows in enumerate(rotations)
    ]


def batches() -> list[Batch]:
    return [tiny.make_batch(prompts(), table, PROMPT_SIZE, NEW_TOKENS) for table in tables()]


@pytest.fixture(scope="module")
def models() -> Tiny:
    """The P-EAGLE drafter has a draft vocabulary, the EAGLE-3 drafter none."""
    return tiny.make(draft_vocab_size=16, eos_token_ids=EOS, max_positions=MAX_POSITIONS)


@pytest.fixture(scope="module")
def plain(models: Tiny) -> list[Result]:
    return [tiny.run(models, models.speculator("none"), batch) for batch in batches()]


@pytest.fixture(scope="module")
def drafted(models: Tiny) -> Callable[[str, int, str], list[Result]]:
    """Results of a case on all tables, run once."""
    known: dict[tuple[str, int, str], list[Result]] = {}

    def results(method: str, k: int, mode: str) -> list[Result]:
        key = (method, k, mode)
        if key not in known:
            speculator = models.speculator(method, k, draft_sampling=mode)
            known[key] = [tiny.run(models, speculator, batch) for batch in batches()]
        return known[key]

    return results


def test_plain_decoding_is_the_models_own_choice(models: Tiny, plain: list[Result]) -> None:
    for batch, result in zip(batches(), plain, strict=True):
        assert tiny.own_choices(models, batch, result) == result.rows()


def test_plain_answers_end_where_they_should(plain: list[Result]) -> None:
    reasons = set()
    for table, result in zip(tables(), plain, strict=True):
        for row, (params, n) in enumerate(zip(table, LENGTHS, strict=True)):
            tokens, room = result.row(row), min(NEW_TOKENS, MAX_POSITIONS - n)
            ends = [i for i, token in enumerate(tokens) if token in EOS]
            hit = bool(ends) and not params.ignore_eos
            assert result.hit_eos[row] == hit
            assert len(tokens) == (ends[0] + 1 if hit else room)
            assert (result.tokens[row, len(tokens) :] == 0).all()
            reasons.add("eos" if hit else "context" if room < NEW_TOKENS else "length")
            reasons |= {"went on past eos"} if ends and not hit else set()
    assert reasons == {"eos", "length", "context", "went on past eos"}


@pytest.mark.parametrize(("method", "k", "mode"), CASES)
def test_tokens_equal_plain_decoding(method, k, mode, plain, drafted) -> None:
    accepted = np.zeros(k, int)
    steps = tokens = cut_by_eos = cut_by_length = 0
    for before, after in zip(plain, drafted(method, k, mode), strict=True):
        assert after.rows() == before.rows()
        np.testing.assert_array_equal(after.tokens, before.tokens)
        np.testing.assert_array_equal(after.hit_eos, before.hit_eos)
        accepted += after.accepted.sum(axis=0)
        steps += after.num_drafts.sum()
        tokens += (after.lengths - 1).sum()
        # Verified but not counted: the answer ended inside an accepted run.
        spare = 1 + after.num_drafts + after.accepted.sum(axis=1) - after.lengths
        assert (spare >= 0).all()
        cut_by_eos += (spare[after.hit_eos] > 0).sum()
        cut_by_length += (spare[~after.hit_eos] > 0).sum()
    # What the equality above is worth: drafts were accepted and refused at every depth.
    assert (accepted[: 2 if "tree" in method else 6] > 0).all()
    assert (np.diff(accepted) <= 0).all()
    assert accepted[0] < 0.9 * steps
    assert steps < 0.75 * tokens
    assert cut_by_length > 0
    # (Argmax drafts hardly ever are an end of sequence here.)
    assert cut_by_eos > 0 or mode == "greedy" or k == 1


@pytest.mark.parametrize(("method", "k", "mode"), SMALL_BATCH_CASES)
@pytest.mark.parametrize("size", [1, 4])
def test_batch_size_changes_nothing(size, method, k, mode, models, plain) -> None:
    speculator = models.speculator(method, k, draft_sampling=mode)
    for index in (0, 1, 3, 8):
        table = tables()[index]
        for begin in range(0, len(LENGTHS), size):
            part = slice(begin, begin + size)
            batch = tiny.make_batch(prompts()[part], table[part], PROMPT_SIZE, NEW_TOKENS)
            assert tiny.run(models, speculator, batch).rows() == plain[index].rows()[part]


@pytest.mark.parametrize("method", ["p-eagle", "eagle3"])
def test_slots_change_nothing(method, models, drafted) -> None:
    """The same requests in other rows: tokens and counters move with them."""
    case = next(c for c in CASES if c[:2] == (method, 5))
    before = drafted(*case)[2]
    order = np.random.default_rng(3).permutation(len(LENGTHS))
    batch = tiny.make_batch(
        [prompts()[i] for i in order], [tables()[2][i] for i in order], PROMPT_SIZE, NEW_TOKENS
    )
    after = tiny.run(models, models.speculator(method, 5, draft_sampling=case[2]), batch)
    for field in fields(Result):
        np.testing.assert_array_equal(
            getattr(after, field.name), getattr(before, field.name)[order], err_msg=field.name
        )


@pytest.mark.parametrize("method", ["p-eagle", "eagle3"])
def test_batch_mates_change_nothing(method, models, drafted) -> None:
    """Row 4 among other prompts, parameters, seeds and answer lengths."""
    case = next(c for c in CASES if c[:2] == (method, 5))
    before = drafted(*case)[5]
    rng = np.random.default_rng(11)
    others = [rng.integers(0, tiny.VOCAB, n).tolist() for n in LENGTHS[::-1]]
    params = [
        SamplingParams(temperature=1.5, seed=1000 + row, max_new_tokens=1 + row, top_k=row)
        for row in range(len(LENGTHS))
    ]
    others[4], params[4] = prompts()[4], tables()[5][4]
    batch = tiny.make_batch(others, params, PROMPT_SIZE, NEW_TOKENS)
    after = tiny.run(models, models.speculator(method, 5, draft_sampling=case[2]), batch)
    assert after.row(4) == before.row(4)
    assert after.num_drafts[4] == before.num_drafts[4]
    assert after.row(3) != before.row(3)


@pytest.mark.parametrize("method", ["p-eagle", "eagle3"])
def test_every_length_limit_cuts_the_same_answer(method, models, plain, drafted) -> None:
    case = next(c for c in CASES if c[:2] == (method, 5))
    speculator = models.speculator(method, 5, draft_sampling=case[2])
    inside_a_run = 0
    for limits in (range(1, 9), range(9, 17)):
        table = [
            replace(p, max_new_tokens=limit) for p, limit in zip(tables()[1], limits, strict=True)
        ]
        batch = tiny.make_batch(prompts(), table, PROMPT_SIZE, NEW_TOKENS)
        result = tiny.run(models, speculator, batch)
        assert result.rows() == [row[:n] for row, n in zip(plain[1].rows(), limits, strict=True)]
        verified = 1 + result.num_drafts + result.accepted.sum(axis=1)
        inside_a_run += (verified > result.lengths).sum()
        # A limit of one is met by the prompt's own pass.
        assert (result.num_drafts > 0).tolist() == [limit > 1 for limit in limits]
    assert inside_a_run > 0


@pytest.mark.parametrize(("method", "k"), [("none", 0), ("p-eagle", 5), ("eagle3", 3)])
def test_prefill_in_chunks_changes_nothing(method, k, models, plain, drafted) -> None:
    """Prompts of 1 to 32 tokens in chunks of 8, drafter rows and features included."""
    batch, expected = batches()[2], plain[2]
    speculator = models.speculator(method, k)
    result = tiny.run(models, speculator, batch, prefill_chunk=8)
    assert result.rows() == expected.rows()
    if k:
        whole = drafted(method, k, "sample")[2]
        np.testing.assert_array_equal(result.accepted, whole.accepted)


@pytest.mark.parametrize("method", ["p-eagle", "eagle3"])
def test_end_of_context_cuts_the_answer_of_a_larger_one(method, models, drafted) -> None:
    case = next(c for c in CASES if c[:2] == (method, 5))
    small = drafted(*case)[3]
    larger = models.with_target(max_positions=1024)
    result = tiny.run(larger, larger.speculator(method, 5, draft_sampling=case[2]), batches()[3])
    room = np.minimum(NEW_TOKENS, MAX_POSITIONS - np.array(LENGTHS))
    assert result.rows() != small.rows()
    assert [row[:n] for row, n in zip(result.rows(), room, strict=True)] == small.rows()
    # The rows that were not cut did not notice their neighbours' end.
    np.testing.assert_array_equal(result.num_drafts[:5], small.num_drafts[:5])


@pytest.fixture(scope="module")
def pair(models: Tiny) -> Pair:
    drafter = models.drafters["p-eagle"]
    return Pair(models.target, drafter, models.params("p-eagle"), None, "float32")


def test_visits_equal_the_whole_loop(pair: Pair, plain: list[Result]) -> None:
    (batch,) = batching.make_batches(batches()[2].requests, len(LENGTHS))
    speculator = api.make_speculator(pair)
    whole = runner.run_whole(pair, speculator, batch)
    in_visits = runner.run_in_visits(pair, speculator, batch)
    for one, other, request in zip(whole, in_visits, batch.requests, strict=True):
        assert one.token_ids == other.token_ids == plain[2].row(request.index)
        assert one.finish_reason == other.finish_reason
        assert one.finish_reason == ("stop" if plain[2].hit_eos[request.index] else "length")
        assert one.stats.num_drafts == other.stats.num_drafts
        assert one.stats.accepted_per_position == other.stats.accepted_per_position
    assert sum(output.stats.num_accepted for output in whole) > 0


def test_stream_equals_the_whole_loop(pair: Pair, plain: list[Result]) -> None:
    for row in (3, 7):
        *_, output = api.stream(pair, prompts()[row], tables()[2][row])
        assert isinstance(output, Output)
        assert output.token_ids == plain[2].row(row)
