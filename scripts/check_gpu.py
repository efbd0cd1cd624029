#!/usr/bin/env python3
"""On a CUDA GPU: kernels against their references, then how near they come to a copy's bandwidth.

    scripts/check_gpu                            under ten minutes in all
    scripts/check_gpu --skip-tests --json out.json
    scripts/check_gpu --tune                     also writes tuned block sizes

First the cases of tests/kernels, compiled for this GPU instead of interpreted. Then verification
attention of 8 rows at batch 1, 8, 32, context 1k, 8k, 32k, head_dim 64 and 128 in bfloat16,
beside XLA's program, jax.nn.dot_product_attention (its cuDNN form too, where it takes the shape),
jax's own decode attention kernel (which has no causal mask among the rows: a speed to compare
with, not a result) and, where torch has it, flash_attn_with_kvcache; then sampling beside XLA's
program. Ends with 1 on a wrong result, or where attention stays under 80% of the measured copy
bandwidth although the cache is larger than 256 MiB.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import jax
import jax.numpy as jnp
import numpy as np
from kernel_workloads import WORKLOADS, Workload, attention

from pallas_kernels.verify_sample import Filters

ROOT = Path(__file__).resolve().parent.parent
LARGE = 256 * 2**20
WANTED = 0.8


def seconds(call: Callable[[], Any], repeats: int = 5, inner: int = 10) -> float:
    """Median time of a call among others in flight."""
    jax.block_until_ready(call())

    def once() -> float:
        began = time.perf_counter()
        results = [call() for _ in range(inner)]
        jax.block_until_ready(results)
        return (time.perf_counter() - began) / inner

    return statistics.median(once() for _ in range(repeats))


def copy_bandwidth() -> float:
    """Bytes a second of reading and writing 1 GiB."""
    source = jnp.zeros((2**29,), jnp.bfloat16)
    copy = jax.jit(lambda x: x + 1)
    return 2 * source.nbytes / seconds(lambda: copy(source))


def wrong_results() -> Iterator[str]:
    """The cases of the tests whose compiled kernels differ from the reference."""
    from tests.kernels.contract import assert_close
    from tests.kernels.test_cache_write import TestWriteCache
    from tests.kernels.test_cod_attention import TestCodAttention
    from tests.kernels.test_verify_attention import TestVerifyAttention
    from tests.kernels.test_verify_sample import TestVerifySample

    for suite in (TestVerifyAttention, TestWriteCache, TestCodAttention, TestVerifySample):
        for case in suite.CASES:
            for dtype in case.dtypes:
                call = case.call(dtype)
                run = jax.jit(lambda arrays, call=call: call.bound("pallas_gpu")(**arrays))
                name = f"{suite.__name__} {case.name} {jnp.dtype(dtype).name}"
                try:
                    with jax.default_matmul_precision("highest"):
                        assert_close(run(dict(call.arrays)), call.expected())
                except Exception as error:  # a compiler's failure is a finding like any other
                    yield f"{name}: {' '.join(str(error).split())[:300]}"
                else:
                    print(f"equal  {name}", flush=True)


def arrays_of(workload: Workload) -> dict[str, jax.Array]:
    """Random arrays; every cache full to the last slot."""
    rng = np.random.default_rng(0)
    keys = workload.shapes["keys"]
    start = np.full(keys.shape[0], keys.shape[2] - workload.shapes["q"].shape[1], np.int32)
    arrays = {"start": jnp.asarray(start)}
    for name in ("q", "keys", "values"):
        shape = workload.shapes[name]
        key = jax.random.key(int(rng.integers(2**31)))
        arrays[name] = jax.random.normal(key, shape.shape, shape.dtype)
    return arrays


def rivals(arrays: dict[str, jax.Array]) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Other implementations of the same attention, as calls on the same data."""
    q, keys, values, start = (arrays[name] for name in ("q", "keys", "values", "start"))
    batch, rows, heads, dim = q.shape
    slot = jnp.arange(keys.shape[2])
    position = start[:, None] + jnp.arange(rows)
    mask = (slot <= position[..., None])[:, None]
    # These take [batch, slots, heads, dim]; the turn is not part of what is timed.
    turned = [jax.block_until_ready(jnp.asarray(x.swapaxes(1, 2))) for x in (keys, values)]
    for implementation in (None, "cudnn"):
        run = jax.jit(
            functools.partial(jax.nn.dot_product_attention, implementation=implementation)
        )
        name = f"dot_product_attention {implementation or 'xla'}"
        yield name, lambda run=run: run(q, *turned, mask=mask)

    from jax.experimental.pallas.ops.gpu import decode_attention

    # Rows as more query heads of the same group.
    folded = q.swapaxes(1, 2).reshape(batch, heads * rows, dim)
    gqa = jax.jit(decode_attention.gqa)
    yield "jax decode_attention", lambda: gqa(folded, *turned)
    try:
        import torch
        from flash_attn import flash_attn_with_kvcache
    except ImportError:
        return
    held = [torch.from_dlpack(x) for x in (q, *turned)]
    lengths = torch.full((batch,), keys.shape[2], dtype=torch.int32, device="cuda")

    def flash() -> Any:
        out = flash_attn_with_kvcache(*held, cache_seqlens=lengths, causal=True)
        torch.cuda.synchronize()
        return out

    yield "flash_attn", flash


