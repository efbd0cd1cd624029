"""The MXFP4 product for TPU (Mosaic): an expert's bytes are read once and stay packed in VMEM.

A grid step is one meeting of an expert with a tile of rows, for some of the outputs. Four bytes
that follow each other along the input axis are one 32-bit word, and a word gives four pairs of
bfloat16 by shifts and masks alone. Eight blocks of 32 inputs are unpacked at a time, word k of
each together, by a load with a stride: row j of a register then belongs to block j, the scales
lie the same way, and are multiplied in without being spread. The inputs of x are put in that order,
256 by 256, by a product with a permutation, once for each tile of rows.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int, UInt8

from pallas_kernels.layout import LANES, sublanes
from pallas_kernels.mxfp4_matmul.reference import BLOCK, SCALE_NAN
from pallas_kernels.mxfp4_matmul.shapes import Blocks, padded_width
from pallas_kernels.mxfp4_matmul.visits import visits
from pallas_kernels.target import Target, out_struct

WORDS = BLOCK // 8  # 32-bit words of a block
BLOCKS = 8  # unpacked at a time: a register's rows
INPUTS = BLOCKS * BLOCK
# Of both halves of a word: the bits of a bfloat16 below the exponent of 0.5 and at its sign.
_MAGNITUDES, _HALVES, _SIGNS = 0x01C001C0, 0x3F003F00, -0x7FFF8000


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
    (rows, width), (_, half, outputs) = x.shape, packed.shape
    tile = min(blocks.rows, -(-rows // sublanes(x.dtype)) * sublanes(x.dtype))
    groups = padded_width(width) // BLOCK
    table = visits(sizes, rows, tile)
    count = table.expert.shape[0]
    if not target.interpret:  # the compiler would first bring idle experts into VMEM too
        packed = pltpu.with_memory_space_constraint(packed, pltpu.HBM)
        scales = pltpu.with_memory_space_constraint(scales, pltpu.HBM)
    columns = min(blocks.outputs, -(-outputs // LANES) * LANES)
    if rows < tile:
        # XLA lays fewer rows than a register has out in a way of their own, which Mosaic does
        # not compile for all of this.
        x = jnp.pad(x, ((0, tile - rows), (0, 0)))

    def of_expert(height: int) -> pl.BlockSpec:
        return pl.BlockSpec(
            (1, height, columns), lambda step, visit, expert, *_: (expert[visit], 0, step)
        )

    # An expert's next visit, of another tile, copies nothing anew.
    moved = min(packed.shape[0], rows) * (half + width // BLOCK) * outputs
    out = pl.pallas_call(
        functools.partial(_kernel, width=width),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(table),
            grid=(-(-outputs // columns), count),
            in_specs=[
                pl.BlockSpec(
                    (tile, groups * BLOCK), lambda step, visit, expert, at, *_: (at[visit], 0)
                ),
                of_expert(groups * BLOCK // 2),
                of_expert(groups),
            ],
            out_specs=pl.BlockSpec(
                (tile, columns), lambda step, visit, expert, at, *_: (at[visit], step)
            ),
            scratch_shapes=[
                pltpu.VMEM((tile, groups * BLOCK), x.dtype),
                *[pltpu.VMEM((groups * WORDS, LANES), jnp.int32)] * _registers(columns),
            ],
        ),
        out_shape=out_struct((-(-rows // tile) * tile, outputs), jnp.float32, x),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=2 * count * tile * width * outputs,
            transcendentals=0,
            bytes_accessed=moved + x.size * x.dtype.itemsize + 4 * rows * outputs,
        ),
        interpret=target.interpret,
        name="mxfp4_matmul",
    )(*table, x, packed, scales)
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
    ordered_ref: Any,
    *word_refs: Any,
    width: int,
) -> None:
    visit = pl.program_id(1)
    before = tile_ref[jnp.maximum(visit - 1, 0)]
    tile, columns = x_ref.shape[0], len(word_refs) * LANES

    @pl.when((visit == 0) | (tile_ref[visit] != before))
    def _() -> None:
        out_ref[...] = jnp.zeros(out_ref.shape, out_ref.dtype)
        _put_in_order(x_ref, ordered_ref, width)

    def turn(step: Any, carry: Any) -> Any:
        at = pl.ds(pl.multiple_of(step * columns, columns), columns)
        scale = _scales(scales_ref[0, :, at], width // BLOCK)
        words = pltpu.bitcast(packed_ref[0, :, at], jnp.int32)
        for part, word_ref in enumerate(word_refs):
            word_ref[...] = words[:, part * LANES : (part + 1) * LANES]
        y = _product(ordered_ref, word_refs, scale)
        row = tile_ref[visit] * tile + jax.lax.broadcasted_iota(jnp.int32, y.shape, 0)
        own = (row >= first_ref[visit]) & (row < end_ref[visit])
        out_ref[:, at] = jnp.where(own, y, out_ref[:, at])
        return carry

    @pl.when(end_ref[visit] > first_ref[visit])
    def _() -> None:
        jax.lax.fori_loop(0, out_ref.shape[1] // columns, turn, 0)


def _put_in_order(x_ref: Any, ordered_ref: Any, width: int) -> None:
    """The rows' inputs as `_product` unpacks weights, 0 past the last.

    Of each 256, element 32 j + 8 k + 4 h + 2 c + n, which stands in half n of byte c + 2 h of word
    k of block j, comes to 64 k + 32 c + 16 n + 2 j + h.
    """
    shape = (INPUTS, INPUTS)
    source = jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    goal = jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    # Each bit of `goal` where it stands in the element that comes there.
    block, half_word, word = goal >> 1 & 7, goal & 1, goal >> 6
    wanted = block << 5 | word << 3 | half_word << 2 | (goal >> 5 & 1) << 1 | goal >> 4 & 1
    order = (source == wanted).astype(x_ref.dtype)
    for at in range(0, x_ref.shape[1], INPUTS):
        x = x_ref[:, at : at + INPUTS]
        there = at + jax.lax.broadcasted_iota(jnp.int32, x.shape, 1) < width
        x = jnp.where(there, x, jnp.zeros_like(x))
        moved = jnp.dot(x, order, preferred_element_type=jnp.float32, precision=_precision(x.dtype))
        ordered_ref[:, at : at + INPUTS] = moved.astype(x.dtype)


def _precision(dtype: Any) -> jax.lax.Precision | None:
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None


def _registers(columns: int) -> int:
    """Registers beside each other that are unpacked at a time: as wide as a matrix unit, 256."""
    return 2 if columns % (2 * LANES) == 0 else 1


def _product(ordered_ref: Any, word_refs: Sequence[Any], scale: Array) -> Array:
    """A tile of rows times some of an expert's outputs, float32."""
    dtype = ordered_ref.dtype
    y = jnp.zeros((ordered_ref.shape[0], scale.shape[1]), jnp.float32)
    for group in range(ordered_ref.shape[1] // INPUTS):
        own = scale[2 * BLOCKS * group : 2 * BLOCKS * (group + 1)]
        unpacked = []
        for word in range(WORDS):
            # Loads with a stride are for arrays of one register's width.
            rows = pl.ds(group * BLOCKS * WORDS + word, BLOCKS, stride=WORDS)
            words = jnp.concatenate([ref[rows, :] for ref in word_refs], axis=1)
            unpacked += [(_pairs(words, 4 * nibble) * own).astype(dtype) for nibble in range(4)]
        y += jnp.dot(
            ordered_ref[:, group * INPUTS : (group + 1) * INPUTS],
            jnp.concatenate(unpacked, axis=0),
            preferred_element_type=jnp.float32,
            precision=_precision(dtype),
        )
    return y


def _scales(codes: Array, blocks: int) -> Array:
    """Row 2 j + h is the scale of block j, bfloat16; 0 past the last block, where whatever the
    bytes are, their elements are finite."""
    codes = codes.astype(jnp.int32)
    bits = jnp.where(codes == SCALE_NAN, 0x7FC0, codes << 7)
    row = jax.lax.broadcasted_iota(jnp.int32, bits.shape, 0)
    bits = jnp.where(row < blocks, bits, 0)
    return pltpu.bitcast(bits | bits << 16, jnp.bfloat16)


def _pairs(words: Array, at: int) -> Array:
    """The elements whose four bits begin at bit `at` of each half of a word: row 2 j + h from half
    h of row j. How the magnitude comes about: see reference.py."""

    def moved(by: int) -> Array:
        return words << by if by >= 0 else words >> -by

    f = pltpu.bitcast((moved(6 - at) & _MAGNITUDES) + _HALVES, jnp.bfloat16)
    magnitude = pltpu.bitcast(jnp.minimum(f + f - 1, f), jnp.int32)
    return pltpu.bitcast(magnitude | (moved(12 - at) & _SIGNS), jnp.bfloat16)
