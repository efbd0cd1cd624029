#!/usr/bin/env python3
"""Time products of few rows with SmolLM2-sized kernels on this device: what docs/design.md says.

Prints a Markdown table: milliseconds for a chain of 60 pairs of products with float32 kernels
[1536, 576] and [576, 1536], as `x @ W.T`, as `(W @ x.T).T` left to XLA, and as the models compute
it from one layout and from both. The best of several repeats, interleaved.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax

from peagle_jax.markdown import row
from peagle_jax.models.kernel_forms import TwoWayKernel
from peagle_jax.models.layers import matmul_out_in

# As many as a model of 135M parameters has weights: more than any cache holds.
PAIRS = 60
ROWS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 64, 128, 512)


def direct(x: jax.Array, kernel: TwoWayKernel) -> jax.Array:
    """`x @ kernel.T`."""
    return jax.lax.dot_general(x, kernel.out_in, (((1,), (1,)), ((), ())))


def turned(x: jax.Array, kernel: TwoWayKernel) -> jax.Array:
    """`(kernel @ x.T).T`."""
    return jax.lax.dot_general(kernel.out_in, x, (((1,), (1,)), ((), ()))).T


def one_layout(x: jax.Array, kernel: TwoWayKernel) -> jax.Array:
    """As of a kernel that is held once."""
    return matmul_out_in(x, kernel.out_in)


WAYS = {
    "x @ W.T": direct,
    "(W @ x.T).T": turned,
    "one layout": one_layout,
    "both layouts": matmul_out_in,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=10)
    repeats = parser.parse_args().repeats
    keys = jax.random.split(jax.random.key(0), PAIRS)

    def kernels(shape: tuple[int, int]) -> list[TwoWayKernel]:
        made = [0.02 * jax.random.normal(key, shape) for key in keys]
        return [TwoWayKernel(one, jax.numpy.array(one.T)) for one in made]

    up, down = kernels((1536, 576)), kernels((576, 1536))
    print(row(["rows", *WAYS]))
    print(row(["---"] * (1 + len(WAYS))))
    for rows in ROWS:
        x = jax.random.normal(jax.random.key(1), (rows, 576))
        programs = {}
        for name, product in WAYS.items():

            def chain(x, up, down, product=product):
                for a, b in zip(up, down, strict=True):
                    x = x + 1e-3 * product(jax.nn.silu(product(x, a)), b)
                return x

            programs[name] = jax.jit(chain).lower(x, up, down).compile()
            jax.block_until_ready(programs[name](x, up, down))
        best = dict.fromkeys(programs, float("inf"))
        for _ in range(repeats):
            for name, program in programs.items():
                begin = time.perf_counter()
                jax.block_until_ready(program(x, up, down))
                best[name] = min(best[name], time.perf_counter() - begin)
        print(row([str(rows), *(f"{1e3 * value:.1f}" for value in best.values())]), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
