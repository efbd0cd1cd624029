"""The training loop: steps, metrics, evaluations, checkpoints, and every way in which it ends."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from peagle_jax.convert.sources import RUN_BEST, RUN_FINAL
from peagle_jax.errors import InputError
from peagle_jax.sharding import make_mesh
from peagle_jax.training.batch import PackedBatch
from peagle_jax.training.checkpoints import Checkpoints
from peagle_jax.training.metrics_log import MetricsLog
from peagle_jax.training.optimizer import learning_rate, make_optimizer
from peagle_jax.training.params import Params
from peagle_jax.training.prefetch import Prefetch
from peagle_jax.training.step import Problem, StepMetrics, Stepper, TrainState
from peagle_jax.training.train_config import TrainConfig

CHECKPOINTS = "checkpoints"
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class TrainingStopped(Exception):
    """Training cannot go on. The message is one line: step, cause, last good checkpoint."""


@runtime_checkable
class Batches(Protocol):
    """A stream of batches, as many as there are steps at least, that can be continued elsewhere."""

    def __next__(self) -> PackedBatch:
        """A batch, its arrays on the host."""

    def get_state(self) -> dict[str, Any]:
        """JSON values from which `set_state` continues after the last batch given out."""

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues where another such stream was."""


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Acceptance of decoded drafts: mean length, and the share accepted at each position."""

    acceptance_length: float
    per_position: tuple[float, ...]
    seconds: float


@dataclasses.dataclass(frozen=True)
class Hooks:
    """What the loop calls outside of itself.

    export: writes the drafter of some trained parameters into a folder.
    documents: the names of those in a batch, by its number from 0.
    evaluate: decodes with them; None = there is no evaluation.
    progress: called with (steps done, steps in all).
    """

    export: Callable[[Params, Path], None]
    documents: Callable[[int], Sequence[str]]
    evaluate: Callable[[Params], Evaluation] | None = None
    progress: Callable[[int, int], None] | None = None


@dataclasses.dataclass
class Summary:
    """How a run ended. seconds and tokens_per_second are of training alone, in this process.

    best: {"step", "acceptance_length"} of the best evaluation; None without one.
    signal: the number of the one that ended it early.
    """

    step: int
    steps: int
    loss: float | None = None
    accuracy_per_depth: list[float] = dataclasses.field(default_factory=list)
    best: dict[str, Any] | None = None
    seconds: float = 0.0
    tokens: int = 0
    signal: int | None = None

    @property
    def tokens_per_second(self) -> float:
        """Tokens trained on, padding left out, over `seconds`."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


@dataclasses.dataclass(frozen=True)
class _Prepared:
    """A batch in its place; `after`: the state of the stream once it was taken."""

    batch: PackedBatch
    after: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class _Dispatched:
    """A step that the device may still be working on."""

    step: int
    metrics: StepMetrics
    learning_rate: float
    waited: float


def train(
    problem: Problem, config: TrainConfig, folder: Path, batches: Batches, hooks: Hooks
) -> Summary:
    """Trains to `config.train.steps`, from the newest checkpoint in `folder` if there is one.

    The same problem, configuration and batches give the same run, whether it was interrupted
    or not: step s draws from (seed, s), and a checkpoint holds where the batches were.
    SIGTERM and SIGINT save a checkpoint and end it; `Summary.signal` then says which.

    Raises TrainingStopped on a loss that is not finite, CheckpointError on a checkpoint that
    cannot be saved, InputError on a mesh that does not fit.
    """
    assert config.train.steps is not None
    mesh = make_mesh(config.mesh.data, config.mesh.fsdp)
    if config.data.batch % mesh.size:
        raise InputError(
            f"data.batch: found {config.data.batch}, expected a multiple of {mesh.size}, the "
            "devices of the mesh"
        )
    steps = config.train.steps
    stepper = Stepper(problem, make_optimizer(config.optimizer), mesh, config.train.seed)
    with contextlib.ExitStack() as stack:
        checkpoints = stack.enter_context(Checkpoints(folder / CHECKPOINTS, config.checkpoint.keep))
        state = stepper.init(problem.trained)
        latest = checkpoints.latest()
        summary = Summary(step=latest or 0, steps=steps)
        if latest is not None:
            restored = checkpoints.restore(latest, state)
            state = restored.state
            batches.set_state(restored.progress["data"])
            summary.best = restored.progress["best"]
        log = stack.enter_context(
            MetricsLog(folder, summary.step, tensorboard=config.train.tensorboard)
        )
        caught = stack.enter_context(_caught_signals())
        loop = _Loop(config, folder, stepper, checkpoints, log, hooks, summary, caught)
        state = loop.run(state, batches)
        checkpoints.wait()
        hooks.export(state.params, folder / RUN_FINAL)
    return summary


