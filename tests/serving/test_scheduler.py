"""The scheduler against an engine whose tokens depend on every page that it reads."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle_jax import prospects
from peagle_jax.errors import InputError
from peagle_jax.serving.engine_protocol import EngineShape
from peagle_jax.serving.scheduler import Policy, Scheduler
from peagle_jax.serving.sequence import Tracked
from tests.serving.fake_engine import EOS, FakeEngine, answer, make_request, target

SHAPE = EngineShape(num_slots=2, num_pages=64, page_size=2, context=40, num_draft_tokens=2)


def make(shape=SHAPE, steps=2, prefill_tokens=8, **changes):
    shape = EngineShape(**{**shape.__dict__, **changes})
    engine = FakeEngine(shape)
    return Scheduler(engine, Policy(steps, prefill_tokens), clock=lambda: 0.0), engine


def finish(scheduler, most_visits=2000):
    """Visits until nothing is left: what finished in order, with the tokens that came."""
    finished, streamed = {}, {}
    for _ in range(most_visits):
        if scheduler.idle:
            return finished, streamed
        for update in scheduler.visit():
            streamed.setdefault(update.key, []).extend(update.tokens)
            if update.finished:
                assert update.key not in finished
                finished[update.key] = update.finished
        scheduler.check_invariants()
    raise AssertionError("no end")


def check_all(scheduler, engine, requests, finished, streamed):
    shape = engine.shape
    for request in requests:
        tokens, reason = answer(request, shape.context)
        found = finished[request.key]
        assert (found.token_ids, found.reason) == (tokens, reason)
        assert tuple(streamed[request.key]) == tokens
        assert found.prompt_tokens == len(request.token_ids)
        assert found.num_draft_tokens == found.num_drafts * shape.num_draft_tokens
        assert len(found.accepted_per_position) == shape.num_draft_tokens
    assert scheduler.num_free_pages == shape.num_groups * (shape.num_pages - 1)
    engine.settle()
    assert not any(slot.decoding for slot in engine._slots)


PLAIN_REQUESTS = st.lists(
    st.tuples(
        st.lists(st.integers(1, 20), min_size=1, max_size=23),  # prompt, cut to the context
        st.integers(1, 14),  # max_new_tokens
        st.integers(0, 3),  # seed
        st.booleans(),  # ignore_eos
        st.integers(0, 12),  # the visit that it comes before
    ),
    min_size=1,
    max_size=9,
)


def make_workload(sizes, plain):
    """A small engine, and requests for it that all fit alone."""
    context, k, page_size, groups, slots, spare_pages = sizes
    requests = [
        make_request(index, prompt[: context - 1], new, seed=seed, ignore_eos=ignore_eos)
        for index, (prompt, new, seed, ignore_eos, _) in enumerate(plain)
    ]
    lengths = [(len(one.token_ids), one.params.max_new_tokens) for one in requests]
    most = max(min(length + new, context) + 2 * k for length, new in lengths)
    shape = EngineShape(
        num_slots=groups * slots,
        num_pages=1 - (-most // page_size) + spare_pages,
        page_size=page_size,
        context=context,
        num_draft_tokens=k,
        num_groups=groups,
    )
    return shape, requests


@settings(max_examples=80, deadline=None)
@given(
    sizes=st.tuples(
        st.integers(6, 24),  # context
        st.integers(0, 6),  # K
        st.integers(1, 4),  # page size
        st.integers(1, 2),  # groups
        st.integers(1, 4),  # slots a group
        st.integers(0, 6),  # pages that the largest request does not need
    ),
    steps=st.integers(1, 3),
    budget=st.integers(0, 8),
    plain=PLAIN_REQUESTS,
    cancelled=st.dictionaries(st.integers(0, 9), st.integers(0, 15), max_size=3),
)
def test_every_request_gets_exactly_its_tokens(sizes, steps, budget, plain, cancelled) -> None:
    shape, requests = make_workload(sizes, plain)
    engine = FakeEngine(shape)
    policy = Policy(steps, shape.page_size + budget)
    scheduler = Scheduler(engine, policy, clock=lambda: 0.0)
    streamed: dict[object, list[int]] = {request.key: [] for request in requests}
    ends = {}
    arrivals = [when for *_, when in plain]
    pending = sorted(zip(arrivals, requests, strict=True), key=lambda pair: pair[0])
    # Each visit moves the oldest sequence of a group on, or frees it for the next one.
    bound = 60 + 4 * sum(len(r.token_ids) + r.params.max_new_tokens for r in requests)
    for visit in range(bound):
        while pending and pending[0][0] <= visit:
            scheduler.submit(pending.pop(0)[1])
        for key, when in cancelled.items():
            if when == visit and (end := scheduler.cancel(key)) is not None:
                ends[key] = end
        if not pending and scheduler.idle:
            break
        for update in scheduler.visit():
            assert update.key not in ends
            streamed[update.key] += update.tokens
            if update.finished:
                ends[update.key] = update.finished
        scheduler.check_invariants()
    else:
        raise AssertionError("no end")
    assert ends.keys() == {request.key for request in requests}
    for request in requests:
        tokens, reason = answer(request, shape.context)
        end = ends[request.key]
        assert end.token_ids == tuple(streamed[request.key])
        if end.reason == "cancelled":
            assert tokens[: len(end.token_ids)] == end.token_ids
        else:
            assert (end.token_ids, end.reason) == (tokens, reason)
    assert scheduler.num_free_pages == shape.num_groups * (shape.num_pages - 1)
    assert (scheduler.num_running, scheduler.num_waiting) == (0, 0)


def test_tiny_pools_preempt_and_still_finish() -> None:
    shape = {"num_slots": 4, "num_pages": 20, "context": 30}
    scheduler, engine = make(**shape)
    requests = [make_request(i, range(1, 6), 20, seed=i, ignore_eos=True) for i in range(8)]
    for request in requests:
        scheduler.submit(request)
    finished, streamed = finish(scheduler)
    check_all(scheduler, engine, requests, finished, streamed)
    assert scheduler.counters.preemptions > 0
    assert sum(end.preemptions for end in finished.values()) == scheduler.counters.preemptions
    assert scheduler.counters.recomputed_tokens > 0
    assert finished[0].preemptions == 0  # the oldest never makes room for another


def test_ample_pages_never_preempt_and_steps_overlap() -> None:
    scheduler, engine = make()
    requests = [make_request(i, [3, 4, 5], 18, seed=i, ignore_eos=True) for i in range(2)]
    for request in requests:
        scheduler.submit(request)
    finished, streamed = finish(scheduler)
    check_all(scheduler, engine, requests, finished, streamed)
    assert scheduler.counters.preemptions == 0
    verbs = [call for call in engine.log if call[0] in ("step", "fetch")]
    steps = [call[1] for call in verbs if call[0] == "step"]
    # Every step but the first is asked for before the one before it is fetched.
    expected = [("step", steps[0])]
    for before, after in itertools.pairwise(steps):
        expected += [("step", after), ("fetch", before)]
    assert verbs == [*expected, ("fetch", steps[-1])]


def test_no_step_is_asked_for_when_all_are_surely_over() -> None:
    scheduler, engine = make(steps=3)
    scheduler.submit(make_request("a", [1], 4, ignore_eos=True))  # the first token, three steps
    finish(scheduler)
    assert [call[0] for call in engine.log] == ["prefill", "insert", "step", "fetch", "free"]
    assert (scheduler.counters.slot_steps, scheduler.counters.idle_slot_steps) == (3, 3)


def test_prefill_keeps_its_budget_while_others_decode() -> None:
    scheduler, engine = make(prefill_tokens=7)
    long = make_request("long", [*range(1, 20)], 3, seed=5, ignore_eos=True)
    short = make_request("short", [9], 30, seed=6, ignore_eos=True)
    for request in (short, long):
        scheduler.submit(request)
    finished, streamed = finish(scheduler)
    check_all(scheduler, engine, [long, short], finished, streamed)
    chunks = [call[1:] for call in engine.log if call[0] == "prefill"]
    # Chunks begin where pages do; the short prompt takes a token of the first budget.
    assert chunks == [((0, 0, 1), (1, 0, 6)), ((1, 6, 6),), ((1, 12, 7),)]
    kinds = [call[0] for call in engine.log]
    first, last = kinds.index("prefill"), len(kinds) - 1 - kinds[::-1].index("prefill")
    assert kinds[first:last].count("step") == 2  # one between any two chunks


def test_admission_is_in_order_of_arrival() -> None:
    """A large request waits for pages; smaller ones behind it do not overtake it."""
    scheduler, engine = make(num_slots=3, num_pages=17, context=30)
    running = make_request("running", [1] * 4, 16, seed=1, ignore_eos=True)
    large = make_request("large", [2] * 20, 4, seed=2, ignore_eos=True)
    small = make_request("small", [3], 1, seed=3)
    for request in (running, large, small):
        scheduler.submit(request)
    finished, streamed = finish(scheduler)
    check_all(scheduler, engine, [running, large, small], finished, streamed)
    assert next(call[1:] for call in engine.log if call[0] == "prefill") == ((0, 0, 4),)
    assert next(iter(finished)) == "running"


def test_groups_have_pages_of_their_own() -> None:
    scheduler, engine = make(num_slots=4, num_groups=2, num_pages=22, prefill_tokens=64)
    requests = [make_request(i, [i + 1] * 6, 8, seed=i, ignore_eos=True) for i in range(4)]
    for request in requests:
        scheduler.submit(request)
    scheduler.visit()
    # Alternately to the group that has more pages left.
    assert engine.log[0][1:] == ((0, 0, 6), (2, 0, 6), (1, 0, 6), (3, 0, 6))
    tables = scheduler._slots.step_tables()
    assert set(tables[:2].flat) == set(tables[2:].flat)  # the same numbers, of other pages
    finished, streamed = finish(scheduler)
    check_all(scheduler, engine, requests, finished, {**streamed})


def test_only_the_short_groups_own_sequences_make_room() -> None:
    """Three long answers share the first group's pages; the second has the newest of all."""
    scheduler, engine = make(num_slots=6, num_groups=2, num_pages=29, prefill_tokens=64)
    lengths = [28, 11, 28, 11, 28, 14]
    requests = [
        make_request(index, [index + 1] * 2, new, seed=index, ignore_eos=True)
        for index, new in enumerate(lengths)
    ]
    for request in requests:
        scheduler.submit(request)
    finished, streamed = finish(scheduler)
    check_all(scheduler, engine, requests, finished, streamed)
    preempted = {key: end.preemptions for key, end in finished.items()}
    assert preempted[4] > 0
    assert [preempted[key] for key in (0, 1, 3, 5)] == [0, 0, 0, 0]


