"""Continuous batching, timed: the engine of `peagle batch`, fed all prompts at once."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from peagle_jax.batching import Request
from peagle_jax.bench.cases import Case, Parts, Run
from peagle_jax.bench.own import check_memory_maps, speculator_of
from peagle_jax.runner import Pair
from peagle_jax.serving import sequence
from peagle_jax.serving.engine import BackendSizes, PagedEngine, make_shape
from peagle_jax.serving.scheduler import Policy, Scheduler
from peagle_jax.serving.sequence import Finished


class BatchingEngine:
    """As many slots as a case's batch; a sequence that ends makes room for the next prompt."""

    def __init__(self, pairs: dict[str, Pair], requests: Sequence[Request]) -> None:
        """Args as `own.OwnEngine` has them."""
        self._pairs, self._requests = pairs, requests
        self._policy = Policy(steps_a_visit=BackendSizes.here().steps_a_visit)

    def prepare(self, case: Case) -> float:
        """Measures the costs of steps where their length is chosen, and answers all prompts once:
        which parts of prompts come together decides what is compiled."""
        check_memory_maps(case.name)
        engine = self._engine(case)
        engine.measure_step_costs(self._policy.steps_a_visit)
        self._answer(engine)
        return engine.compile_seconds

    def run(self, case: Case) -> Run:
        """All prompts once, from the first request taken in to the last token."""
        engine = self._engine(case)
        engine.measure_step_costs(self._policy.steps_a_visit)
        begin = time.perf_counter()
        ends, steps = self._answer(engine)
        seconds = time.perf_counter() - begin
        answers = [ends[request.index] for request in self._requests]
        accepted = np.asarray([end.accepted_per_position for end in answers], np.int64)
        return Run(
            [end.token_ids for end in answers],
            seconds,
            sum(end.num_drafts for end in answers),
            tuple(accepted.sum(axis=0).tolist()),
            steps,
        )

    def parts(self, case: Case) -> Parts | None:
        """None: prefills and steps of many sequences take turns."""
        del case
        return None

    def _engine(self, case: Case) -> PagedEngine:
        pair, speculator = speculator_of(self._pairs, case)
        longest = max(len(one.token_ids) + one.params.max_new_tokens for one in self._requests)
        shape = make_shape(
            speculator,
            num_slots=case.batch,
            page_size=BackendSizes.here().page_size,
            context=min(longest, speculator.target.max_positions),
            num_pages=None,
            cache_bytes=2**62,  # all slots can be full
        )
        return PagedEngine(speculator, pair.params, shape, executables=pair.compiled)

    def _answer(self, engine: PagedEngine) -> tuple[dict[int, Finished], int]:
        """Ends by the requests' indices, and how many steps were taken."""
        scheduler = Scheduler(engine, self._policy)
        for one in self._requests:
            scheduler.submit(sequence.Request(one.index, one.token_ids, one.params, seed=0))
        ends: dict[int, Finished] = {}
        while not scheduler.idle:
            for update in scheduler.visit():
                if update.finished is not None:
                    assert isinstance(update.key, int)
                    ends[update.key] = update.finished
        return ends, scheduler.counters.steps
