"""How long a device worked on what, from a profiler's trace.

Operations are named in a trace; the scope that an operation was written in (`jax.named_scope`) is
in the text of the compiled program. Both together give the time of each scope. Time in which no
operation ran is the host's: the device had nothing to do.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

PREFILL, INSERT, DRAFT, VERIFY, COMMIT = SCOPES = (
    "prefill",
    "insert",
    "draft",
    "verify",
    "commit",
)
OTHER = "other"  # copies and the like, which the compiler adds
# What stands for operations without a scope of their own.
_SCOPE_OF_PROGRAM = {"jit_prefill": PREFILL, "jit_insert": INSERT}
_INSTRUCTION = re.compile(r"\s*(?:ROOT )?%?([\w.-]+) = (.*)")
_OPCODE = re.compile(r"\s([a-z][a-z0-9-]*)\(")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_EVENT = re.compile(r"%?([\w.-]+)(?: = |$)")
_CONTAINERS = frozenset({"while", "conditional", "call"})  # they last as long as what is in them


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program. scopes: of each instruction, None where it only contains others."""

    module: str
    scopes: Mapping[str, str | None]


@dataclasses.dataclass(frozen=True)
class DeviceTimes:
    """Seconds of one device, the mean where there are several.

    busy: in which an operation ran. scopes: the same by scope; where operations overlap, in
    proportion to how long each took.
    """

    busy: float
    scopes: Mapping[str, float]


def read_program(text: str) -> Program:
    """From a compiled program's text."""
    module = re.match(r"HloModule ([\w.-]+)", text)
    name = module[1] if module else ""
    scopes: dict[str, str | None] = {}
    for line in text.splitlines():
        if not (found := _INSTRUCTION.match(line)):
            continue
        opcode = _OPCODE.search(found[2])
        if opcode and opcode[1] in _CONTAINERS:
            scopes[found[1]] = None
            continue
        path = _OP_NAME.search(line)
        parts = path[1].split("/") if path else []
        own = next((part for part in parts if part in SCOPES), None)
        scopes[found[1]] = own or _SCOPE_OF_PROGRAM.get(name, OTHER)
    return Program(name, scopes)


def read_times(trace: Path, programs: Iterable[Program]) -> DeviceTimes | None:
    """Times in an .xplane.pb file; None where it has no operation of a device."""
    from jax.profiler import ProfileData

    return device_times(ProfileData.from_file(str(trace)), list(programs))


def device_times(data: Any, programs: list[Program]) -> DeviceTimes | None:
    """Times in a `jax.profiler.ProfileData`."""
    totals: dict[str, float] = collections.defaultdict(float)
    busy, num_devices = 0.0, 0
    for plane in data.planes:
        events = _operations(plane)
        if not events:
            continue
        num_devices += 1
        by_program: dict[Any, list[tuple[str, str, float, float]]] = collections.defaultdict(list)
        for module, key, op, begin, seconds in events:
            by_program[module, key].append((module, op, begin, seconds))
        own: dict[str, float] = collections.defaultdict(float)
        spans: list[tuple[float, float]] = []
        for (module, _), runs in by_program.items():
            scopes = _best(module, {op for _, op, _, _ in runs}, programs)
            for _, op, begin, seconds in runs:
                scope = scopes.get(op, _SCOPE_OF_PROGRAM.get(module, OTHER))
                if scope is not None:
                    own[scope] += seconds
                    spans.append((begin, begin + seconds))
        on = _covered(spans)
        whole = sum(own.values())
        for scope, seconds in own.items():
            totals[scope] += on * seconds / whole if whole else 0.0
        busy += on
    if not num_devices:
        return None
    return DeviceTimes(busy / num_devices, {k: v / num_devices for k, v in totals.items()})


def _operations(plane: Any) -> list[tuple[str, Any, str, float, float]]:
    """(module, program, operation, begin, seconds) of a plane's operations.

    On TPU the operations are a line of their own, and the line beside it says which program
    ran when; elsewhere every operation's event names both.
    """
    lines = {line.name: line for line in plane.lines}
    if "XLA Ops" in lines:
        runs = sorted(
            (event.start_ns, event.name.partition("(")[0], event.name)
            for event in (lines["XLA Modules"].events if "XLA Modules" in lines else ())
        )
        begins = [run[0] for run in runs]
        found = []
        for event in lines["XLA Ops"].events:
            operation = _EVENT.match(event.name)
            at = bisect.bisect_right(begins, event.start_ns) - 1
            if operation and at >= 0:
                _, module, key = runs[at]
                begin, seconds = event.start_ns / 1e9, event.duration_ns / 1e9
                found.append((module, key, operation[1], begin, seconds))
        return found
    found = []
    for line in plane.lines:
        for event in line.events:
            stats = dict(event.stats)
            if "hlo_op" in stats and event.duration_ns > 0:
                module, op = str(stats.get("hlo_module", "")), str(stats["hlo_op"])
                begin, seconds = event.start_ns / 1e9, event.duration_ns / 1e9
                found.append((module, stats.get("program_id"), op, begin, seconds))
    return found


def _best(module: str, ops: set[str], programs: list[Program]) -> Mapping[str, str | None]:
    """The scopes of the program that has these operations: one name stands for a program of
    each shape."""
    alike = [one.scopes for one in programs if one.module == module]
    return max(alike, key=lambda scopes: len(ops & scopes.keys()), default={})


def _covered(spans: list[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, end = 0.0, float("-inf")
    for begin, stop in sorted(spans):
        if stop > end:
            total += stop - max(begin, end)
            end = stop
    return total
