"""This package's decoding, timed: whole answers, and a step's parts as programs of their own."""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from peagle_jax import api, runner
from peagle_jax.batching import Batch, Request, make_batches
from peagle_jax.bench.cases import Case, Parts, Run
from peagle_jax.decoding import generate as decode
from peagle_jax.decoding import sampling
from peagle_jax.decoding.sampling import RequestArrays
from peagle_jax.decoding.speculate import Speculator
from peagle_jax.decoding.state import DecodeState, Params
from peagle_jax.errors import InputError
from peagle_jax.metrics import GenerationStats
from peagle_jax.runner import Pair

# Linux gives a process so many memory maps; XLA's CPU compiler takes hundreds for a program of many
# layers, and ends the process where there is none left.
_MAPS, _MOST_MAPS = Path("/proc/self/maps"), Path("/proc/sys/vm/max_map_count")
_MAPS_SHARE = 0.8
# Calls of a part whose median counts.
PART_CALLS = 15


def check_memory_maps(case: str) -> None:
    """Raises InputError where most of this process's memory maps are taken."""
    if not (_MAPS.exists() and _MOST_MAPS.exists()):
        return
    taken, most = _MAPS.read_bytes().count(b"\n"), int(_MOST_MAPS.read_text())
    if taken > _MAPS_SHARE * most:
        raise InputError(
            f"bench: found {taken} of a process's {most} memory maps taken before {case}, expected "
            "room for its programs: ask for fewer cases, or for prompts of fewer sizes"
        )


