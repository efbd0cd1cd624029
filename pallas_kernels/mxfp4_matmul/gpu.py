"""The MXFP4 product for CUDA GPUs (Triton): a program is an expert's meeting with a tile of rows.

Rows of x come as two arrays, the even and the odd inputs, so that a byte's halves are multiplied
where they are: no weight has to be moved beside its neighbour.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int, UInt8

from pallas_kernels.mxfp4_matmul.reference import BLOCK, SCALE_NAN
from pallas_kernels.mxfp4_matmul.shapes import Blocks
from pallas_kernels.mxfp4_matmul.visits import visits
from pallas_kernels.target import Target, out_struct

BYTES = 64  # bytes along the input axis that are multiplied at a time: 4 blocks


def mxfp4_matmul(
    x: Float[Array, "rows in"],
    sizes: Int[Array, "experts"],
    packed: UInt8[Array, "experts half out"],
    scales: UInt8[Array, "experts blocks out"],
    *,
    blocks: Blocks,
    target: Target,
) -> Float[Array, "rows out"]:
    """Rows past the sum of `sizes` come out as anything."""
    rows, (_, half, outputs) = x.shape[0], packed.shape
    table = visits(sizes, rows, blocks.rows)
    padded = (-(-rows // blocks.rows) * blocks.rows, -(-half // BYTES) * BYTES * 2)
    x = jnp.pad(x, ((0, padded[0] - rows), (0, padded[1] - x.shape[1])))
    halves = x.reshape(padded[0], -1, 2).transpose(2, 0, 1)
    whole = pl.BlockSpec(memory_space=pl.ANY)
    out = pl.pallas_call(
        functools.partial(_kernel, blocks=blocks, half=half, outputs=outputs),
        grid=(table.expert.shape[0], -(-outputs // blocks.outputs)),
        in_specs=[whole] * (len(table) + 3),
        out_specs=whole,
        out_shape=out_struct((padded[0], outputs), jnp.float32, x),
        compiler_params=plgpu.CompilerParams(num_warps=blocks.warps, num_stages=blocks.stages),
        interpret=bool(target.interpret),
        name="mxfp4_matmul",
    )(*table, halves, packed, scales)
    return out[:rows]


def _kernel(
    expert_ref: Any,
    tile_ref: Any,
    first_ref: Any,
    end_ref: Any,
    x_ref: Any,
    packed_ref: Any,
    scales_ref: Any,
    out_ref: Any,
    *,
    blocks: Blocks,
    half: int,
    outputs: int,
) -> None:
    visit = pl.program_id(0)
    expert, first, end = expert_ref[visit], first_ref[visit], end_ref[visit]
    top = tile_ref[visit] * blocks.rows
    row = top + jnp.arange(blocks.rows)
    column = pl.program_id(1) * blocks.outputs + jnp.arange(blocks.outputs)
    precision = jax.lax.Precision.HIGHEST if x_ref.dtype == jnp.float32 else None

    def turn(step: Any, y: Array) -> Array:
        byte = step * BYTES + jnp.arange(BYTES)
        there = (byte < half)[:, None] & (column < outputs)[None, :]
        at = (expert, _wide(byte[:, None], there.shape), _wide(column[None, :], there.shape))
        pairs = plgpu.load(packed_ref.at[at], mask=there, other=0).astype(jnp.int32)
        at = (expert, at[1] // (BLOCK // 2), at[2])
        scale = _scales(plgpu.load(scales_ref.at[at], mask=there, other=0).astype(jnp.int32))
        shape = (blocks.rows, BYTES)
        place = (_wide(row[:, None], shape), _wide(byte[None, :], shape))
        for part, nibbles in enumerate((pairs & 15, pairs >> 4)):
            weights = (_elements(nibbles) * scale).astype(x_ref.dtype)
            y += jnp.dot(
                plgpu.load(x_ref.at[part, *place]),
                weights,
                preferred_element_type=jnp.float32,
                precision=precision,
            )
        return y

    @pl.when(end > first)
    def _() -> None:
        zeros = jnp.zeros((blocks.rows, blocks.outputs), jnp.float32)
        y = jax.lax.fori_loop(0, -(-half // BYTES), turn, zeros)
        own = ((row >= first) & (row < end))[:, None] & (column < outputs)[None, :]
        goal = (_wide(row[:, None], own.shape), _wide(column[None, :], own.shape))
        plgpu.store(out_ref.at[goal], y, mask=own)


def _wide(index: Array, shape: tuple[int, int]) -> Array:
    return jnp.broadcast_to(index, shape)


def _scales(codes: Array) -> Array:
    bits = jnp.where(codes == SCALE_NAN, 0x7FC00000, codes << 23)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _elements(nibbles: Array) -> Array:
    """Float32 of four bits; see reference.py."""
    f = jax.lax.bitcast_convert_type(((nibbles & 7) << 22) + 0x3F000000, jnp.float32)
    magnitude = jnp.minimum(f + f - 1, f)
    return jnp.where((nibbles & 8) != 0, -magnitude, magnitude)