def test_pages_cover_what_steps_in_flight_may_write() -> None:
    """K = 2, so 3 tokens a step and 4 rows of scratch; a prompt of 5, 30 tokens to come."""
    tracked = Tracked(make_request("a", [1] * 5, 30), 0, SHAPE, None, 0.0)
    assert tracked.positions_for(num_steps=3) == 5 + (1 + 3 * 3) + 4  # with the first token
    tracked.inserted = tracked.fresh = True
    assert tracked.positions_for(num_steps=3) == 5 + (1 + 3 * 3) + 4
    tracked.fresh, tracked.most_ahead = False, 10
    assert tracked.positions_for(num_steps=3) == 5 + 10 + 3 * 3 + 4
    tracked.generated, tracked.most_ahead = [1] * 6, 3
    assert tracked.positions_for(num_steps=3) == 11 + 3 + 3 * 3 + 4
    tracked.generated = [1] * 28  # no more than it ever needs
    assert tracked.positions_for(num_steps=3) == 5 + 30 + 4


def test_eos_inside_an_accepted_run() -> None:
    """Some seed has the end of sequence as an accepted draft; what follows it is dropped."""
    scheduler, engine = make(num_slots=4, num_draft_tokens=4, steps=3)
    requests = [make_request(seed, [7, 8], 30, seed=seed) for seed in range(40)]
    for request in requests:
        scheduler.submit(request)
    finished, streamed = finish(scheduler)
    check_all(scheduler, engine, requests, finished, streamed)
    reasons = [end.reason for end in finished.values()]
    assert reasons.count("stop") > 10
    assert reasons.count("length") > 0
    assert all(EOS not in end.token_ids[:-1] for end in finished.values())


