"""Measures block sizes on the device at hand and writes the best into the table.

    python -m pallas_kernels.tune [--output FILE] [--quick]

Verification attention at decode, verify and prefill sizes, head_dim 64 and 128, float32 and
bfloat16; a size's entry is the tiling with the least total time over batch 1 and 8.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import tuned
from pallas_kernels.target import NATIVE, current_target
from pallas_kernels.verify_attention import shapes, verify_attention

CONTEXT, HEADS, KV_HEADS = 8192, 32, 8
ROWS: Mapping[str, int] = {"decode": 1, "verify": 8, "prefill": 64}
CANDIDATES: Mapping[str, Mapping[str, tuple[int, ...]]] = {
    "gpu": {"slots": (32, 64, 128), "warps": (4, 8), "stages": (2, 3, 4)},
    "tpu": {"block_bytes": (128 << 10, 256 << 10, 512 << 10, 1 << 20)},
}


def candidates(platform: str, quick: bool) -> Iterator[dict[str, int]]:
    """Every choice of the fields that an entry may hold; with `quick`, one in three."""
    fields = CANDIDATES[platform]
    for index, values in enumerate(itertools.product(*fields.values())):
        if not quick or index % 3 == 0:
            yield dict(zip(fields, values, strict=True))


def time_of(arrays: Mapping[str, Any], blocks: Any, repeats: int = 5, inner: int = 5) -> float:
    """Median seconds of a call, infinite where the tiling does not compile or fit."""
    implementation = NATIVE[current_target().platform]
    call = jax.jit(
        lambda given: verify_attention(**given, implementation=implementation, blocks=blocks)
    )
    try:
        jax.block_until_ready(call(arrays))
    except Exception:  # out of registers or VMEM: whatever the compiler throws, it is not the best
        return float("inf")

    def once() -> float:
        began = time.perf_counter()
        jax.block_until_ready([call(arrays) for _ in range(inner)])
        return (time.perf_counter() - began) / inner

    return statistics.median(once() for _ in range(repeats))


def inputs(batch: int, rows: int, dim: int, dtype: Any) -> dict[str, Any]:
    """Random arrays of a size, caches full."""
    keys = jax.random.split(jax.random.key(0), 3)
    cache = (batch, KV_HEADS, CONTEXT, dim)
    return {
        "q": jax.random.normal(keys[0], (batch, rows, HEADS, dim), dtype),
        "keys": jax.random.normal(keys[1], cache, dtype),
        "values": jax.random.normal(keys[2], cache, dtype),
        "start": jnp.full((batch,), CONTEXT - rows, jnp.int32),
    }


def best(rows: int, dim: int, dtype: Any, quick: bool) -> tuple[str, dict[str, int]]:
    """The table's key of a size, and the fields that were fastest."""
    target = current_target()
    totals: list[tuple[float, dict[str, int]]] = []
    sizes = [inputs(batch, rows, dim, dtype) for batch in (1, 8)]
    name = jnp.dtype(dtype).name
    problems = [
        shapes.Problem(
            arrays["q"].shape[0], rows, HEADS, KV_HEADS, dim, CONTEXT, CONTEXT, name, name
        )
        for arrays in sizes
    ]
    for fields in candidates(target.platform, quick):
        total = 0.0
        for problem, arrays in zip(problems, sizes, strict=True):
            total += time_of(arrays, shapes.blocks_with(problem, target, fields))
        totals.append((total, fields))
    return problems[0].key, min(totals, key=lambda pair: pair[0])[1]


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code: 2 where there is no accelerator to measure on."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--output", type=Path, default=tuned.TABLE)
    parser.add_argument("--quick", action="store_true", help="a third of the candidates")
    options = parser.parse_args(arguments)
    target = current_target()
    if target.platform not in CANDIDATES:
        sys.stderr.write(f"nothing to tune on platform {target.platform!r}: gpu and tpu only\n")
        return 2
    found = dict(tuned.table().get(target.device_kind, {}))
    for rows, dim, dtype in itertools.product(
        ROWS.values(), shapes.HEAD_DIMS, (jnp.bfloat16, jnp.float32)
    ):
        key, fields = best(rows, dim, dtype, options.quick)
        found[key] = fields
        sys.stderr.write(f"{target.device_kind}  {key}  {fields}\n")
    result = dict(tuned.table()) | {target.device_kind: found}
    partial = options.output.with_suffix(".part")
    partial.write_text(json.dumps(result, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    partial.replace(options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
