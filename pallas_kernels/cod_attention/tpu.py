"""Training attention for TPU (Mosaic): how the kernels of `tpu_kernels` are launched.

Grid steps share nothing, so that two cores can split them.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.cod_attention import tpu_kernels as kernels
from pallas_kernels.cod_attention.shapes import TpuBlocks
from pallas_kernels.cod_attention.tiles import tile_bounds
from pallas_kernels.target import Target, out_struct

_ANYWHERE = pl.BlockSpec(memory_space=pl.ANY)
_PARALLEL = pltpu.CompilerParams(dimension_semantics=("parallel",) * 3)


def forward(
    q: Float[Array, "batch kv_heads group dim rows"],
    keys: Float[Array, "batch kv_heads dim slots"],
    values: Float[Array, "batch kv_heads dim slots"],
    spans: Int[Array, "batch tiles 2 row"],
    extra: Float[Array, "batch kv_heads group rows"],
    blocks: TpuBlocks,
    target: Target,
) -> tuple[Array, Array]:
    """See `flash.attend_tiles`. What the last tile has past the last row goes nowhere."""
    batch, kv_heads, group, dim, _ = q.shape
    columns = group * blocks.rows
    row = pltpu.VMEM((1, columns), jnp.float32)
    return pl.pallas_call(
        kernels.forward_kernel,
        grid=(batch, kv_heads, spans.shape[1]),
        in_specs=[
            _bounds_spec(spans),
            _tile_spec(q, blocks),
            _spans_spec(spans),
            _tile_spec(extra, blocks),
            _ANYWHERE,
            _ANYWHERE,
        ],
        out_specs=[_tile_spec(q, blocks), _tile_spec(extra, blocks)],
        out_shape=[out_struct(q.shape, q.dtype, q), out_struct(extra.shape, jnp.float32, q)],
        scratch_shapes=[
            *_streamed(keys, blocks),
            pltpu.VMEM((blocks.keys, columns), jnp.float32),
            pltpu.VMEM((dim, columns), q.dtype),
            row,
            row,
            pltpu.VMEM((dim, columns), jnp.float32),
        ],
        compiler_params=_PARALLEL,
        cost_estimate=_cost(q, keys, 2, 2 * q.nbytes + keys.nbytes * spans.shape[1]),
        interpret=target.interpret,
        name="cod_attention",
    )(_bounds(spans), q, spans, extra, keys, values)


def backward(
    q: Float[Array, "batch kv_heads group dim rows"],
    keys: Float[Array, "batch kv_heads dim slots"],
    values: Float[Array, "batch kv_heads dim slots"],
    spans: Int[Array, "batch tiles 2 row"],
    d_out: Float[Array, "batch kv_heads group dim rows"],
    total: Float[Array, "batch kv_heads group rows"],
    shift: Float[Array, "batch kv_heads group rows"],
    blocks: TpuBlocks,
    target: Target,
) -> tuple[Array, Array, Array]:
    """Gradients of q, keys and values; see `flash.Kernels`."""
    batch, kv_heads, group, dim, rows = q.shape
    columns = group * blocks.rows
    scores = pltpu.VMEM((blocks.keys, columns), jnp.float32)
    tile = pltpu.VMEM((dim, columns), q.dtype)
    bounds = _bounds(spans)
    d_q = pl.pallas_call(
        kernels.d_queries_kernel,
        grid=(batch, kv_heads, spans.shape[1]),
        in_specs=[
            _bounds_spec(spans),
            _tile_spec(q, blocks),
            _spans_spec(spans),
            _tile_spec(q, blocks),
            _tile_spec(total, blocks),
            _tile_spec(total, blocks),
            _ANYWHERE,
            _ANYWHERE,
        ],
        out_specs=_tile_spec(q, blocks),
        out_shape=out_struct(q.shape, q.dtype, q),
        scratch_shapes=[
            *_streamed(keys, blocks),
            scores,
            tile,
            tile,
            pltpu.VMEM((dim, columns), jnp.float32),
        ],
        compiler_params=_PARALLEL,
        cost_estimate=_cost(q, keys, 3, 3 * q.nbytes + keys.nbytes * spans.shape[1]),
        interpret=target.interpret,
        name="cod_attention_d_queries",
    )(bounds, q, spans, d_out, total, shift, keys, values)

    # Tiles are copied by hand below: whole ones.
    past = -rows % blocks.rows
    q, d_out, total, shift = (
        jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, past)]) for x in (q, d_out, total, shift)
    )
    of_block = pl.BlockSpec((None, None, dim, blocks.keys), lambda b, h, block: (b, h, 0, block))
    buffers = [
        pltpu.VMEM((2, *x.shape[2:-1], blocks.rows), x.dtype) for x in (q, d_out, total, shift)
    ]
    sums = pltpu.VMEM((dim, blocks.keys), jnp.float32)
    count = keys.shape[3] // blocks.keys
    d_keys, d_values = pl.pallas_call(
        kernels.d_keys_kernel,
        grid=(batch, kv_heads, count),
        in_specs=[_bounds_spec(spans), of_block, of_block, *[_ANYWHERE] * 5],
        out_specs=[of_block, of_block],
        out_shape=[out_struct(keys.shape, keys.dtype, q)] * 2,
        scratch_shapes=[
            *buffers,
            pltpu.VMEM((2, *spans.shape[2:]), jnp.int32),
            pltpu.SemaphoreType.DMA((5, 2)),
            pltpu.SMEM(spans.shape[1:2], jnp.int32),
            scores,
            sums,
            sums,
        ],
        compiler_params=_PARALLEL,
        cost_estimate=_cost(q, keys, 4, 4 * keys.nbytes + q.nbytes * count),
        interpret=target.interpret,
        name="cod_attention_d_keys",
    )(bounds, keys, values, q, d_out, total, shift, spans)
    return d_q, d_keys, d_values


def _bounds(spans: Array) -> Array:
    bounds = tile_bounds(spans)
    return bounds.reshape(bounds.shape[0], 1, -1)


def _bounds_spec(spans: Array) -> pl.BlockSpec:
    """Bounds of all tiles of a sequence, in scalar memory."""
    shape = (None, 1, 4 * spans.shape[1])
    return pl.BlockSpec(shape, lambda b, h, i: (b, 0, 0), memory_space=pltpu.SMEM)


def _tile_spec(x: Array, blocks: TpuBlocks) -> pl.BlockSpec:
    """A tile's rows of `[batch, kv_heads, group, .., rows]`."""
    inner = x.shape[2:-1]
    return pl.BlockSpec(
        (None, None, *inner, blocks.rows), lambda b, h, i: (b, h, *(0 for _ in inner), i)
    )


def _spans_spec(spans: Array) -> pl.BlockSpec:
    return pl.BlockSpec((None, None, *spans.shape[2:]), lambda b, h, i: (b, i, 0, 0))


def _streamed(keys: Array, blocks: TpuBlocks) -> tuple[Any, Any, Any]:
    """Two blocks of keys and of values, and who says that they are there."""
    buffer = pltpu.VMEM((2, keys.shape[2], blocks.keys), keys.dtype)
    return buffer, buffer, pltpu.SemaphoreType.DMA((2, 2))


def _cost(q: Array, keys: Array, products: int, moved: int) -> pl.CostEstimate:
    """Work where every row sees half of the keys, as in a row of one document: so many products
    of scores or their likes with queries, keys or values."""
    pairs = q.size // q.shape[3] * keys.shape[3] // 2
    return pl.CostEstimate(
        flops=2 * products * pairs * q.shape[3], transcendentals=pairs, bytes_accessed=moved
    )
