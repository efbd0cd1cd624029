"""A grouped product with weights that stay MXFP4: dequantised where they are multiplied."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt8

from pallas_kernels.mxfp4_matmul import gpu, reference, shapes, tpu
from pallas_kernels.mxfp4_matmul.reference import BLOCK, dequantise
from pallas_kernels.mxfp4_matmul.shapes import Blocks
from pallas_kernels.mxfp4_matmul.visits import running_sum
from pallas_kernels.target import Implementation, choose, current_target

__all__ = ["BLOCK", "Blocks", "dequantise", "mxfp4_matmul", "own_kernel", "running_sum"]


def mxfp4_matmul(
    x: Float[Array, "rows in"],
    sizes: Int[Array, "experts"],
    packed: UInt8[Array, "experts half out"],
    scales: UInt8[Array, "experts blocks out"],
    *,
    implementation: Implementation | None = None,
    blocks: Blocks | None = None,
) -> Float[Array, "rows out"]:
    """Every row times its expert's weights, float32.

    Args:
      x: float32 or bfloat16, sorted by expert: `sizes[e]` rows are expert e's.
      sizes: rows of each expert, in sum at most all of x.
      packed: two elements a byte along the input axis, the first in the low half; see
        `dequantise`.
      scales: a code for each 32 of them.
      implementation: None picks by platform (see `pallas_kernels.target`); an explicit choice
        never falls back.
      blocks: tiling of the kernel; None takes the tuned one.

    Returns:
      The products; 0 in rows past the sum of `sizes`.

    Raises:
      NotImplementedError: an explicit `implementation` that does not exist or does not cover
        these arguments on this device.
      ValueError: packed weights, scales, x and sizes that do not belong together.
    """
    experts, half, outputs = packed.shape
    if (
        x.shape[1] != 2 * half
        or x.shape[1] % BLOCK
        or scales.shape != (experts, 2 * half // BLOCK, outputs)
    ):
        raise ValueError(
            f"x, packed, scales: found {x.shape}, {packed.shape}, {scales.shape}, expected "
            "[rows, in], [experts, in / 2, out], [experts, in / 32, out]"
        )
    if sizes.shape != (experts,) or {packed.dtype.name, scales.dtype.name} != {"uint8"}:
        raise ValueError(
            f"sizes, packed, scales: found {sizes.shape}, {packed.dtype}, {scales.dtype}, "
            f"expected {(experts,)}, a number of rows for each expert, and uint8"
        )
    problem = shapes.Problem(x.shape[0], experts, x.shape[1], outputs, x.dtype.name)
    chosen = _choose(problem, implementation)
    if chosen == "reference":
        return reference.mxfp4_matmul(x, sizes, packed, scales)
    target = current_target()
    if blocks is None:
        blocks = shapes.blocks(problem, target)
    run = tpu.mxfp4_matmul if chosen == "pallas_tpu" else gpu.mxfp4_matmul
    y = run(x, sizes, packed, scales, blocks=blocks, target=target)
    return jnp.where(jnp.arange(x.shape[0])[:, None] < jnp.sum(sizes), y, 0.0)


def own_kernel(dtype: str) -> bool:
    """Whether the device that is traced for has a kernel of its own for activations of a dtype."""
    return _choose(shapes.Problem(1, 1, BLOCK, 1, dtype), None) != "reference"


def _choose(problem: shapes.Problem, implementation: str | None) -> Implementation:
    def limit() -> str | None:
        return shapes.limit(problem)

    return choose("mxfp4_matmul", implementation, {"pallas_tpu": limit, "pallas_gpu": limit})
