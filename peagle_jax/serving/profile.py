"""A trace of part of a batch run, and what it says about where time goes."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from peagle_jax.convert.base_reader import one_line
from peagle_jax.errors import InputError
from peagle_jax.serving.batch_report import Status
from peagle_jax.serving.trace_times import OTHER, SCOPES, read_program, read_times

VISITS = 50  # of the host to the device; a trace of a whole run would fill memory and disk


@dataclasses.dataclass(frozen=True)
class ProfileReport:
    """Where the time of some visits went.

    trace: the file. seconds: from the first to the last of the visits, without compilation.
    split: shares of it, by scope; "host" is the time in which the device had nothing to do.
    Empty where the trace says nothing about the device.
    """

    trace: str
    visits: int
    seconds: float
    split: Mapping[str, float]

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return dataclasses.asdict(self)

    def lines(self) -> list[str]:
        """A readable summary."""
        shown = ", ".join(f"{name} {100 * share:.1f} %" for name, share in self.split.items())
        head = f"profile      {self.visits} visits in {self.seconds:.2f} s"
        return [f"{head}: {shown or 'the trace has no device times'}", f"trace        {self.trace}"]


class Profiler:
    """Traces `visits` visits, the first ones after one that compiled nothing; a context
    manager, which ends the trace.

    The host's Python functions are not in it: tracing them would slow down what is measured.
    """

    def __init__(
        self,
        folder: Path,
        executables: Mapping[Any, Any],
        visits: int = VISITS,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`executables`: the run's compiled programs, looked at when the trace has ended.

        Raises InputError where the folder cannot be made.
        """
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(
                f"--profile: found {one_line(error)}, expected a folder to write to"
            ) from None
        self._folder, self._executables, self._visits = folder, executables, visits
        self._clock = clock
        self._compiled_before = self._begin = self._seconds = 0.0
        self._begin_visit = self._traced = 0
        self._before = set(self._files())
        self._tracing = self._over = False
        self._last: Status | None = None

    def watch(self, status: Status) -> None:
        """Called after every visit."""
        before, self._last = self._last, status
        if self._tracing:
            self._traced = status.counters.visits - self._begin_visit
            if self._traced >= self._visits:
                self._stop()
        elif (
            not self._over
            and before is not None
            and before.stats.compile_seconds == status.stats.compile_seconds
        ):
            self._start(status)

    def report(self) -> ProfileReport | None:
        """What was traced; None where the run was over before. The trace is ended first."""
        self._stop()
        files = sorted(set(self._files()) - self._before)
        if not files or not self._traced or self._seconds <= 0:
            return None
        texts = [_text(one) for one in self._executables.values()]
        programs = [read_program(text) for text in texts if text is not None]
        # With some of them alone, the others' time would be counted as nobody's.
        times = read_times(files[-1], programs) if None not in texts else None
        split = {}
        if times is not None:
            split = {
                name: times.scopes[name] / self._seconds
                for name in (*SCOPES, OTHER)
                if name in times.scopes
            }
            split["host"] = max(0.0, 1 - times.busy / self._seconds)
        return ProfileReport(str(files[-1]), self._traced, self._seconds, split)

    def __enter__(self) -> Profiler:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop()

    def _files(self) -> list[Path]:
        return list(self._folder.rglob("*.xplane.pb"))

    def _start(self, status: Status) -> None:
        import jax

        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        jax.profiler.start_trace(self._folder, profiler_options=options)
        self._tracing = True
        self._begin_visit = status.counters.visits
        self._compiled_before = status.stats.compile_seconds
        self._begin = self._clock()

    def _stop(self) -> None:
        if not self._tracing:
            return
        import jax

        assert self._last is not None
        compiling = self._last.stats.compile_seconds - self._compiled_before
        self._seconds = self._clock() - self._begin - compiling
        self._tracing, self._over = False, True
        jax.profiler.stop_trace()


def _text(executable: Any) -> str | None:
    """A program's text; None where jaxlib cannot read back what a newer compiler made."""
    import jax

    try:
        return str(executable.as_text())
    except jax.errors.JaxRuntimeError:
        return None
