"""Continuous batching on real networks: the tokens of one-by-one generation, whatever the slots,
pages, chunks, order of arrival and preemptions."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from peagle_jax import step_costs
from peagle_jax.config import SamplingParams
from peagle_jax.decoding.draft_length import FIRST_RATE
from peagle_jax.errors import InputError
from peagle_jax.mesh_shape import MeshShape
from peagle_jax.serving import engine as engine_module
from peagle_jax.serving.engine import BackendSizes, PagedEngine, make_shape, page_bytes
from peagle_jax.serving.engine_protocol import Engine, EngineShape
from peagle_jax.serving.scheduler import Policy, Scheduler
from peagle_jax.serving.sequence import Finished, Request
from tests.decoding import tiny
from tests.decoding.tiny import PARAMS, Tiny
from tests.training.dense_reference import QUICK

EOS = (21, 4)
CONTEXT = 56  # met by the longest prompts
EXECUTABLES: dict[Any, Any] = {}  # of all engines here


@dataclasses.dataclass(frozen=True)
class Case:
    """How the requests are run; `num_pages` None = all slots can be full."""

    method: str
    num_draft_tokens: int
    num_slots: int
    page_size: int
    num_pages: int | None = None
    prefill_tokens: int = 64
    steps: int = 2
    piece_rows: int | None = 16
    prefill_rows: int = 64
    draft_sampling: str = "sample"
    lengths: tuple[int, ...] = ()


CASES = {
    "plain, one slot, pages of one": Case("none", 0, 1, page_size=1, prefill_tokens=5, steps=1),
    "p-eagle, few pages": Case("p-eagle", 5, 4, page_size=4, num_pages=24, steps=1),
    "eagle3, few pages": Case(
        "eagle3", 3, 5, page_size=3, num_pages=23, steps=1, draft_sampling="greedy"
    ),
    "prompt-lookup, few pages": Case("prompt-lookup", 4, 4, page_size=4, num_pages=24, steps=2),
    "chosen lengths, few pages": Case(
        "p-eagle", 3, 4, page_size=4, num_pages=34, steps=2, lengths=(0, 1, 3)
    ),
    "with lookup, few pages": Case("p-eagle+lookup", 3, 4, page_size=4, num_pages=34, steps=2),
    "tree, few pages": Case("p-eagle+tree", 7, 4, page_size=4, num_pages=26, steps=1),
    # Parts of several prompts together, filled up to 4.
    "narrow, together": Case("p-eagle", 3, 6, 8, None, 24, 4, piece_rows=None, prefill_rows=256),
    # Pieces of several prompts together, less than a page long.
    "in pieces": Case("p-eagle+tree+lookup", 5, 6, 8, piece_rows=3, prefill_rows=24, steps=1),
}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs run for milliseconds here: compiling is what takes time."""

    def compiled(programs: dict[Any, Any], key: Any, lower: Any) -> tuple[Any, float]:
        if key not in programs:
            programs[key] = lower().compile(compiler_options=QUICK)
        return programs[key], 0.0

    monkeypatch.setattr(engine_module, "compiled", compiled)


def make_requests(seed: int, count: int, longest: int, most_new: int) -> list[Request]:
    rng = np.random.default_rng(seed)
    requests = []
    for key in range(count):
        params = replace(
            PARAMS[key % len(PARAMS)],
            max_new_tokens=int(rng.integers(1, most_new + 1)),
            ignore_eos=bool(rng.random() < 0.6),
        )
        ids = rng.integers(0, tiny.VOCAB - 1, rng.integers(1, longest + 1))
        requests.append(Request(key, tuple(ids.tolist()), params, seed=100 * seed + key))
    return requests


def expected_answers(models: Tiny, requests: Sequence[Request], size: int, most_new: int) -> Any:
    """(token ids, "stop" or "length") of plain generation."""
    params = [replace(one.params, seed=one.seed) for one in requests]
    batch = tiny.make_batch([one.token_ids for one in requests], params, size, most_new)
    result = tiny.run(models, models.speculator("none"), batch)
    reasons = np.where(result.hit_eos, "stop", "length").tolist()
    return [(tuple(tokens), reason) for tokens, reason in zip(result.rows(), reasons, strict=True)]


@pytest.fixture(scope="module")
def models() -> Tiny:
    """The P-EAGLE drafter has a draft vocabulary, the EAGLE-3 drafter none."""
    return tiny.make(draft_vocab_size=16, eos_token_ids=EOS, max_positions=CONTEXT)


REQUESTS = [
    *make_requests(1, 14, longest=40, most_new=24),
    # To the end of the context, in one page less than the prompt has, and past it.
    Request(14, tuple(range(20)) * 2, SamplingParams(max_new_tokens=30, ignore_eos=True), 3),
    Request(15, (7,) * 55, SamplingParams(temperature=1.0, max_new_tokens=9), 4),
]


@pytest.fixture(scope="module")
def plain(models: Tiny) -> Any:
    return expected_answers(models, REQUESTS, 64, 32)


