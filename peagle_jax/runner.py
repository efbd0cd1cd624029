"""Runs a batch of requests: compiles once a size, then one call, or a visit every few steps."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Float

from peagle_jax import step_costs
from peagle_jax.batching import Batch, Request, make_batches
from peagle_jax.channels import Part
from peagle_jax.config import DrafterConfig, ModelConfig
from peagle_jax.decoding import generate as decode
from peagle_jax.decoding.speculate import Speculator
from peagle_jax.decoding.state import DecodeState
from peagle_jax.metrics import GenerationStats
from peagle_jax.text import TextStream

# Steps between two looks at the text when stop strings must be found on the host.
STEPS_A_VISIT = 4
# Of an answer whose steps are timed, the first of which prefill gives.
TIMED_TOKENS = 24


@dataclasses.dataclass
class Pair:
    """A target, perhaps a drafter, a tokenizer, and what was compiled for them.

    params: {"target": tree, "drafter": tree}.
    """

    target: ModelConfig
    drafter: DrafterConfig | None
    params: dict[str, Any]
    tokenizer: Any
    dtype: str
    compiled: dict[Any, Any] = dataclasses.field(default_factory=dict, repr=False)


@dataclasses.dataclass(frozen=True)
class Output:
    """One request's answer.

    finish_reason: "stop" (end of sequence or a stop string) or "length" (max_new_tokens or the
      end of the context).
    parts: the messages of an answer in channels, as gpt-oss writes them; else none.
    """

    text: str
    token_ids: list[int]
    prompt_tokens: int
    finish_reason: str
    stats: GenerationStats
    parts: tuple[Part, ...] = ()


def run_requests(
    pair: Pair,
    speculator: Speculator,
    requests: Sequence[Request],
    batch_size: int,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[list[Output], GenerationStats]:
    """Answers in the order of `requests`, and their total, in which each batch's time is
    counted once. `progress` is called with (done, total) after each batch."""
    order: list[int] = []
    outputs: list[Output] = []
    seconds = compile_seconds = 0.0
    places = {request.index: place for place, request in enumerate(requests)}
    for batch in make_batches(requests, batch_size):
        stops = any(r.params.stop for r in batch.requests)
        answers = (run_in_visits if stops else run_whole)(pair, speculator, batch)
        seconds += answers[0].stats.seconds
        compile_seconds += answers[0].stats.compile_seconds
        order += [places[request.index] for request in batch.requests]
        outputs += answers
        if progress:
            progress(len(outputs), len(requests))
    outputs = [outputs[i] for i in np.argsort(order)]
    return outputs, GenerationStats.total((o.stats for o in outputs), seconds, compile_seconds)


def run_whole(pair: Pair, speculator: Speculator, batch: Batch) -> list[Output]:
    """One compiled call for the whole batch."""
    run, compile_seconds = _whole_program(pair, speculator, batch)
    costs = _step_costs(pair, speculator, batch)
    arrays = batch.arrays()
    begin = time.perf_counter()
    tokens, counts, stats = jax.device_get(run(pair.params, *arrays, costs))
    seconds = time.perf_counter() - begin
    outputs = []
    for row, request in enumerate(batch.requests):
        ids = tokens[row, : counts[row]].tolist()
        text = TextStream(pair.tokenizer)
        text.push(ids)
        text.finish()
        reason = "stop" if stats.hit_eos[row] else "length"
        outputs.append(
            Output(
                text.text,
                ids,
                len(request.token_ids),
                reason,
                _stats(len(ids), stats, row, seconds, compile_seconds),
                text.parts,
            )
        )
    return outputs


def _whole_program(pair: Pair, speculator: Speculator, batch: Batch) -> tuple[Any, float]:
    """The program of a batch's whole answers, and the seconds that compiling took."""
    return compiled(
        pair.compiled,
        ("whole", speculator, batch.rows, batch.prompt_size, batch.max_new_tokens),
        lambda: decode.jit_generate_tokens.lower(
            pair.params,
            *batch.arrays(),
            np.ones(len(speculator.lengths), np.float32) if speculator.lengths else None,
            speculator=speculator,
            max_new_tokens=batch.max_new_tokens,
        ),
    )


def _step_costs(
    pair: Pair, speculator: Speculator, batch: Batch
) -> Float[np.ndarray, "lengths"] | None:
    """What steps of each draft length cost with so many rows, None where the length is fixed.

    Measured on this batch's own program where they are not known yet. Context makes steps
    dearer, but hardly the longer ones more than the shorter, and ratios are what counts.
    """
    if not speculator.lengths:
        return None
    key = ("step costs", speculator, batch.rows)
    if key not in pair.compiled:

        def measured() -> Float[np.ndarray, "lengths"]:
            run, _ = _whole_program(pair, speculator, batch)
            prompts, lengths, table = batch.arrays()

            def generate(costs: Any, tokens: int) -> tuple[float, int]:
                limited = dataclasses.replace(
                    table,
                    max_new_tokens=jax.numpy.full(batch.rows, tokens, np.int32),
                    ignore_eos=jax.numpy.ones(batch.rows, bool),
                )
                begin = time.perf_counter()
                found = run(pair.params, prompts, lengths, limited, costs)
                _, counts, stats = jax.device_get(found)
                seconds = time.perf_counter() - begin
                # Without drafts a step is a token; a context may have room for few of them.
                steps = stats.num_drafts.max() or counts.max() - 1
                return seconds, max(1, int(steps))

            def seconds_of(costs: Any) -> float:
                # Prefill and what else is done once cancel out.
                (once, _), (whole, steps) = generate(costs, 1), generate(costs, TIMED_TOKENS)
                return (whole - once) / steps

            return step_costs.measure(speculator.lengths, seconds_of)

        pair.compiled[key] = step_costs.remembered(key, measured)
    return pair.compiled[key]


