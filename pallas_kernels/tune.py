"""Measures block sizes on the device at hand and writes the best into the table.

    python -m pallas_kernels.tune [--output FILE] [--quick]

Verification attention at decode, verify and prefill sizes, head_dim 64 and 128, float32 and
bfloat16; sampling and rejection; packed experts with few and many rows; training attention with
its gradient. A size's entry is the tiling with the least total time over two calls, of batch 1 and
8, or of a short and a long text.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import tuned
from pallas_kernels.cod_attention import cod_attention
from pallas_kernels.cod_attention import shapes as training_shapes
from pallas_kernels.mxfp4_matmul import BLOCK, mxfp4_matmul
from pallas_kernels.mxfp4_matmul import shapes as packed_shapes
from pallas_kernels.target import NATIVE, current_target
from pallas_kernels.verify_attention import shapes, verify_attention
from pallas_kernels.verify_sample import Filters, reject_drafts, sample_tokens
from pallas_kernels.verify_sample import shapes as sample_shapes

CONTEXT, HEADS, KV_HEADS = 8192, 32, 8
ROWS: Mapping[str, int] = {"decode": 1, "verify": 8, "prefill": 64}
SAMPLED_ROWS, VOCAB = 8, 128256
EXPERTS, EXPERT_WIDTH = 32, 2880  # of gpt-oss-20b
TEXTS, DEPTHS = (2048, 8192), 8  # tokens, and rows of each at half as many anchors
TRAINED_HEADS, TRAINED_KV_HEADS = 64, 8  # of the released drafters for gpt-oss
Fields = Mapping[str, tuple[int, ...]]
ATTENTION: Mapping[str, Fields] = {
    "gpu": {"slots": (32, 64, 128), "warps": (4, 8), "stages": (2, 3, 4)},
    "tpu": {"block_bytes": (128 << 10, 256 << 10, 512 << 10, 1 << 20)},
}
SAMPLING: Mapping[str, Fields] = {
    "gpu": {"chunk": (1024, 2048, 4096), "warps": (4, 8, 16)},
    "tpu": {"chunk": (1024, 2048, 4096)},
}
PACKED: Mapping[str, Fields] = {
    "gpu": {"rows": (16, 32, 64), "outputs": (64, 128), "warps": (4, 8), "stages": (2, 3, 4)},
    "tpu": {"rows": (16, 32, 64, 128), "outputs": (512, 1024, 1536)},
}
TRAINING: Mapping[str, Fields] = {
    "gpu": {"rows": (32, 64, 128), "keys": (32, 64), "warps": (4, 8), "stages": (2, 3)},
    "tpu": {"columns": (1024, 2048), "scores": (1 << 17, 1 << 18, 1 << 19)},
}


@dataclass(frozen=True)
class Call:
    """A kernel at one size.

    Attributes:
      function: the kernel's public function.
      arrays: its arguments by name.
      blocks: the tiling that some fields of an entry make.
    """

    function: Callable[..., Any]
    arrays: Mapping[str, Any]
    blocks: Callable[[Mapping[str, Any]], Any]


@dataclass(frozen=True)
class Size:
    """An entry of the table: its key, the values of its fields by platform, and what is timed."""

    key: str
    fields: Mapping[str, Fields]
    calls: Callable[[], list[Call]]  # the arrays live no longer than they are measured


def candidates(fields: Fields, quick: bool) -> Iterator[dict[str, int]]:
    """Every choice of the fields that an entry may hold; with `quick`, one in three."""
    for index, values in enumerate(itertools.product(*fields.values())):
        if not quick or index % 3 == 0:
            yield dict(zip(fields, values, strict=True))


def time_of(call: Call, blocks: Any, repeats: int = 5, inner: int = 5) -> float:
    """Median seconds of a call, infinite where the tiling does not compile or fit."""
    implementation = NATIVE[current_target().platform]
    run = jax.jit(
        lambda given: call.function(**given, implementation=implementation, blocks=blocks)
    )
    arrays = dict(call.arrays)
    try:
        jax.block_until_ready(run(arrays))
    except Exception:  # out of registers or VMEM: whatever the compiler throws, it is not the best
        return float("inf")

    def once() -> float:
        began = time.perf_counter()
        jax.block_until_ready([run(arrays) for _ in range(inner)])
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


def attention(rows: int, dim: int, dtype: Any) -> Size:
    """Verification attention of so many rows."""
    target, name = current_target(), jnp.dtype(dtype).name

    def problem(batch: int) -> shapes.Problem:
        return shapes.Problem(batch, rows, HEADS, KV_HEADS, dim, CONTEXT, CONTEXT, name, name)

    def call(batch: int) -> Call:
        one = problem(batch)
        return Call(
            verify_attention,
            inputs(batch, rows, dim, dtype),
            lambda fields: shapes.blocks_with(one, target, fields),
        )

    return Size(problem(1).key, ATTENTION, lambda: [call(batch) for batch in (1, 8)])


def sampling(drafted: bool) -> Size:
    """Drawing or, `drafted`, rejecting: every filter switched on."""
    target, drafts = current_target(), SAMPLED_ROWS - 1

    def problem(batch: int) -> sample_shapes.Problem:
        return sample_shapes.Problem(batch * SAMPLED_ROWS, VOCAB, "float32", drafted)

    def call(batch: int) -> Call:
        words = jax.random.split(jax.random.key(0), (batch, SAMPLED_ROWS))
        logits = 4 * jax.random.normal(jax.random.key(1), (*words.shape, VOCAB), jnp.float32)
        filters = Filters(
            *(jnp.full((batch,), value) for value in (0.8, 50, 0.95, 0.01)),
        )
        arrays = {"logits": logits, "filters": filters, "keys": jax.random.key_data(words)}
        if drafted:
            arrays["drafts"] = jnp.zeros((batch, drafts), jnp.int32)
            arrays["accept_noise"] = jnp.full((batch, drafts), 0.5)
            arrays["draft_logits"] = logits
        one = problem(batch)
        return Call(
            reject_drafts if drafted else sample_tokens,
            arrays,
            lambda fields: sample_shapes.blocks_with(one, target, fields),
        )

    return Size(problem(1).key, SAMPLING, lambda: [call(batch) for batch in (1, 8)])


def packed(rows: int) -> Size:
    """Packed experts, `rows` and eight times as many spread over them."""
    target = current_target()
    halves, blocks = EXPERT_WIDTH // 2, EXPERT_WIDTH // BLOCK

    def problem(total: int) -> packed_shapes.Problem:
        return packed_shapes.Problem(total, EXPERTS, EXPERT_WIDTH, EXPERT_WIDTH, "bfloat16")

    def call(total: int) -> Call:
        keys = jax.random.split(jax.random.key(0), 2)
        one = problem(total)
        arrays = {
            "x": jax.random.normal(keys[0], (total, EXPERT_WIDTH), jnp.bfloat16),
            "sizes": jnp.full((EXPERTS,), total // EXPERTS, jnp.int32),
            "packed": jax.random.bits(keys[1], (EXPERTS, halves, EXPERT_WIDTH), jnp.uint8),
            "scales": jnp.full((EXPERTS, blocks, EXPERT_WIDTH), 120, jnp.uint8),
        }
        return Call(
            mxfp4_matmul, arrays, lambda fields: packed_shapes.blocks_with(one, target, fields)
        )

    return Size(problem(rows).key, PACKED, lambda: [call(total) for total in (rows, 8 * rows)])


def training(dim: int, dtype: Any) -> Size:
    """Training attention with its gradient, K = 8, every second position an anchor."""
    target, name = current_target(), jnp.dtype(dtype).name
    one = training_shapes.Problem(TRAINED_HEADS // TRAINED_KV_HEADS, dim, name)

    def gradient(q: Any, keys: Any, values: Any, own: Any, **others: Any) -> Any:
        def total(q: Any, keys: Any, values: Any, own: Any) -> jax.Array:
            out, weights = cod_attention(q=q, keys=keys, values=values, own=own, **others)
            return jnp.sum(out.astype(jnp.float32)) + jnp.sum(weights)

        return jax.grad(total, (0, 1, 2, 3))(q, keys, values, own)

    def call(length: int) -> Call:
        half = jnp.arange(0, length, 2)
        anchor = jnp.concatenate([jnp.arange(length), *[half] * (DEPTHS - 1)])
        depth = jnp.concatenate(
            [jnp.zeros(length, jnp.int32), jnp.repeat(jnp.arange(1, DEPTHS), len(half))]
        )
        keys = jax.random.split(jax.random.key(0), 3)
        cache = (1, TRAINED_KV_HEADS, length, dim)
        per_key = TRAINED_HEADS // TRAINED_KV_HEADS
        arrays = {
            "q": jax.random.normal(keys[0], (1, len(anchor), TRAINED_HEADS, dim), dtype),
            "keys": jax.random.normal(keys[1], cache, dtype),
            "values": jax.random.normal(keys[2], cache, dtype),
            "own": jnp.zeros((1, len(anchor), TRAINED_KV_HEADS, per_key, DEPTHS - 1)),
            "anchor": anchor[None],
            "depth": depth.astype(jnp.int32),
            "documents": jnp.zeros((1, length), jnp.int32),
        }
        return Call(
            gradient, arrays, lambda fields: training_shapes.blocks_with(one, target, fields)
        )

    return Size(one.key, TRAINING, lambda: [call(length) for length in TEXTS])


def sizes() -> Iterator[Size]:
    """Everything that has an entry."""
    for rows, dim, dtype in itertools.product(
        ROWS.values(), shapes.HEAD_DIMS, (jnp.bfloat16, jnp.float32)
    ):
        yield attention(rows, dim, dtype)
    yield from map(sampling, (False, True))
    yield from map(packed, (EXPERTS, EXPERTS * 32))
    for dim, dtype in itertools.product(training_shapes.HEAD_DIMS, (jnp.bfloat16, jnp.float32)):
        yield training(dim, dtype)


def best(size: Size, quick: bool) -> dict[str, int]:
    """The fields that were fastest."""
    calls = size.calls()
    totals: list[tuple[float, dict[str, int]]] = []
    for fields in candidates(size.fields[current_target().platform], quick):
        total = sum(time_of(call, call.blocks(fields)) for call in calls)
        totals.append((total, fields))
    return min(totals, key=lambda pair: pair[0])[1]


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code: 2 where there is no accelerator to measure on."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--output", type=Path, default=tuned.TABLE)
    parser.add_argument("--quick", action="store_true", help="a third of the candidates")
    options = parser.parse_args(arguments)
    target = current_target()
    if target.platform not in NATIVE:
        sys.stderr.write(f"nothing to tune on platform {target.platform!r}: gpu and tpu only\n")
        return 2
    found = dict(tuned.table().get(target.device_kind, {}))
    for size in sizes():
        found[size.key] = best(size, options.quick)
        sys.stderr.write(f"{target.device_kind}  {size.key}  {found[size.key]}\n")
    result = dict(tuned.table()) | {target.device_kind: found}
    partial = options.output.with_suffix(".part")
    partial.write_text(json.dumps(result, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    partial.replace(options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