def test_the_answer_ends_with_the_context() -> None:
    scheduler, engine = make(context=12)
    request = make_request("a", [4] * 9, 50, ignore_eos=True)
    scheduler.submit(request)
    finished, streamed = finish(scheduler)
    assert len(finished["a"].token_ids) == 3
    check_all(scheduler, engine, [request], finished, streamed)


def test_a_watch_ends_an_answer() -> None:
    scheduler, engine = make()
    request = make_request("a", [5], 30, seed=1, ignore_eos=True)
    tokens, _ = answer(request, SHAPE.context)
    seen: list[int] = []

    def watch(new):
        seen.extend(new)
        return 11 if len(seen) >= 11 else None

    scheduler.submit(request, watch)
    finished, streamed = finish(scheduler)
    assert finished["a"].reason == "stop"
    assert finished["a"].token_ids == tuple(streamed["a"]) == tokens[:11]
    assert tuple(seen) == tokens[: len(seen)]
    assert scheduler.num_free_pages == SHAPE.num_pages - 1
    engine.settle()
    assert not engine._slots[0].decoding


def test_a_cancelled_slot_is_used_again_while_its_steps_are_in_flight() -> None:
    scheduler, engine = make(num_slots=1)
    scheduler.submit(make_request("a", [1, 2], 30, ignore_eos=True))
    other = make_request("b", [3, 4], 9, seed=4, ignore_eos=True)
    scheduler.submit(other)
    for _ in range(3):
        scheduler.visit()
    end = scheduler.cancel("a")
    assert end is not None
    assert end.reason == "cancelled"
    expected, _ = answer(make_request("a", [1, 2], 30, ignore_eos=True), SHAPE.context)
    assert end.token_ids == expected[: len(end.token_ids)]
    assert len(end.token_ids) > 0
    assert scheduler.cancel("a") is None
    finished, streamed = finish(scheduler)
    check_all(scheduler, engine, [other], finished, streamed)
    assert scheduler.cancel("unknown") is None