@dataclasses.dataclass
class Visit:
    """What the host sees between steps: the text so far, and counters."""

    batch: Batch
    speculator: Speculator
    streams: list[TextStream]
    counters: decode.TokenStats
    token_ids: list[list[int]]
    over: bool
    seconds: float
    compile_seconds: float

    def outputs(self) -> list[Output]:
        """The answers as they stand; complete when `over`."""
        outputs = []
        for row, request in enumerate(self.batch.requests):
            stream, ids = self.streams[row], self.token_ids[row]
            if stream.stopped:
                ids = ids[: stream.num_ids]
            reason = "stop" if stream.stopped or self.counters.hit_eos[row] else "length"
            stats = _stats(
                len(ids),
                self.counters,
                row,
                self.seconds,
                self.compile_seconds,
            )
            outputs.append(
                Output(stream.text, ids, len(request.token_ids), reason, stats, stream.parts)
            )
        return outputs


def run_in_visits(pair: Pair, speculator: Speculator, batch: Batch) -> list[Output]:
    """Like `run_whole`, looking at the text between steps so that stop strings end a row."""
    for visit in visits(pair, speculator, batch, num_steps=STEPS_A_VISIT):
        last = visit
    return last.outputs()


def visits(pair: Pair, speculator: Speculator, batch: Batch, *, num_steps: int) -> Iterator[Visit]:
    """Prefill, then `num_steps` speculative steps between any two visits."""
    prompts, lengths, table = batch.arrays()
    sizes = (batch.rows, batch.prompt_size, batch.max_new_tokens)
    static = {"speculator": speculator, "max_new_tokens": batch.max_new_tokens}
    costs = _step_costs(pair, speculator, batch)
    prefill, prefill_seconds = compiled(
        pair.compiled,
        ("prefill", speculator, *sizes),
        lambda: decode.jit_prefill.lower(pair.params, prompts, lengths, table, costs, **static),
    )
    begin = time.perf_counter()
    state: DecodeState = prefill(pair.params, prompts, lengths, table, costs)
    state_shapes = jax.eval_shape(lambda: state)
    # Behind the first visit: prefill's token need not wait for the steps' program.
    pool = concurrent.futures.ThreadPoolExecutor(1)
    compiling = pool.submit(
        compiled,
        pair.compiled,
        ("advance", speculator, num_steps, *sizes),
        lambda: decode.jit_advance.lower(
            pair.params, state_shapes, table, lengths, num_steps=num_steps, **static
        ),
    )
    pool.shutdown(wait=False)
    compile_seconds = prefill_seconds
    streams = [TextStream(pair.tokenizer, r.params.stop) for r in batch.requests]
    seen = [0] * len(streams)
    advance = None
    while True:
        output, emitted, finished, counters = jax.device_get(
            (
                state.output,
                state.emitted,
                state.finished,
                decode.TokenStats.of(state),
            )
        )
        over = np.array(finished)
        for row, stream in enumerate(streams):
            stream.push(output[row, seen[row] : emitted[row]].tolist())
            seen[row] = int(emitted[row])
            if finished[row]:
                stream.finish()
            over[row] |= stream.stopped
        yield Visit(
            batch,
            speculator,
            streams,
            counters,
            [output[row, : emitted[row]].tolist() for row in range(len(streams))],
            bool(over.all()),
            time.perf_counter() - begin,
            compile_seconds,
        )
        if over.all():
            return
        if advance is None:
            waiting = time.perf_counter()
            advance, seconds = compiling.result()
            compile_seconds += seconds
            begin += time.perf_counter() - waiting
        if (over != finished).any():
            state = dataclasses.replace(state, finished=jax.numpy.asarray(over))
        state = advance(pair.params, state, table, lengths)


def compiled(programs: dict[Any, Any], key: Any, lower: Callable[[], Any]) -> tuple[Any, float]:
    """The executable for `key` and the seconds it took to get it now (0 when it was there)."""
    if key in programs:
        return programs[key], 0.0
    begin = time.perf_counter()
    programs[key] = lower().compile()
    return programs[key], time.perf_counter() - begin


def _stats(
    tokens: int,
    counters: decode.TokenStats,
    row: int,
    seconds: float,
    compile_seconds: float,
) -> GenerationStats:
    return GenerationStats(
        tokens=tokens,
        num_drafts=int(counters.num_drafts[row]),
        num_draft_tokens=int(counters.num_draft_tokens[row]),
        accepted_per_position=tuple(int(a) for a in counters.accepted_per_position[row]),
        seconds=seconds,
        compile_seconds=compile_seconds,
    )