def make_engine(models: Tiny, case: Case, context: int = CONTEXT) -> PagedEngine:
    speculator = models.speculator(
        case.method,
        case.num_draft_tokens,
        draft_sampling=case.draft_sampling,
        lengths=case.lengths,
    )
    shape = EngineShape(
        case.num_slots,
        2,
        case.page_size,
        context,
        case.num_draft_tokens,
        pending_rows=speculator.pending_rows,
    )
    num_pages = case.num_pages or 1 + case.num_slots * shape.pages_a_slot
    shape = replace(shape, num_pages=num_pages)
    return PagedEngine(
        speculator,
        models.params(case.method),
        shape,
        sizes=BackendSizes(case.page_size, case.prefill_rows, case.piece_rows, case.steps),
        executables=EXECUTABLES,
    )


def serve(
    engine: PagedEngine, case: Case, requests: Sequence[Request], arrivals: Sequence[int]
) -> tuple[dict[Any, Finished], Scheduler]:
    """Requests in the order of `arrivals`, the visits before which they come."""
    scheduler = Scheduler(engine, Policy(case.steps, case.prefill_tokens), clock=lambda: 0.0)
    pending = sorted(zip(arrivals, requests, strict=True), key=lambda pair: pair[0])
    ends: dict[Any, Finished] = {}
    streamed: dict[Any, list[int]] = {request.key: [] for request in requests}
    for visit in range(5000):
        while pending and pending[0][0] <= visit:
            scheduler.submit(pending.pop(0)[1])
        if scheduler.idle and not pending:
            break
        for update in scheduler.visit():
            streamed[update.key] += update.tokens
            if update.finished:
                ends[update.key] = update.finished
        scheduler.check_invariants()
    else:
        raise AssertionError("no end")
    assert {key: tuple(ids) for key, ids in streamed.items()} == {
        key: end.token_ids for key, end in ends.items()
    }
    assert scheduler.num_free_pages == engine.shape.num_pages - 1
    slots = engine._slots
    assert bool(np.all(slots.finished))
    assert not np.any(slots.fresh)
    assert np.all(np.asarray(slots.length) == 1)
    return ends, scheduler


@pytest.fixture
def compilations() -> Iterator[list[str]]:
    """Names of what jax does to compile, as it happens."""
    events: list[str] = []

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        if "/compile/" in event:
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield events
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_tokens_are_those_of_plain_generation(models, plain, case, compilations) -> None:
    engine = make_engine(models, case)
    assert isinstance(engine, Engine)
    rng = np.random.default_rng(case.num_slots)
    preemptions = 0
    for spread in (0, 12):  # all at once; one by one, in another order
        order = rng.permutation(len(REQUESTS))
        arrivals = rng.integers(0, spread + 1, len(REQUESTS)).tolist()
        if spread:
            programs = len(EXECUTABLES)
            compilations.clear()
        requests = [REQUESTS[i] for i in order]
        ends, scheduler = serve(engine, case, requests, arrivals)
        for key, (tokens, reason) in enumerate(plain):
            assert (ends[key].token_ids, ends[key].reason) == (tokens, reason), key
        preemptions += scheduler.counters.preemptions
        drafts = sum(end.num_drafts for end in ends.values())
        accepted = sum(sum(end.accepted_per_position) for end in ends.values())
        if case.num_draft_tokens:
            assert 0.1 * drafts < accepted < case.num_draft_tokens * drafts
            # A step has confirmed 1 + accepted tokens, but for what was cut off at the end.
            assert drafts + accepted >= sum(len(e.token_ids) for e in ends.values()) - len(ends)
        else:
            assert drafts == 0
    assert (preemptions > 0) == (case.num_pages is not None)
    # Which parts of prompts come together depends on the arrivals, no program on anything else.
    new = len(EXECUTABLES) - programs
    assert new <= 2
    if not new:
        assert compilations == []


def test_step_costs_are_measured_before_the_first_sequence(
    models, plain, monkeypatch, tmp_path
) -> None:
    monkeypatch.setattr(step_costs, "cache_folder", lambda: tmp_path)
    case = CASES["chosen lengths, few pages"]
    engine = make_engine(models, case)
    engine.measure_step_costs(case.steps)
    costs = np.asarray(engine._slots.step_costs)
    assert costs.shape == (3,)
    assert (costs > 0).all()
    assert len(set(costs.tolist())) > 1
    np.testing.assert_array_equal(engine._slots.rates, np.full((4, 3), FIRST_RATE, np.float32))
    ends, _ = serve(engine, case, REQUESTS, [0] * len(REQUESTS))
    for key, (tokens, _) in enumerate(plain):
        assert ends[key].token_ids == tokens
    # Remembered: another engine of this shape measures nothing.
    other = make_engine(models, case)
    monkeypatch.setattr(other, "step", None)
    other.measure_step_costs(case.steps)
    np.testing.assert_array_equal(other._slots.step_costs, costs)