class _Loop:
    """The state of the loop between its steps."""

    def __init__(
        self,
        config: TrainConfig,
        folder: Path,
        stepper: Stepper,
        checkpoints: Checkpoints,
        log: MetricsLog,
        hooks: Hooks,
        summary: Summary,
        caught: list[int],
    ) -> None:
        self._config = config
        self._folder = folder
        self._stepper = stepper
        self._checkpoints = checkpoints
        self._log = log
        self._hooks = hooks
        self._summary = summary
        self._caught = caught
        self._clock = time.perf_counter()

    def run(self, state: TrainState, batches: Batches) -> TrainState:
        """Steps until the last one, or a signal."""
        summary, steps = self._summary, self._summary.steps
        if summary.step >= steps:
            return state

        def prepare() -> _Prepared:
            batch = next(batches)
            return _Prepared(self._stepper.place(batch), batches.get_state())

        with Prefetch(prepare) as prepared:
            self._clock = time.perf_counter()
            before: _Dispatched | None = None
            while summary.step < steps and summary.signal is None:
                begin = time.perf_counter()
                item = next(prepared)
                waited = time.perf_counter() - begin
                rate = learning_rate(self._config.optimizer, summary.step, steps)
                state, metrics = self._stepper(state, item.batch, rate)
                summary.step += 1
                # The step before is looked at while the device works on this one.
                self._finish(before)
                before = _Dispatched(summary.step, metrics, rate, waited)
                if self._pauses():
                    self._finish(before)
                    before = None
                    self._pause(state, item.after)
            self._finish(before)
        return state

    def _at(self, every: int | None) -> bool:
        last = self._summary.step == self._summary.steps
        return every is not None and (last or self._summary.step % every == 0)

    def _pauses(self) -> bool:
        config = self._config
        return (
            bool(self._caught) or self._at(config.checkpoint.every) or self._at(config.eval.every)
        )

    def _pause(self, state: TrainState, after: dict[str, Any]) -> None:
        """Evaluation and checkpoint. A checkpoint comes last: what it counts on is on disk."""
        summary = self._summary
        if self._caught:
            summary.signal = self._caught[0]
        length = None
        if self._at(self._config.eval.every) and self._hooks.evaluate and not self._caught:
            found = self._hooks.evaluate(state.params)
            length = found.acceptance_length
            self._log.write("evaluation", summary.step, _jsonable(found))
            if summary.best is None or length > summary.best["acceptance_length"]:
                self._hooks.export(state.params, self._folder / RUN_BEST)
                summary.best = {"step": summary.step, "acceptance_length": length}
        self._log.sync()
        self._checkpoints.save(
            summary.step, state, {"data": after, "best": summary.best}, acceptance_length=length
        )
        if self._caught:
            self._checkpoints.wait()
        self._clock = time.perf_counter()  # the time of training goes on from here

    def _finish(self, dispatched: _Dispatched | None) -> None:
        """Waits for a step; checks and logs it."""
        if dispatched is None:
            return
        metrics: StepMetrics = jax.device_get(dispatched.metrics)
        now = time.perf_counter()
        seconds, self._clock = now - self._clock, now
        if not (math.isfinite(metrics.loss) and math.isfinite(metrics.grad_norm)):
            raise self._not_finite(dispatched, metrics)
        summary, sums = self._summary, metrics.sums
        summary.loss = float(metrics.loss)
        summary.accuracy_per_depth = _ratios(sums.correct, sums.count)
        summary.seconds += seconds
        summary.tokens += int(metrics.tokens)
        if dispatched.step % self._config.train.log_every == 0:
            self._log.write(
                "step",
                dispatched.step,
                {
                    "loss": summary.loss,
                    "loss_per_depth": _ratios(sums.loss, sums.weight),
                    "accuracy_per_depth": summary.accuracy_per_depth,
                    "elements_per_depth": sums.count.tolist(),
                    "learning_rate": dispatched.learning_rate,
                    "grad_norm": float(metrics.grad_norm),
                    "tokens": int(metrics.tokens),
                    "answer_tokens": int(metrics.answer_tokens),
                    "tokens_per_second": int(metrics.tokens) / seconds,
                    "step_seconds": seconds,
                    "data_seconds": dispatched.waited,
                },
            )
        if self._hooks.progress is not None:
            self._hooks.progress(dispatched.step, summary.steps)

    def _not_finite(self, dispatched: _Dispatched, metrics: StepMetrics) -> TrainingStopped:
        with contextlib.suppress(Exception):  # a failed save is not what ends this run
            self._checkpoints.wait()
        latest = self._checkpoints.latest()
        good = "none" if latest is None else f"step {latest} in {self._checkpoints.folder}"
        documents = ", ".join(self._hooks.documents(dispatched.step - 1))
        return TrainingStopped(
            f"step {dispatched.step}: found loss {metrics.loss}, gradient norm "
            f"{metrics.grad_norm}, expected finite numbers; the batch held {documents}; "
            f"the last good checkpoint is {good}"
        )


def _ratios(sums: Any, counts: Any) -> list[float]:
    return (np.asarray(sums) / np.maximum(counts, 1e-9)).tolist()


def _jsonable(found: Evaluation) -> dict[str, Any]:
    return {**dataclasses.asdict(found), "per_position": list(found.per_position)}


@contextlib.contextmanager
def _caught_signals() -> Iterator[list[int]]:
    """The numbers of the signals that came: the first is kept for the loop, which ends after
    its step; from then on they act as they did before, so that a second one ends at once."""
    caught: list[int] = []
    try:
        before = {number: signal.getsignal(number) for number in _SIGNALS}

        def restore() -> None:
            for number, handler in before.items():
                signal.signal(number, handler)

        def catch(number: int, _: Any) -> None:
            caught.append(number)
            restore()

        for number in _SIGNALS:
            signal.signal(number, catch)
    except ValueError:  # not in the main thread: signals are someone else's
        yield caught
        return
    try:
        yield caught
    finally:
        restore()