def test_decisions_are_the_same_every_time() -> None:
    logs = []
    for _ in range(2):
        scheduler, engine = make(num_slots=4, num_pages=14, num_groups=2, context=24)
        for i in range(12):
            scheduler.submit(make_request(f"r{i}", [i + 1] * (1 + i % 5), 4 + i % 7, seed=i))
        finish(scheduler)
        logs.append(engine.log)
    assert logs[0] == logs[1]


def test_what_can_never_fit_is_refused_at_once() -> None:
    scheduler, _ = make(num_pages=11)  # 20 positions
    for prompt, new, message in (
        ([], 1, "request 'a': found no tokens, expected at least one"),
        ([1] * 40, 1, "found 40 tokens, expected at most 39 (the context less one"),
        (
            [1] * 10,
            7,
            "10 tokens and max_new_tokens 7, which need 11 pages of 2; expected at most 10",
        ),
    ):
        with pytest.raises(InputError) as error:
            scheduler.submit(make_request("a", prompt, new))
        assert message in str(error.value)
        assert "\n" not in str(error.value)
        assert scheduler.idle
    scheduler.check(make_request("a", [1] * 10, 6))
    scheduler.submit(make_request("a", [1] * 10, 6))
    with pytest.raises(InputError, match="request 'a': found it twice"):
        scheduler.submit(make_request("a", [1], 1))
    finish(scheduler)


def test_bad_policies_are_refused() -> None:
    with pytest.raises(InputError, match="steps_a_visit: found 0, expected 1 or more"):
        Policy(steps_a_visit=0)
    with pytest.raises(InputError, match="prefill_tokens: found 1, expected at least 2, the size"):
        make(prefill_tokens=1)