@pytest.mark.parametrize("worth_drafting", [True, False])
def test_tokens_are_the_same_where_drafts_do_not_pay(models, plain, worth_drafting) -> None:
    case = CASES["chosen lengths, few pages"]
    engine = make_engine(models, case)
    # One draft pays as long as more than half are accepted, and is too dear to be fed for.
    engine._set_step_costs(np.array([1.0, 1.5, 9.0], np.float32))
    engine.worth_drafting = worth_drafting
    kinds, step = [], engine.step

    def recorded(num_steps: int, tables: np.ndarray, *, drafts: bool = True) -> Any:
        kinds.append(drafts)
        return step(num_steps, tables, drafts=drafts)

    engine.step = recorded  # type: ignore[method-assign]
    ends, _ = serve(engine, case, REQUESTS, [0] * len(REQUESTS))
    for key, (tokens, reason) in enumerate(plain):
        assert (ends[key].token_ids, ends[key].reason) == (tokens, reason), key
    drafts = sum(end.num_drafts for end in ends.values())
    tokens = sum(len(end.token_ids) for end in ends.values())
    assert 0 < drafts < tokens / 2
    assert set(kinds) == {True, False}
    assert not engine.worth_drafting


def test_windows_and_sinks_and_experts_on_pages() -> None:
    from tests.decoding.test_families import GPT_OSS

    models = tiny.make(eos_token_ids=(21,), block=GPT_OSS, max_positions=CONTEXT)
    requests = REQUESTS[:10]
    case = Case("p-eagle", 3, 3, page_size=4, num_pages=30, prefill_tokens=16)
    ends, _ = serve(make_engine(models, case), case, requests, [0] * len(requests))
    for request, answer in zip(requests, expected_answers(models, requests, 64, 32), strict=True):
        end = ends[request.key]
        assert (end.token_ids, end.reason) == answer


def test_a_soak_leaks_nothing(models, compilations) -> None:
    requests = make_requests(5, 320, longest=12, most_new=12)
    case = Case("p-eagle", 3, 8, page_size=4, num_pages=21, prefill_tokens=32, steps=3)
    engine = make_engine(models, case, context=32)
    answers = expected_answers(models, requests, 16, 16)
    arrivals = np.random.default_rng(0).integers(0, 150, len(requests)).tolist()
    serve(engine, case, requests[:40], [0] * 40)
    compilations.clear()
    before = len(jax.live_arrays())
    ends, _ = serve(engine, case, requests, arrivals)
    assert [(ends[r.key].token_ids, ends[r.key].reason) for r in requests] == answers
    assert len(jax.live_arrays()) <= before
    assert compilations == []


def test_cancelled_slots_serve_others(models, plain) -> None:
    case = CASES["narrow, together"]
    engine = make_engine(models, case)
    scheduler = Scheduler(engine, Policy(case.steps, case.prefill_tokens))
    for request in REQUESTS:
        scheduler.submit(request)
    scheduler.visit()
    for key in (0, 2, 9):  # decoding, decoding, waiting
        assert scheduler.cancel(key) is not None
    ends = {}
    while not scheduler.idle:
        for update in scheduler.visit():
            if update.finished:
                ends[update.key] = update.finished.token_ids
    assert ends == {key: tokens for key, (tokens, _) in enumerate(plain) if key not in (0, 2, 9)}


def test_sizes_are_checked(models) -> None:
    speculator = models.speculator("p-eagle", 3)
    # 2 target layers and 1 of the drafter, keys and values of 8 float32.
    assert page_bytes(speculator, 4) == 4 * 3 * 2 * 8 * 4
    options: dict[str, Any] = {
        "num_slots": 4,
        "page_size": 4,
        "context": 40,
        "num_pages": None,
        "cache_bytes": 30 * 768,
    }
    assert make_shape(speculator, **options) == EngineShape(4, 31, 4, 40, 3, pending_rows=4)
    # A data group of two slots has no use for more than twice 13 pages.
    two = make_shape(speculator, **options, mesh=MeshShape(data=2))
    assert two == EngineShape(4, 27, 4, 40, 3, num_groups=2, pending_rows=4)
    # Slots cannot use more than 13 pages each: 40 + 3 * 3 + 1 positions.
    assert make_shape(speculator, **{**options, "cache_bytes": 1 << 30}).num_pages == 1 + 4 * 13
    assert make_shape(speculator, **{**options, "num_pages": 12}).num_pages == 13
    for changes, message in (
        ({"num_slots": 0}, "slots: found 0, expected 1 or more"),
        ({"mesh": MeshShape(data=3)}, "slots: found 4, expected a multiple of 3, the mesh's data"),
        ({"page_size": 0}, "page size: found 0, expected 1 or more"),
        ({"context": 57}, "context: found 57, expected at most 56, the target's"),
        ({"num_pages": 11}, "pages: found 11, expected at least 12, which one"),
        ({"cache_bytes": 9000}, "cache memory: found 9000 bytes, expected at least 9216, which"),
    ):
        with pytest.raises(InputError, match=message):
            make_shape(speculator, **{**options, **changes})
    with pytest.raises(InputError, match="context: found 57, expected at most 56"):
        PagedEngine(speculator, models.params("p-eagle"), EngineShape(1, 9, 4, 57, 3))