class OwnEngine:
    """Decodes with a pair; what is compiled stays in the pair."""

    def __init__(self, pairs: dict[str, Pair], requests: Sequence[Request]) -> None:
        """pairs: a pair for each method; those that share a target may share its arrays."""
        self._pairs, self._requests = pairs, requests

    def prepare(self, case: Case) -> float:
        """Compiles what the case needs and decodes one batch of each size as a warm-up; the
        seconds that compiling took. Raises InputError where the process has no room for more
        programs."""
        check_memory_maps(case.name)
        pair, speculator = speculator_of(self._pairs, case)
        seconds, seen = 0.0, set()
        for batch in make_batches(self._requests, case.batch):
            sizes = (batch.rows, batch.prompt_size, batch.max_new_tokens)
            if sizes in seen:
                continue
            seen.add(sizes)
            # Where no draft is worth it batches are decoded without a drafter.
            begins = [speculator, *([speculator.without_drafts] if speculator.lengths else [])]
            for begun in begins:
                outputs = runner.run_whole(pair, begun, batch)
                seconds += outputs[0].stats.compile_seconds
                seconds += self._prefill(pair, begun, batch)[1]
                self._prefill_time(pair, begun, batch)
        return seconds

    def run(self, case: Case) -> Run:
        """All prompts once."""
        pair, speculator = speculator_of(self._pairs, case)
        answers: dict[int, list[int]] = {}
        seconds = prefill_seconds = 0.0
        drafts = steps = 0
        accepted = np.zeros(speculator.num_draft_tokens, np.int64)
        for batch in make_batches(self._requests, case.batch):
            outputs = runner.run_whole(pair, speculator, batch)
            seconds += outputs[0].stats.seconds
            begun = speculator
            if speculator.lengths and not any(output.stats.num_drafts for output in outputs):
                begun = speculator.without_drafts
            prefill_seconds += self._prefill_time(pair, begun, batch)
            # The loop goes on until the last row is finished.
            steps += max(_steps(speculator, output.stats) for output in outputs)
            for request, output in zip(batch.requests, outputs, strict=True):
                answers[request.index] = output.token_ids
                drafts += output.stats.num_drafts
                if output.stats.num_drafts:
                    accepted += np.asarray(output.stats.accepted_per_position, np.int64)
        return Run(
            [answers[request.index] for request in self._requests],
            seconds,
            drafts,
            tuple(int(count) for count in accepted),
            steps,
            prefill_seconds,
        )

    def parts(self, case: Case) -> Parts | None:
        """A step's draft and verification, each a program of its own on the state after prefill
        of a batch of middling size; None where steps differ in length."""
        pair, speculator = speculator_of(self._pairs, case)
        if speculator.lengths:
            return None
        batches = sorted(make_batches(self._requests, case.batch), key=lambda b: b.prompt_size)
        batch = batches[len(batches) // 2]
        program, _ = self._prefill(pair, speculator, batch)
        prompts, lengths, table = batch.arrays()

        def timed(part: Callable[..., DecodeState]) -> float:
            state = program(pair.params, prompts, lengths, table)
            # Donated, as the loop's own state is: otherwise every call would copy the caches.
            once = jax.jit(functools.partial(part, speculator), donate_argnums=1)
            state = jax.block_until_ready(once(pair.params, state, table))
            seconds = []
            for _ in range(PART_CALLS):
                begin = time.perf_counter()
                state = jax.block_until_ready(once(pair.params, state, table))
                seconds.append(time.perf_counter() - begin)
            return 1e3 * statistics.median(seconds)

        return Parts(timed(draft_once) if speculator.drafts else 0.0, timed(verify_once))

    def _prefill(self, pair: Pair, speculator: Speculator, batch: Batch) -> tuple[Any, float]:
        prompts, lengths, table = batch.arrays()
        sizes = (batch.rows, batch.prompt_size, batch.max_new_tokens)
        return runner.compiled(
            pair.compiled,
            ("prefill", speculator, *sizes),
            lambda: decode.jit_prefill.lower(
                pair.params,
                prompts,
                lengths,
                table,
                speculator=speculator,
                max_new_tokens=batch.max_new_tokens,
            ),
        )

    def _prefill_time(self, pair: Pair, speculator: Speculator, batch: Batch) -> float:
        program, _ = self._prefill(pair, speculator, batch)
        arrays = jax.block_until_ready(batch.arrays())
        begin = time.perf_counter()
        jax.block_until_ready(program(pair.params, *arrays))
        return time.perf_counter() - begin


def speculator_of(pairs: Mapping[str, Pair], case: Case) -> tuple[Pair, Speculator]:
    """The pair that a case decodes with, and how."""
    pair = pairs[case.method]
    if case.method == "none":
        return pair, api.make_speculator(pair, "none")
    method: Any = case.method
    k: Any = case.num_draft_tokens
    return pair, api.make_speculator(pair, method, k)


def _steps(speculator: Speculator, stats: GenerationStats) -> int:
    """Steps of an answer. Where some draft nothing they are not counted, but each yields a token
    besides those that were accepted; what was cut off at the end is not told."""
    if speculator.drafts and not speculator.lengths:
        return stats.num_drafts
    return stats.tokens - 1 - stats.num_accepted


def draft_once(
    speculator: Speculator, params: Params, state: DecodeState, requests: RequestArrays
) -> DecodeState:
    """The drafting of a step; the drafts become the state's newest tokens, to keep them alive."""
    drawn = _draws(speculator, state, requests)
    k = speculator.num_draft_tokens
    drafted = speculator.draft(params, state, requests, drawn.rows(slice(k)), k)
    return dataclasses.replace(state, draft_cache=drafted.cache, last_token=drafted.tokens[:, -1])


def verify_once(
    speculator: Speculator, params: Params, state: DecodeState, requests: RequestArrays
) -> DecodeState:
    """The target's pass over K+1 rows and its choices."""
    rows = speculator.num_draft_tokens + 1
    tokens = jnp.broadcast_to(state.last_token[:, None], (state.last_token.shape[0], rows))
    out = speculator.networks(params).of_target(
        tokens, state.length, state.target_cache, speculator.aux_layer_ids
    )
    choices = speculator.choose(params, out.hidden, requests, _draws(speculator, state, requests))
    width = state.pending_features.shape[-1]
    return dataclasses.replace(
        state,
        target_cache=out.cache,
        last_token=choices[:, -1],
        # As wide as it was: another shape would be traced again.
        pending_features=state.pending_features.at[:, :rows].set(out.features[..., :width]),
    )


def _draws(speculator: Speculator, state: DecodeState, requests: RequestArrays) -> sampling.Draws:
    positions = state.length[:, None] + 1 + jnp.arange(speculator.num_draft_tokens + 1)
    return sampling.draws(requests, positions, speculator.target.vocab_size)
