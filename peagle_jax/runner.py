"""Runs a batch of requests: compiles once a size, then one call, or a visit every few steps."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Float, Int

from peagle_jax import step_costs
from peagle_jax.batching import Batch, Request, make_batches
from peagle_jax.channels import Part
from peagle_jax.config import DrafterConfig, ModelConfig
from peagle_jax.decoding import generate as decode
from peagle_jax.decoding.speculate import Speculator
from peagle_jax.decoding.state import DecodeState
from peagle_jax.metrics import GenerationStats
from peagle_jax.outlook import Outlook
from peagle_jax.text import TextStream

# Steps between two looks at the text when stop strings must be found on the host.
STEPS_A_VISIT = 4
# Of STEPS_A_VISIT steps each, when they are timed.
TIMED_VISITS = 2


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
    beginning = Beginning.of(pair, speculator, batch)
    run, compile_seconds = _whole_program(pair, beginning.speculator, batch)
    arrays = batch.arrays()
    begin = time.perf_counter()
    found = run(pair.params, *arrays, beginning.step_costs, beginning.rates)
    tokens, counts, stats = jax.device_get(found)
    seconds = time.perf_counter() - begin
    beginning.learn(stats.rates, counts)
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


@dataclasses.dataclass(frozen=True)
class Beginning:
    """How a batch is decoded.

    speculator: the one asked for, or plain decoding where it chooses its draft lengths and no
      draft is worth it.
    step_costs, rates: see `Speculator.init_state`; None where the length is fixed.
    """

    speculator: Speculator
    step_costs: Float[np.ndarray, "lengths"] | None = None
    rates: Float[np.ndarray, "rates"] | None = None
    outlook: Outlook | None = None

    @classmethod
    def of(cls, pair: Pair, speculator: Speculator, batch: Batch) -> Beginning:
        """By what steps cost here and what batches before this one have shown."""
        if not speculator.lengths:
            return cls(speculator)
        key = ("outlook", speculator)
        outlook: Outlook = pair.compiled.setdefault(key, Outlook(speculator))
        costs = _step_costs(pair, speculator, batch)
        rates = outlook.of_next(costs)
        if rates is None:
            return cls(speculator.without_drafts, outlook=outlook)
        return cls(speculator, costs, rates, outlook)

    def learn(
        self, rates: Float[np.ndarray, "batch rates"], counts: Int[np.ndarray, "batch"]
    ) -> None:
        """What became of the batch: the rates of its sequences, and their tokens."""
        if self.outlook is None:
            return
        if self.rates is None:
            self.outlook.without_drafts(int(counts.max()))
        else:
            self.outlook.learn(rates)


def _whole_program(pair: Pair, speculator: Speculator, batch: Batch) -> tuple[Any, float]:
    """The program of a batch's whole answers, and the seconds that compiling took."""
    return compiled(
        pair.compiled,
        ("whole", speculator, batch.rows, batch.prompt_size, batch.max_new_tokens),
        lambda: decode.jit_generate_tokens.lower(
            pair.params,
            *batch.arrays(),
            np.ones(len(speculator.lengths), np.float32) if speculator.lengths else None,
            np.ones(speculator.num_draft_tokens, np.float32) if speculator.lengths else None,
            speculator=speculator,
            max_new_tokens=batch.max_new_tokens,
        ),
    )


def _step_costs(pair: Pair, speculator: Speculator, batch: Batch) -> Float[np.ndarray, "lengths"]:
    """What steps of each draft length cost with so many rows and prompts of this size.

    Measured where they are not known yet, on sequences as long as this batch's. An answer's size
    makes caches larger, but hardly the longer steps dearer than the shorter, and ratios are what
    counts.
    """
    key = ("step costs", speculator, batch.rows, batch.prompt_size)
    if key in pair.compiled:
        return pair.compiled[key]

    def measured() -> Float[np.ndarray, "lengths"]:
        _, lengths, table = batch.arrays()
        table = dataclasses.replace(
            table,
            max_new_tokens=jax.numpy.full(batch.rows, batch.max_new_tokens, np.int32),
            ignore_eos=jax.numpy.ones(batch.rows, bool),
        )

        def begun(costs: Any) -> DecodeState:
            """As if the prompts, of zeros, had been prefilled."""
            sizes = (batch.rows, batch.prompt_size, batch.max_new_tokens)
            state = speculator.init_state(*sizes, costs)
            return dataclasses.replace(state, length=lengths, pending_count=state.pending_count + 1)

        first = step_costs.forced(speculator.lengths, 0)
        shapes = jax.eval_shape(begun, first)
        advance, _ = _advance_program(pair, speculator, batch, STEPS_A_VISIT, shapes)
        begin_state = jax.jit(begun)

        def seconds_of(costs: Any) -> float:
            # The first visit touches what the others find touched.
            state = advance(pair.params, begin_state(costs), table, lengths)
            before = jax.device_get(state.num_drafts).max()
            begin = time.perf_counter()
            for _ in range(TIMED_VISITS):
                state = advance(pair.params, state, table, lengths)
            drafts = jax.device_get(state.num_drafts).max() - before
            seconds = time.perf_counter() - begin
            # Answers of many drafts may end early; without drafts a step is a token.
            return seconds / (drafts or TIMED_VISITS * STEPS_A_VISIT)

        return step_costs.measure(speculator.lengths, seconds_of)

    pair.compiled[key] = step_costs.remembered(key, speculator.lengths, measured)
    return pair.compiled[key]


def _advance_program(
    pair: Pair, speculator: Speculator, batch: Batch, num_steps: int, state: DecodeState
) -> tuple[Any, float]:
    """The program of at most `num_steps` steps, and the seconds that compiling took; state: its
    shapes."""
    _, lengths, table = batch.arrays()
    return compiled(
        pair.compiled,
        ("advance", speculator, num_steps, batch.rows, batch.prompt_size, batch.max_new_tokens),
        lambda: decode.jit_advance.lower(
            pair.params,
            state,
            table,
            lengths,
            speculator=speculator,
            max_new_tokens=batch.max_new_tokens,
            num_steps=num_steps,
        ),
    )


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
    beginning = Beginning.of(pair, speculator, batch)
    speculator = beginning.speculator
    static = {"speculator": speculator, "max_new_tokens": batch.max_new_tokens}
    args = (pair.params, prompts, lengths, table, beginning.step_costs, beginning.rates)
    prefill, prefill_seconds = compiled(
        pair.compiled,
        ("prefill", speculator, *sizes),
        lambda: decode.jit_prefill.lower(*args, **static),
    )
    begin = time.perf_counter()
    state: DecodeState = prefill(*args)
    # Behind the first visit: prefill's token need not wait for the steps' program.
    pool = concurrent.futures.ThreadPoolExecutor(1)
    compiling = pool.submit(
        _advance_program, pair, speculator, batch, num_steps, jax.eval_shape(lambda: state)
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
            beginning.learn(counters.rates, emitted)
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
