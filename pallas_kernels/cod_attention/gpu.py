"""Training attention for CUDA GPUs (Triton): the kernels of `tpu`, a head's tile a program.

The gradient of keys and values is one program a block of them and key head, which goes through the
tiles that see the block, head by head.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.cod_attention.predicate import MASKED
from pallas_kernels.cod_attention.shapes import GpuBlocks
from pallas_kernels.cod_attention.tiles import tile_bounds
from pallas_kernels.target import Target, out_struct


def forward(
    q: Float[Array, "batch kv_heads group dim rows"],
    keys: Float[Array, "batch kv_heads dim slots"],
    values: Float[Array, "batch kv_heads dim slots"],
    spans: Int[Array, "batch tiles 2 row"],
    extra: Float[Array, "batch kv_heads group rows"],
    blocks: GpuBlocks,
    target: Target,
) -> tuple[Array, Array]:
    """See `flash.attend_tiles`."""
    rows = q.shape[-1]
    q, extra = _in_whole_tiles(blocks, q, extra)
    batch, kv_heads, group = q.shape[:3]
    of_q, of_row = _tile_spec(q, blocks), _tile_spec(extra, blocks)
    bounds, of_spans = _row_specs(kv_heads, spans)
    out, total = _call(
        "cod_attention",
        functools.partial(_forward_kernel, size=blocks.keys),
        (batch * kv_heads, spans.shape[1], group),
        (tile_bounds(spans), q, spans, extra, keys, values),
        [bounds, of_q, of_spans, of_row, _whole(keys), _whole(keys)],
        [of_q, of_row],
        [out_struct(q.shape, q.dtype, q), out_struct(extra.shape, jnp.float32, q)],
        blocks,
        target,
    )
    return out[..., :rows], total[..., :rows]


def backward(
    q: Float[Array, "batch kv_heads group dim rows"],
    keys: Float[Array, "batch kv_heads dim slots"],
    values: Float[Array, "batch kv_heads dim slots"],
    spans: Int[Array, "batch tiles 2 row"],
    d_out: Float[Array, "batch kv_heads group dim rows"],
    total: Float[Array, "batch kv_heads group rows"],
    shift: Float[Array, "batch kv_heads group rows"],
    blocks: GpuBlocks,
    target: Target,
) -> tuple[Array, Array, Array]:
    """Gradients of q, keys and values; see `flash.Kernels`."""
    rows = q.shape[-1]
    q, d_out, total, shift = _in_whole_tiles(blocks, q, d_out, total, shift)
    batch, kv_heads, group, dim, _ = q.shape
    of_q, of_row = _tile_spec(q, blocks), _tile_spec(total, blocks)
    bounds, of_spans = _row_specs(kv_heads, spans)
    [d_q] = _call(
        "cod_attention_d_queries",
        functools.partial(_d_queries_kernel, size=blocks.keys),
        (batch * kv_heads, spans.shape[1], group),
        (tile_bounds(spans), q, spans, d_out, total, shift, keys, values),
        [bounds, of_q, of_spans, of_q, of_row, of_row, _whole(keys), _whole(keys)],
        [of_q],
        [out_struct(q.shape, q.dtype, q)],
        blocks,
        target,
    )
    of_block = pl.BlockSpec(
        (None, None, dim, blocks.keys), lambda bh, i: (bh // kv_heads, bh % kv_heads, 0, i)
    )
    of_sequence = pl.BlockSpec((None, spans.shape[1], 4), lambda bh, i: (bh // kv_heads, 0, 0))
    all_spans = pl.BlockSpec((None, *spans.shape[1:]), lambda bh, i: (bh // kv_heads, 0, 0, 0))
    d_keys, d_values = _call(
        "cod_attention_d_keys",
        _d_keys_kernel,
        (batch * kv_heads, keys.shape[3] // blocks.keys),
        (tile_bounds(spans), keys, values, q, d_out, total, shift, spans),
        [
            *(of_sequence, of_block, of_block),
            *(_whole(x) for x in (q, d_out, total, shift)),
            all_spans,
        ],
        [of_block, of_block],
        [out_struct(keys.shape, keys.dtype, q)] * 2,
        blocks,
        target,
    )
    return d_q[..., :rows], d_keys, d_values


def _in_whole_tiles(blocks: GpuBlocks, *arrays: Array) -> list[Array]:
    """Arrays whose last axis is padded to whole tiles: loads here have no edge."""
    past = -arrays[0].shape[-1] % blocks.rows
    return [jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, past)]) for x in arrays]


def _tile_spec(x: Array, blocks: GpuBlocks) -> pl.BlockSpec:
    """One head's rows of a tile of `[batch, kv_heads, group, .., rows]`."""
    kv_heads, inner = x.shape[1], x.shape[3:-1]

    def at(bh: Any, i: Any, g: Any) -> tuple[Any, ...]:
        return (bh // kv_heads, bh % kv_heads, g, *(0 for _ in inner), i)

    return pl.BlockSpec((None, None, None, *inner, blocks.rows), at)


def _row_specs(kv_heads: int, spans: Array) -> tuple[pl.BlockSpec, pl.BlockSpec]:
    """A tile's bounds, and its spans."""
    return (
        pl.BlockSpec((None, None, 4), lambda bh, i, g: (bh // kv_heads, i, 0)),
        pl.BlockSpec((None, None, *spans.shape[2:]), lambda bh, i, g: (bh // kv_heads, i, 0, 0)),
    )


def _whole(x: Array) -> pl.BlockSpec:
    """All that a pair of sequence and key head has of an array."""
    kv_heads, rest = x.shape[1], x.shape[2:]

    def at(bh: Any, *_: Any) -> tuple[Any, ...]:
        return (bh // kv_heads, bh % kv_heads, *(0 for _ in rest))

    return pl.BlockSpec((None, None, *rest), at)


def _call(
    name: str,
    kernel: Any,
    grid: tuple[int, ...],
    operands: tuple[Array, ...],
    in_specs: list[Any],
    out_specs: list[Any],
    out_shape: list[Any],
    blocks: GpuBlocks,
    target: Target,
) -> Any:
    return pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=out_shape,
        compiler_params=plgpu.CompilerParams(num_warps=blocks.warps, num_stages=blocks.stages),
        interpret=bool(target.interpret),
        name=name,
    )(*operands)


def _scores(q: Array, keys: Array, first: Array, last: Array, begin: Any) -> Array:
    """Scores `[keys, rows]` of a head's rows and the block of keys from index `begin` on."""
    index = begin + jnp.arange(keys.shape[1])[:, None]
    seen = (index >= first[None]) & (index <= last[None])
    return jnp.where(seen, _dot(keys.T, q), MASKED)


def _blocks_of(bounds_ref: Any, size: int) -> tuple[Any, Any]:
    """First block of keys that a tile sees, and the one after the last."""
    low, high = bounds_ref[0], bounds_ref[1]
    block = low // size
    return block, jnp.where(high < low, block, high // size + 1)


def _scaled(q: Array) -> Array:
    return q * jnp.asarray(q.shape[0] ** -0.5, q.dtype)


def _forward_kernel(
    bounds_ref: Any,
    q_ref: Any,
    spans_ref: Any,
    extra_ref: Any,
    k_ref: Any,
    v_ref: Any,
    out_ref: Any,
    total_ref: Any,
    *,
    size: int,
) -> None:
    q, first, last = _scaled(q_ref[...]), spans_ref[0], spans_ref[1]

    def attend(block: Any, carry: Any) -> Any:
        acc, highest, total = carry
        at = pl.ds(block * size, size)
        k, v = k_ref[:, at], v_ref[:, at]
        scores = _scores(q, k, first, last, block * size)
        peak = jnp.maximum(highest, jnp.max(scores, axis=0))
        scale = jnp.exp(highest - peak)
        weights = jnp.exp(scores - peak[None])
        total = scale * total + jnp.sum(weights, axis=0)
        return scale[None] * acc + _dot(v, weights.astype(v.dtype)), peak, total

    extra = extra_ref[...]
    carry = (jnp.zeros(q.shape, jnp.float32), extra, jnp.ones(extra.shape, jnp.float32))
    acc, highest, total = jax.lax.fori_loop(*_blocks_of(bounds_ref, size), attend, carry)
    out_ref[...] = (acc / total[None]).astype(out_ref.dtype)
    total_ref[...] = highest + jnp.log(total)


def _d_queries_kernel(
    bounds_ref: Any,
    q_ref: Any,
    spans_ref: Any,
    d_out_ref: Any,
    total_ref: Any,
    shift_ref: Any,
    k_ref: Any,
    v_ref: Any,
    d_q_ref: Any,
    *,
    size: int,
) -> None:
    q, d_out, first, last = _scaled(q_ref[...]), d_out_ref[...], spans_ref[0], spans_ref[1]
    total, shift = total_ref[...], shift_ref[...]

    def add(block: Any, acc: Any) -> Any:
        at = pl.ds(block * size, size)
        k, v = k_ref[:, at], v_ref[:, at]
        scores = _scores(q, k, first, last, block * size)
        _, d_scores = _gradients(scores, v, d_out, total, shift)
        return acc + _dot(k, d_scores.astype(k.dtype))

    acc = jnp.zeros(q.shape, jnp.float32)
    acc = jax.lax.fori_loop(*_blocks_of(bounds_ref, size), add, acc)
    d_q_ref[...] = (acc * q.shape[0] ** -0.5).astype(d_q_ref.dtype)


def _d_keys_kernel(
    bounds_ref: Any,
    k_ref: Any,
    v_ref: Any,
    q_ref: Any,
    d_out_ref: Any,
    total_ref: Any,
    shift_ref: Any,
    spans_ref: Any,
    d_k_ref: Any,
    d_v_ref: Any,
) -> None:
    k, v = k_ref[...], v_ref[...]
    rows = spans_ref.shape[2]
    begin = pl.program_id(1) * k.shape[1]

    def of_tile(tile: Any, carry: Any) -> Any:
        first, last = spans_ref[tile, 0], spans_ref[tile, 1]
        at = pl.ds(tile * rows, rows)

        def of_head(head: Any, carry: Any) -> Any:
            d_k, d_v = carry
            q, d_out = _scaled(q_ref[head, :, at]), d_out_ref[head, :, at]
            total, shift = total_ref[head, at], shift_ref[head, at]
            scores = _scores(q, k, first, last, begin)
            weights, d_scores = _gradients(scores, v, d_out, total, shift)
            d_k += _dot(q, d_scores.astype(q.dtype).T)
            d_v += _dot(d_out, weights.astype(q.dtype).T)
            return d_k, d_v

        low, high = bounds_ref[tile, 0], bounds_ref[tile, 1]
        seen = (low < begin + k.shape[1]) & (high >= begin)
        # No turn of the loop where the tile sees nothing of the block.
        return jax.lax.fori_loop(0, jnp.where(seen, q_ref.shape[0], 0), of_head, carry)

    zeros = jnp.zeros(k.shape, jnp.float32)
    d_k, d_v = jax.lax.fori_loop(0, spans_ref.shape[0], of_tile, (zeros, zeros))
    d_k_ref[...] = d_k.astype(d_k_ref.dtype)
    d_v_ref[...] = d_v.astype(d_v_ref.dtype)


def _gradients(
    scores: Array, values: Array, d_out: Array, total: Array, shift: Array
) -> tuple[Array, Array]:
    """Weights of a block's scores, and the gradient of the scores."""
    weights = jnp.exp(scores - total[None])
    return weights, weights * (_dot(values.T, d_out) - shift[None])


def _dot(a: Array, b: Array) -> Array:
    """A product, float32 out; float32 operands keep all their bits (no TF32)."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.dot(a, b, precision=precision, preferred_element_type=jnp.float32)
