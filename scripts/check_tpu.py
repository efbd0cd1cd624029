#!/usr/bin/env python3
"""Compiles every kernel for TPUs with the real compiler, on a machine that has none.

    scripts/check_tpu                          all workloads, four kinds of chip
    scripts/check_tpu --chip v5e --match b8    some of them
    scripts/check_tpu --reference              also what XLA makes of the references

Prints, for each: VMEM of the kernel; bytes over HBM by the compiler's cost analysis (a kernel's
own part is what it declares, every operand's padding added) beside the floor; the floor in
microseconds; the compiler's estimate for the operations around the kernel; temporary HBM. Ends
with 1 where something does not compile, moves more bytes than its bound allows, or copies a
cache. Needs the libtpu package.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"}
# Only the compiler is used: no device to be fought over by two processes.
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
os.environ.setdefault("TPU_STDERR_LOG_LEVEL", "3")
os.environ.setdefault("TPU_MIN_LOG_LEVEL", "3")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import jax  # after the settings above
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
from kernel_workloads import WORKLOADS, Workload, nbytes

from pallas_kernels.chips import CHIPS, Chip
from pallas_kernels.program_text import compile_with_text, read_estimates
from pallas_kernels.target import Implementation, Target, compile_for
from peagle_jax.sharding import by_rows

TPUS = {chip.name: kind for kind, chip in CHIPS.items() if chip.topology}


@dataclass
class Row:
    """What the compiler made of a workload.

    Attributes:
      moved, ratio: bytes over HBM, and over the floor.
      floor_us: least time for the floor's bytes and operations.
      around_us: the compiler's estimate of the operations beside a kernel; for a reference,
        of all that have one. -1 where the clock is not published.
      vmem: bytes of VMEM that the kernel holds, 0 without one.
      temporary: bytes of HBM beside arguments and results.
      trouble: "" where all is well.
    """

    chip: str
    workload: str
    implementation: str
    moved: int = 0
    floor: int = 0
    ratio: float = 0.0
    floor_us: float = 0.0
    around_us: float = 0.0
    vmem: int = 0
    temporary: int = 0
    seconds: float = 0.0
    trouble: str = ""


def compiled(
    workload: Workload, implementation: Implementation, kind: str, device: Any
) -> tuple[Any, str]:
    """The executable of a workload for one device of a topology, and its text."""
    place = SingleDeviceSharding(device)

    def spec(path: Any, shape: Any) -> Any:
        at = by_rows(shape.ndim, place) if path[0].key in workload.by_rows else place
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=at)

    shapes = jax.tree.map_with_path(spec, dict(workload.shapes))
    given = {name: shapes.pop(name) for name in workload.donated}

    def run(given: Any, others: Any) -> Any:
        return workload.function(
            **given, **others, **workload.static, implementation=implementation
        )

    with compile_for(Target("tpu", kind, CHIPS[kind].cores)):
        return compile_with_text(jax.jit(run, donate_argnums=0).lower(given, shapes))


def check(workload: Workload, implementation: Implementation, kind: str, device: Any) -> Row:
    """Compiles and measures; a failure is a row too."""
    chip: Chip = CHIPS[kind]
    row = Row(chip.name, workload.title, implementation, floor=workload.moved)
    row.floor_us = chip.floor_us(workload.moved, workload.flops)
    began = time.monotonic()
    try:
        program, text = compiled(workload, implementation, kind, device)
    except Exception as error:  # whatever a compiler throws is the finding
        row.trouble = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        return row
    row.seconds = time.monotonic() - began
    memory = program.memory_analysis()
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes
    padding = max(0, memory.argument_size_in_bytes - nbytes(workload.shapes))
    row.moved = int(program.cost_analysis()["bytes accessed"]) + padding
    row.ratio = row.moved / row.floor
    row.temporary = memory.temp_size_in_bytes
    row.vmem = sum(map(int, re.findall(VMEM, text)))
    around = read_estimates(text).compiled_us(chip)
    row.around_us = -1.0 if around is None else around
    caches = [nbytes(tree) for tree in workload.shapes.values()]
    if implementation == "pallas_tpu" or not workload.own_kernel:
        if workload.own_kernel and "tpu_custom_call" not in text:
            row.trouble = "no kernel in the program"
        elif workload.bound is not None and row.ratio > workload.bound:
            row.trouble = f"moves {row.ratio:.2f} times its floor, at most {workload.bound}"
        elif row.temporary >= (workload.temporaries or max(SMALL, *caches)):
            row.trouble = f"{row.temporary} bytes of temporaries: a large array is copied"
        elif workload.donated and memory.alias_size_in_bytes < held / 4:
            row.trouble = "the result does not take the place of its argument"
    return row


SMALL = 16 * 2**20  # below it temporaries are queries and outputs, not a copied cache
VMEM = r'tpu_custom_call"[^\n]*?used_scoped_memory_configs":\[\{[^}]*"size":"(\d+)"'
COLUMNS = f"{'chip':6}{'workload':46}{'impl':11}{'MiB':>9}{'x floor':>8}{'floor us':>9}"
COLUMNS += f"{'around us':>10}{'VMEM KiB':>9}{'temp KiB':>9}{'compile':>8}"


def line(row: Row) -> str:
    """A row of the table."""
    cells = f"{row.chip:6}{row.workload:46}{row.implementation.removeprefix('pallas_'):11}"
    if row.trouble and not row.moved:
        return f"{cells} FAILS: {row.trouble}"
    cells += f"{row.moved / 2**20:9.2f}{row.ratio:8.3f}{row.floor_us:9.1f}{row.around_us:10.1f}"
    cells += f"{row.vmem / 1024:9.0f}{row.temporary / 1024:9.0f}{row.seconds:7.1f}s"
    return f"{cells}  {row.trouble}".rstrip()


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chip", action="append", choices=sorted(TPUS), help="default: all")
    parser.add_argument("--match", action="append", help="part of a workload's title")
    parser.add_argument("--reference", action="store_true", help="XLA's programs too")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    options = parser.parse_args()
    wanted = [
        workload
        for workload in WORKLOADS
        if options.match is None or any(part in workload.title for part in options.match)
    ]
    if not wanted:
        print(f"no workload's title contains any of {options.match}", file=sys.stderr)
        return 2

    def implementations(workload: Workload) -> list[Implementation]:
        own: list[Implementation] = ["pallas_tpu"] if workload.own_kernel else []
        return [*own, "reference"] if options.reference or not own else own

    rows = []
    print(COLUMNS)
    for name in options.chip or TPUS:
        kind = TPUS[name]
        topology = topologies.get_topology_desc(platform="tpu", topology_name=CHIPS[kind].topology)
        device = topology.devices[0]
        if device.device_kind != kind:
            print(f"{name}: the compiler calls it {device.device_kind!r}", file=sys.stderr)
            return 1
        for workload in wanted:
            for implementation in implementations(workload):
                rows.append(check(workload, implementation, kind, device))
                print(line(rows[-1]), flush=True)
    if options.json:
        partial = options.json.with_suffix(".part")
        partial.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
        partial.replace(options.json)
    failed = [row for row in rows if row.trouble]
    print(f"{len(rows) - len(failed)} of {len(rows)} pass")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
