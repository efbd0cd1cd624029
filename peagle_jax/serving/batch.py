"""A batch run: requests from lines through an engine into files, as fast as slots come free."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

from peagle_jax.batching import check_prompt
from peagle_jax.config import ModelConfig
from peagle_jax.errors import InputError
from peagle_jax.metrics import GenerationStats
from peagle_jax.serving.batch_report import BatchReport, Status, Tally
from peagle_jax.serving.engine_protocol import Engine
from peagle_jax.serving.id_set import IdSet
from peagle_jax.serving.input_order import InputOrder
from peagle_jax.serving.requests_file import BadLine, BatchRequest
from peagle_jax.serving.result_lines import Result, result_line
from peagle_jax.serving.scheduler import Policy, Scheduler
from peagle_jax.serving.sequence import Finished, Request
from peagle_jax.text import TextStream, encode_prompt

COMMIT_SECONDS = 1.0  # results are on the disk at most so long, and a visit, after they came


@runtime_checkable
class TimedEngine(Engine, Protocol):
    """An engine that says how long it compiled and how long it let the host wait."""

    compile_seconds: float
    wait_seconds: float


@runtime_checkable
class Results(Protocol):
    """Where results go: a ResultsFile, or what stands for one in a process that writes none."""

    @property
    def done(self) -> IdSet:
        """Keys of results that need not be computed."""

    def add(self, key: str, line: bytes) -> None:
        """Takes a result in."""

    def commit(self) -> None:
        """Puts all that were added on the disk."""


@runtime_checkable
class Errors(Protocol):
    """Where bad lines go: an ErrorsFile, or what stands for one."""

    @property
    def count(self) -> int:
        """Bad lines so far."""

    def add(self, bad: BadLine) -> None:
        """Takes one in."""


@dataclasses.dataclass
class _Answer:
    """A request that is being served, and its text so far."""

    request: BatchRequest
    text: TextStream

    def watch(self, new: Sequence[int]) -> int | None:
        """Takes tokens in; at a stop string, how many of the answer's stand."""
        self.text.push(new)
        return self.text.num_ids if self.text.stopped else None


class BatchRun:
    """Answers requests. What is in memory is bounded: the requests that are being served, as
    many again that wait, and in the order of the input the answers that came early."""

    def __init__(
        self,
        engine: TimedEngine,
        tokenizer: Any,
        model: ModelConfig,
        results: Results,
        errors: Errors,
        *,
        model_name: str,
        ordered: bool = False,
        raw: bool = False,
        policy: Policy | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Args:
        model_name: what lines in OpenAI's format name where a request names none.
        ordered: results in the order of the input; else as they come.
        raw: text goes to the model without the chat template where a request does not say.

        Raises InputError as `Scheduler` does.
        """
        self._engine, self._tokenizer, self._model = engine, tokenizer, model
        self._results, self._errors = results, errors
        self._model_name, self._raw, self._clock = model_name, raw, clock
        self._scheduler = Scheduler(engine, policy, clock)
        self._order = InputOrder(results.add) if ordered else None
        slots = engine.shape.num_slots
        self._most_waiting, self._most_expected = max(8, slots), 64 + 16 * slots
        self._answers: dict[str, _Answer] = {}
        self._tally = Tally(engine.shape.num_draft_tokens)
        self._before = len(results.done)

    def run(
        self,
        requests: Iterable[BatchRequest | BadLine],
        watch: Callable[[Status], None] | None = None,
    ) -> BatchReport:
        """Answers all requests whose results are not there yet; then every result is on the disk.

        A request that cannot be served is one more bad line. `watch` is called after each visit
        to the device.

        Raises OSError where the disk does not take results; those that were done are kept.
        """
        begin = committed = self._clock()
        compiled, waited = self._engine.compile_seconds, self._engine.wait_seconds

        def stats() -> GenerationStats:
            compiling = self._engine.compile_seconds - compiled
            return self._tally.stats(self._clock() - begin - compiling, compiling)

        rest = iter(requests)
        exhausted = False
        while True:
            exhausted = exhausted or self._feed(rest)
            if exhausted and self._scheduler.idle:
                break
            for update in self._scheduler.visit():
                if update.finished:
                    self._finish(update.finished)
            if self._clock() - committed >= COMMIT_SECONDS:
                self._results.commit()
                committed = self._clock()
            if watch:
                watch(self._status(stats(), self._engine.wait_seconds - waited))
        self._results.commit()
        return self._tally.report(
            stats(),
            self._scheduler.counters,
            self._errors.count,
            self._engine.wait_seconds - waited,
        )

    @property
    def _done(self) -> int:
        """Lines whose results are on the disk, or that have none."""
        new = len(self._results.done) - self._before
        return self._tally.skipped + new + self._errors.count

    def _status(self, stats: GenerationStats, wait_seconds: float) -> Status:
        scheduler, shape = self._scheduler, self._engine.shape
        pages = (shape.num_pages - 1) * shape.num_groups
        return Status(
            done=self._done,
            answered=self._tally.answered,
            skipped=self._tally.skipped,
            bad_lines=self._errors.count,
            prompt_tokens=self._tally.prompt_tokens,
            stats=stats,
            waiting=scheduler.num_waiting,
            running=scheduler.num_running,
            slots=shape.num_slots,
            used_pages=pages - scheduler.num_free_pages,
            pages=pages,
            counters=dataclasses.replace(scheduler.counters),
            wait_seconds=wait_seconds,
        )

    def _feed(self, rest: Iterator[BatchRequest | BadLine]) -> bool:
        """Takes requests in while there is room for them; whether there are no more."""
        while self._scheduler.num_waiting < self._most_waiting:
            if self._order and self._order.num_expected >= self._most_expected:
                return False
            item = next(rest, None)
            if item is None:
                return True
            if isinstance(item, BadLine):
                self._errors.add(item)
            elif item.key in self._results.done:
                self._tally.skipped += 1
            else:
                self._submit(item)
        return False

    def _submit(self, item: BatchRequest) -> None:
        try:
            raw = self._raw if item.raw is None else item.raw
            ids = encode_prompt(self._tokenizer, item.prompt, raw=raw, where=item.where)
            if item.params.stop and self._tokenizer is None:
                raise InputError(f"{item.where}: found stop strings, but no tokenizer is loaded")
            assert item.params.seed is not None
            answer = _Answer(item, TextStream(self._tokenizer, item.params.stop))
            request = Request(
                item.key,
                check_prompt(ids, self._model, item.where),
                item.params,
                item.params.seed,
            )
            self._scheduler.submit(request, answer.watch)
        except InputError as error:
            reason = str(error)
            for prefix in (f"{item.where}: ", f"request {item.key!r}: "):
                reason = reason.removeprefix(prefix)
            self._errors.add(BadLine(item.file, item.line, reason, item.id))
            return
        self._answers[item.key] = answer
        if self._order:
            self._order.expect(item.key)

    def _finish(self, end: Finished) -> None:
        self._tally.add(end)
        answer = self._answers.pop(str(end.key))
        answer.text.finish()
        result = Result(
            answer.request,
            answer.text.text,
            end.token_ids,
            end.prompt_tokens,
            end.reason,
            GenerationStats(
                tokens=len(end.token_ids),
                num_drafts=end.num_drafts,
                num_draft_tokens=end.num_draft_tokens,
                accepted_per_position=end.accepted_per_position,
                seconds=end.times.finished - end.times.started,
                compile_seconds=0.0,
            ),
        )
        line = result_line(result, model=self._model_name, created=int(time.time()))
        if self._order:
            self._order.add(answer.request.key, line)
        else:
            self._results.add(answer.request.key, line)
