"""What a compiled TPU program says about itself: estimated cycles, kernels' bytes, collectives."""

from __future__ import annotations

import dataclasses
import math
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pallas_kernels.chips import Chip

_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_UNKNOWN_CYCLES = 1 << 50  # what stands where the compiler could not tell is larger
_DECLARED = re.compile(r'"bytes_accessed":"(\d+)"')
# An instruction: its result's type, then the operation. The second half of a split one has no
# bytes of its own.
_COLLECTIVE = re.compile(
    r"= (?P<type>\(.*?\)|\S+) "
    r"(?P<kind>all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
)
_ARRAY = re.compile(r"\b(?P<type>pred|[a-z]+(?P<bits>\d+)\w*)\[(?P<sizes>[\d,]*)\]")


@dataclasses.dataclass(frozen=True)
class Collectives:
    """Instructions of one kind: how many, and bytes of their results, on one device."""

    count: int = 0
    nbytes: int = 0


@dataclasses.dataclass(frozen=True)
class ProgramText:
    """Sums over the text of an optimised program, as `jax.stages.Compiled.as_text` gives it.

    A loop's body counts once, and so does every branch of a conditional: a sum is the time of one
    turn, and an upper bound where branches differ.

    Attributes:
      cycles: of the instructions that the compiler estimates; it has no estimate for Pallas
        kernels nor for collectives.
      kernels: Pallas calls.
      kernel_bytes: what these declare to read and write (`pl.CostEstimate`).
      collectives: by kind.
    """

    cycles: int
    kernels: int
    kernel_bytes: int
    collectives: Mapping[str, Collectives]

    def compiled_us(self, chip: Chip) -> float | None:
        """Microseconds of what the compiler estimates; None where the clock is unknown."""
        return self.cycles / chip.clock_ghz / 1e3 if chip.clock_ghz else None

    def kernels_us(self, chip: Chip) -> float:
        """Least microseconds of the Pallas calls: their bytes at full bandwidth."""
        return chip.floor_us(float(self.kernel_bytes))

    def sent_us(self, chip: Chip) -> float:
        """Least microseconds of the collectives: a sum's bytes twice, others' once, over all
        links at once; latency is not in it."""
        sent = sum(
            one.nbytes * (2 if kind == "all-reduce" else 1)
            for kind, one in self.collectives.items()
        )
        return sent / chip.ici_gb_s / 1e3 if sent else 0.0


def compile_with_text(lowered: Any) -> tuple[Any, str]:
    """The executable of a `jax.stages.Lowered`, and its optimised text.

    The text is the one that the compiler writes itself: not every program of a newer compiler
    can be read back through jaxlib, which is what `as_text` does. That is taken where there is
    no other.
    """
    with tempfile.TemporaryDirectory() as folder:
        options = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        program = lowered.compile(compiler_options=options)
        written = sorted(Path(folder).glob("*after_codegen.txt"), key=lambda p: p.stat().st_size)
        return program, written[-1].read_text() if written else program.as_text()


def read_estimates(text: str) -> ProgramText:
    """Reads the text of an optimised program."""
    calls = [line for line in text.splitlines() if '"tpu_custom_call"' in line]
    found: dict[str, Collectives] = {}
    for match in _COLLECTIVE.finditer(text):
        kind, old = match["kind"], found.get(match["kind"], Collectives())
        # A split operation's result holds its operand too: the largest array is the result.
        size = max(map(_nbytes, _ARRAY.finditer(match["type"])), default=0)
        found[kind] = Collectives(old.count + 1, old.nbytes + size)
    return ProgramText(
        cycles=sum(n for n in map(int, _CYCLES.findall(text)) if n < _UNKNOWN_CYCLES),
        kernels=len(calls),
        kernel_bytes=sum(int(n) for line in calls for n in _DECLARED.findall(line)),
        collectives=dict(sorted(found.items())),
    )


def _nbytes(array: re.Match[str]) -> int:
    elements = math.prod(int(size) for size in array["sizes"].split(",") if size)
    return elements * max(1, int(array["bits"] or 8) // 8)
