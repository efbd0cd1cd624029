#!/usr/bin/env python3
"""Where the time of a decoding step goes on this device, beside the least that memory allows.

    scripts/step_times.py                       plain, P-EAGLE of 3 drafts, a tree of 3 nodes
    scripts/step_times.py --method p-eagle --num-draft-tokens 3 --batch 4

Answers a prompt under the profiler and prints milliseconds a step by part, as a Markdown table:
rows are parts of a network, columns what a step does with it. Where operations overlap, the time
that both took counts in proportion; what threads do that XLA does not name, as in products of few
rows on CPU, is missing there. So the time of a step without a profiler stands below it: that of the
later half of an answer. The floor is the bytes of all weights that a step reads, each
once, over the rate at which XLA reads as many bytes of float32 arrays here.
"""

from __future__ import annotations

import argparse
import collections
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import jax.numpy as jnp

import peagle_jax
from peagle_jax import api, batching, runner
from peagle_jax.config import SamplingParams
from peagle_jax.markdown import row
from peagle_jax.serving.trace_times import Program, read_program, read_times

# The first that an operation's path matches.
PARTS = {
    "projections": r"/(mlp|[qkvo]_proj|fc)[/+]",
    "attention": r"/self_attn/",
    "head and choice": r"(\.best|\.logits|/lm_head|/cond)",
    "norms": r"norm",
    "embedding": r"embed",
}
REST = "the rest"
REPEATS = 5
DEFAULT = (("none", 0), ("p-eagle", 3), ("p-eagle+tree", 3))
PROMPT = "Explain how a bicycle stays upright, and what its rider does without noticing."


def labelled(text: str, vocab_size: int) -> Program:
    """The program's instructions by scope and part.

    XLA takes the names off products with one row; what they are their shapes tell.
    """
    program = read_program(text)
    scopes = dict(program.scopes)
    for line in text.splitlines():
        found = re.match(r"\s*(?:ROOT )?%?([\w.-]+) = (.*)", line)
        if not found or scopes.get(found[1]) is None:
            continue
        path = re.search(r'op_name="([^"]*)"', line)
        if path:
            part = next((name for name, one in PARTS.items() if re.search(one, path[1])), REST)
        elif " dot(" in line:
            part = "head and choice" if f"[{vocab_size}," in found[2] else "projections"
        else:
            part = REST
        scopes[found[1]] = f"{scopes[found[1]]}: {part}"
    return Program(program.module, scopes)


def seconds_to_read(num_bytes: int) -> float:
    """The best of several passes over so many bytes."""
    size = 1 << 20
    arrays = [jnp.full(size, float(i)) for i in range(-(-num_bytes // (4 * size)))]
    # A product with a vector streams, on all cores.
    program = jax.jit(lambda xs, v: sum(x.reshape(-1, 1024) @ v for x in xs))
    vector = jnp.ones(1024)
    times = []
    for _ in range(10):
        begin = time.perf_counter()
        program(arrays, vector).block_until_ready()
        times.append(time.perf_counter() - begin)
    return min(times)


def num_steps(stats: Any) -> int:
    """Steps of an answer."""
    return stats.num_drafts or stats.tokens - 1


def timed(pair: Any, speculator: Any, batch: Any) -> tuple[float, int]:
    """Seconds and steps of a batch's answers."""
    outputs = runner.run_whole(pair, speculator, batch)
    return outputs[0].stats.seconds, max(num_steps(output.stats) for output in outputs)


def measure(pair: Any, method: Any, drafts: int, batch: int, tokens: int) -> None:
    """Prints the table of one way to decode."""
    speculator = api.make_speculator(pair, method, drafts or 1)

    def batch_of(tokens: int) -> batching.Batch:
        params = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
        requests = batching.make_requests(
            pair.tokenizer, pair.target, [PROMPT] * batch, [params] * batch, raw=False
        )
        return batching.make_batches(requests, batch)[0]

    whole, half = batch_of(tokens), batch_of(tokens // 2 + 1)
    pair.compiled.clear()
    walls = []
    for _ in range(REPEATS):
        (long, steps), (short, fewer) = (timed(pair, speculator, one) for one in (whole, half))
        walls.append(1e3 * (long - short) / (steps - fewer))
    programs = [labelled(one.as_text(), pair.target.vocab_size) for one in pair.compiled.values()]
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            stats = runner.run_whole(pair, speculator, whole)[0].stats
        (trace,) = Path(folder).rglob("*.xplane.pb")
        times = read_times(trace, programs)
    if times is None:
        sys.exit("step_times: the trace names no operation of a device")
    steps = num_steps(stats)
    table: dict[str, dict[str, float]] = collections.defaultdict(collections.Counter)
    for name, seconds in times.scopes.items():
        scope, _, part = name.partition(": ")
        if scope != "prefill":
            table[part or REST][scope] += 1e3 * seconds / steps
    used = [pair.params["target"], *([pair.params["drafter"]] if speculator.drafter else [])]
    # Of a kernel in two layouts a step reads one, by itself or joined with others.
    leaves = jax.tree_util.tree_leaves_with_path(used)
    read = sum(
        leaf.nbytes for path, leaf in leaves if path[-1].key != "in_out" and "+" not in path[-1].key
    )
    floor = 1e3 * seconds_to_read(read)
    scopes = sorted({scope for parts in table.values() for scope in parts})
    title = f"{method} K = {drafts}" if drafts else method
    length = f"acceptance length {stats.acceptance_length:.2f}"
    print(f"\n{title}, batch {batch}: {steps} steps, {length}\n")
    print(row(["ms a step", *scopes, "all"]))
    print(row(["---", *["---:"] * (len(scopes) + 1)]))
    for part in (*PARTS, REST):
        cells = [table[part][scope] for scope in scopes]
        print(row([part, *(f"{cell:.2f}" for cell in cells), f"{sum(cells):.2f}"]))
    sums = [sum(parts[scope] for parts in table.values()) for scope in scopes]
    print(row(["all", *(f"{one:.2f}" for one in sums), f"{sum(sums):.2f}"]))
    rate = read / floor / 1e6
    print(f"\nwithout a profiler {statistics.median(walls):.2f} ms")
    print(f"floor {floor:.2f} ms: {read / 1e6:.0f} MB of weights at {rate:.1f} GB/s")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--drafter", default=None)
    parser.add_argument("--method", default=None)
    parser.add_argument("--num-draft-tokens", type=int, default=3)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    options = parser.parse_args()
    # A program from the cache has the names of whoever compiled it first.
    jax.config.update("jax_enable_compilation_cache", False)
    extra = {} if options.drafter is None else {"drafter": options.drafter}
    pair = peagle_jax.load(options.model, **extra)
    ways = DEFAULT
    if options.method is not None:
        ways = ((options.method, 0 if options.method == "none" else options.num_draft_tokens),)
    for method, drafts in ways:
        measure(pair, method, drafts, options.batch, options.max_new_tokens)
    return 0


if __name__ == "__main__":
    sys.exit(main())