def test_times_of_a_request() -> None:
    ticks = iter(range(100))
    scheduler = Scheduler(FakeEngine(SHAPE), Policy(2, 8), clock=lambda: float(next(ticks)))
    scheduler.submit(make_request("a", [1], 9, ignore_eos=True))
    finished, _ = finish(scheduler)
    times = finished["a"].times
    assert times.submitted < times.started < times.first_token < times.finished


def test_an_engine_that_breaks_its_word_is_found_out() -> None:
    scheduler, engine = make()
    scheduler.submit(make_request("a", [1], 2, ignore_eos=True))
    fetch = engine.fetch

    def too_many(pending):
        results = fetch(pending)
        results.counts[0] = 3
        return results

    engine.fetch = too_many
    with pytest.raises(RuntimeError, match="3 tokens past a limit of 2"):
        finish(scheduler)


def test_the_scheduler_does_without_jax() -> None:
    code = "import sys, peagle_jax.serving.scheduler; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_fake_target_reads_its_context() -> None:
    assert len({target([1, 2, i], 0) for i in range(30)}) > 5


def drafting_of(engine) -> tuple[list[tuple[bool, bool]], list[str]]:
    """(drafts, anew) of the insertions, and the kinds of steps."""
    steps = [call[0] for call in engine.log if "step" in call[0]]
    return [(one.drafts, one.anew) for one in engine.inserted], steps


def serve_some(scheduler, engine, count=5, new=12) -> None:
    requests = [make_request(i, [i + 1, 2, 3], new, ignore_eos=True) for i in range(count)]
    for request in requests:
        scheduler.submit(request)
    finished, streamed = finish(scheduler)
    for request in requests:
        tokens, reason = answer(request, engine.shape.context)
        assert (finished[request.key].token_ids, finished[request.key].reason) == (tokens, reason)
        assert tuple(streamed[request.key]) == tokens
    assert scheduler.num_free_pages == engine.shape.num_pages - 1


def test_nothing_drafts_where_it_is_not_worth_it() -> None:
    scheduler, engine = make()
    engine.worth_drafting = False
    serve_some(scheduler, engine)
    inserted, steps = drafting_of(engine)
    assert inserted == [(False, False)] * 5
    assert set(steps) == {"plain step"}


def test_steps_are_plain_once_all_have_given_up() -> None:
    scheduler, engine = make(steps=1)
    engine.patience = 2
    serve_some(scheduler, engine, count=2)
    inserted, steps = drafting_of(engine)
    assert inserted == [(True, False)] * 2
    # Of two drafting steps the results are known one step later.
    assert steps[:3] == ["step"] * 3
    assert set(steps[3:]) == {"plain step"}


def test_a_preempted_sequence_may_draft_again() -> None:
    scheduler, engine = make(steps=1, num_pages=14)
    engine.patience = 2
    serve_some(scheduler, engine, count=2, new=14)
    assert scheduler.counters.preemptions > 0
    assert drafting_of(engine)[0] == [(True, False)] * (2 + scheduler.counters.preemptions)


@pytest.mark.parametrize("worth_trying", [True, False])
def test_drafts_are_tried_again_by_all_slots(worth_trying, monkeypatch) -> None:
    monkeypatch.setattr(prospects, "STEPS_UNTIL_TRIED", 16)
    scheduler, engine = make()
    engine.worth_drafting, engine.worth_trying, engine.patience = False, worth_trying, 3
    serve_some(scheduler, engine, count=12)
    inserted, steps = drafting_of(engine)
    tries = [at for at, one in enumerate(inserted) if one == (True, True)]
    assert set(inserted) == {(False, False), *([(True, True)] if worth_trying else [])}
    if worth_trying:
        # Two slots, in pairs; twelve steps a request, two a visit.
        assert tries[:2] == [tries[0], tries[0] + 1]
        assert 2 <= tries[0] <= 4
        assert len(tries) >= 4
        assert 16 / 2 <= steps.index("step") <= 16 / 2 + 12 / 2
    else:
        assert set(steps) == {"plain step"}
