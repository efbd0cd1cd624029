"""A whole measurement: every case prepared, then all of them in turn, again and again."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

from peagle_jax.bench.cases import OURS, Case, Measurement, Parts, Run
from peagle_jax.errors import InputError

Progress = Callable[[int, int, str], None]


@runtime_checkable
class Engine(Protocol):
    """Something that decodes; raises `EngineError` where a case does not work."""

    def prepare(self, case: Case) -> float:
        """Loads, compiles and warms up; the seconds that compiling took."""

    def run(self, case: Case) -> Run:
        """All prompts once."""

    def parts(self, case: Case) -> Parts | None:
        """A step's parts, None where they cannot be told apart."""


class EngineError(RuntimeError):
    """A peer that does not work; the message says why."""


def measure(
    engines: Mapping[str, Engine],
    cases: Sequence[Case],
    repeats: int,
    progress: Progress | None = None,
) -> list[Measurement]:
    """Repeats are interleaved: each goes through all cases, every other one backwards, so that
    a machine that gets slower or faster does so for all of them. A peer's case that fails is
    marked and left out; a failure of this package ends the measurement.

    Raises InputError where `repeats` is less than 1.
    """
    if repeats < 1:
        raise InputError(f"--repeats: found {repeats}, expected 1 or more")
    measurements = {case: Measurement(case) for case in cases}
    total, done = len(cases) * (repeats + 2), 0

    def attempt(case: Case, what: str, action: Callable[[Measurement, Engine], None]) -> None:
        nonlocal done
        measurement = measurements[case]
        if measurement.error is None:
            if progress:
                progress(done, total, f"{what} {case.name}")
            try:
                action(measurement, engines[case.peer])
            except EngineError as error:
                measurement.error = str(error)
        done += 1

    def prepare(measurement: Measurement, engine: Engine) -> None:
        measurement.compile_seconds = engine.prepare(measurement.case)

    def run(measurement: Measurement, engine: Engine) -> None:
        measurement.runs.append(engine.run(measurement.case))

    def parts(measurement: Measurement, engine: Engine) -> None:
        measurement.parts = engine.parts(measurement.case)

    for case in cases:
        attempt(case, "prepare", prepare)
    for repeat in range(repeats):
        for case in cases if repeat % 2 == 0 else reversed(cases):
            attempt(case, f"repeat {repeat + 1} of", run)
    for case in cases:
        attempt(case, "parts of", parts)
    return list(measurements.values())


def result_lines(measurements: Sequence[Measurement]) -> list[dict[str, object]]:
    """The lines of results.jsonl, in the order of the cases."""
    known = {measurement.case: measurement for measurement in measurements}
    return [
        measurement.to_json(known.get(measurement.case.reference)) for measurement in measurements
    ]


def to_jsonl(lines: Sequence[dict[str, object]]) -> bytes:
    """JSON, one a line."""
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


def is_own(line: dict[str, object]) -> bool:
    """Whether a result is of this package."""
    return line["peer"] in OURS