def sampling_arrays(workload: Workload) -> dict[str, Any]:
    """Random logits, keys and ids; every filter switched on."""

    def random(shape: jax.ShapeDtypeStruct) -> jax.Array:
        if shape.dtype == jnp.float32:
            return 4 * jax.random.normal(jax.random.key(0), shape.shape)
        return jax.random.bits(jax.random.key(1), shape.shape).astype(shape.dtype) % 1000

    arrays: dict[str, Any] = jax.tree.map(random, dict(workload.shapes))
    batch = arrays["logits"].shape[0]
    asked = (0.8, 50, 0.95, 0.01)
    arrays["filters"] = Filters(*(jnp.full((batch,), value) for value in asked))
    return arrays


def measured(workload: Workload, bandwidth: float) -> dict[str, Any]:
    """Times of a workload and of its rivals, in microseconds."""
    samples = workload.kernel == "verify_sample"
    arrays = sampling_arrays(workload) if samples else arrays_of(workload)
    row: dict[str, Any] = {"workload": workload.title, "bytes": workload.moved, "us": {}}

    def take(name: str, call: Callable[[], Any]) -> None:
        try:
            row["us"][name] = 1e6 * seconds(call)
        except Exception as error:  # a rival that does not take the shape
            row["us"][name] = None
            row.setdefault("trouble", {})[name] = " ".join(str(error).split())[:200]

    for implementation in ("pallas_gpu", "reference"):
        run = jax.jit(functools.partial(workload.function, implementation=implementation))
        take(implementation, lambda run=run: run(**arrays))
    for name, call in () if samples else rivals(arrays):
        take(name, call)
    best = row["us"]["pallas_gpu"]
    row["of_copy"] = workload.moved / best * 1e6 / bandwidth if best else 0.0
    return row


def workloads() -> Iterator[Workload]:
    """The sizes that are measured."""
    for dim in (64, 128):
        for batch in (1, 8, 32):
            for context in (1024, 8192, 32768):
                name = f"b{batch} {context // 1024}k d{dim}"
                yield attention(name, batch, 8, context, dim=dim)
    yield from (one for one in WORKLOADS if one.kernel == "verify_sample")


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--skip-tests", action="store_true")
    parser.add_argument("--skip-bench", action="store_true")
    parser.add_argument("--tune", action="store_true", help="python -m pallas_kernels.tune first")
    parser.add_argument("--json", type=Path, help="write the measurements to this file")
    options = parser.parse_args()
    device = jax.devices()[0]
    if device.platform != "gpu":
        print(f"no CUDA GPU: jax runs on {device.platform!r} here", file=sys.stderr)
        return 2
    print(device.device_kind, flush=True)
    failures = [] if options.skip_tests else list(wrong_results())
    for failure in failures:
        print(f"WRONG  {failure}")
    if options.tune:
        subprocess.run([sys.executable, "-m", "pallas_kernels.tune"], check=True, cwd=ROOT)
    rows = []
    if not options.skip_bench:
        bandwidth = copy_bandwidth()
        print(f"copy: {bandwidth / 1e9:.0f} GB/s")
        for workload in workloads():
            row = measured(workload, bandwidth)
            rows.append(row)
            times = "  ".join(
                f"{name} {'-' if us is None else f'{us:.1f}'}" for name, us in row["us"].items()
            )
            print(f"{row['workload']:28}{row['of_copy']:7.1%} of copy   us: {times}", flush=True)
            large = workload.kernel == "verify_attention" and row["bytes"] > LARGE
            if large and row["of_copy"] < WANTED:
                failures.append(f"{row['workload']}: {row['of_copy']:.1%} of a copy's bandwidth")
        if options.json:
            result = {"device": device.device_kind, "copy_bytes_a_second": bandwidth, "rows": rows}
            partial = options.json.with_suffix(".part")
            partial.write_text(json.dumps(result, indent=1) + "\n")
            partial.replace(options.json)
    for failure in failures:
        print(f"fails: {failure}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
