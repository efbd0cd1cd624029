"""Verification attention for CUDA GPUs (Triton), split along the context where that fills the GPU.

A program attends one tile of query rows of one key head to its part of the live blocks and
leaves an unnormalised sum with its maximum and weight; XLA combines the parts. Sinks join there.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.target import Target, out_struct
from pallas_kernels.verify_attention.rows import (
    MASKED,
    group_rows,
    group_sinks,
    pack_tree,
    ungroup_rows,
    visible,
)
from pallas_kernels.verify_attention.shapes import GpuBlocks


class Layout(NamedTuple):
    """What the kernel is specialised to."""

    rows: int
    window: int | None
    page_size: int
    kv_heads: int
    blocks: GpuBlocks


def verify_attention(
    q: Float[Array, "batch rows heads dim"],
    keys: Float[Array, "pages kv_heads page_size dim"],
    values: Float[Array, "pages kv_heads page_size dim"],
    page_table: Int[Array, "batch pages_per_sequence"] | None,
    start: Int[Array, "batch"],
    *,
    window: int | None,
    sinks: Float[Array, "heads"] | None,
    tree: Bool[Array, "batch rows rows"] | None,
    blocks: GpuBlocks,
    target: Target,
) -> Float[Array, "batch rows heads dim"]:
    """`page_table` None: page b is the whole, contiguous cache of sequence b, maybe a ring."""
    batch, rows, heads, dim = q.shape
    kv_heads, page_size = keys.shape[1:3]
    tiles = group_rows(q, kv_heads, blocks.rows)
    tile_rows = tiles.shape[2]
    layout = Layout(rows, window, page_size, kv_heads, blocks)
    grid = (batch * kv_heads, tile_rows // blocks.rows, blocks.splits)

    def tile_spec(*lead: int, last: tuple[int, ...] = ()) -> pl.BlockSpec:
        # One tile of rows of one key head: [splits?, batch, kv_heads, tile_rows, ...]
        def at(pair: Any, tile: Any, split: Any) -> tuple[Any, ...]:
            lead_at = (split,) if lead else ()
            return (*lead_at, pair // kv_heads, pair % kv_heads, tile, *(0 for _ in last))

        return pl.BlockSpec((*(None for _ in lead), None, None, blocks.rows, *last), at)

    whole = pl.BlockSpec(memory_space=pl.ANY)
    operands = [start.astype(jnp.int32), tiles, keys.reshape(-1, dim), values.reshape(-1, dim)]
    specs = [whole, tile_spec(last=(dim,)), whole, whole]
    if page_table is not None:
        operands.append(page_table.astype(jnp.int32))
        specs.append(whole)
    if tree is not None:
        # Words lead: a program loads a vector of rows for each.
        operands.append(pack_tree(tree, heads // kv_heads, blocks.rows).transpose(0, 2, 1))
        specs.append(whole)
    parts = (blocks.splits, batch, kv_heads, tile_rows)
    acc, highest, total = pl.pallas_call(
        functools.partial(
            _kernel, layout=layout, paged=page_table is not None, has_tree=tree is not None
        ),
        grid=grid,
        in_specs=specs,
        out_specs=[tile_spec(1, last=(dim,)), tile_spec(1), tile_spec(1)],
        out_shape=[
            out_struct((*parts, dim), jnp.float32, q),
            out_struct(parts, jnp.float32, q),
            out_struct(parts, jnp.float32, q),
        ],
        compiler_params=plgpu.CompilerParams(num_warps=blocks.warps, num_stages=blocks.stages),
        interpret=bool(target.interpret),
        name="verify_attention",
    )(*operands)
    sink = None if sinks is None else group_sinks(sinks, kv_heads, rows, blocks.rows)
    return ungroup_rows(_combine(acc, highest, total, sink), rows, heads).astype(q.dtype)


def _combine(
    acc: Float[Array, "splits batch kv_heads tile_rows dim"],
    highest: Float[Array, "splits batch kv_heads tile_rows"],
    total: Float[Array, "splits batch kv_heads tile_rows"],
    sink: Float[Array, "kv_heads tile_rows"] | None,
) -> Float[Array, "batch kv_heads tile_rows dim"]:
    """One softmax from those of the parts; a part without slots has total 0."""
    peak = jnp.max(highest, axis=0)
    if sink is not None:
        peak = jnp.maximum(peak, sink)
    scale = jnp.exp(highest - peak)
    weight = jnp.sum(total * scale, axis=0)
    if sink is not None:
        weight += jnp.exp(sink - peak)
    return jnp.sum(acc * scale[..., None], axis=0) / weight[..., None]


def _kernel(*arguments: Any, layout: Layout, paged: bool, has_tree: bool) -> None:
    refs = list(arguments)
    start_ref, q_ref, k_ref, v_ref = refs[:4]
    out_ref, m_ref, l_ref = refs[-3:]
    table_ref = refs[4] if paged else None
    tree_ref = refs[4 + paged] if has_tree else None
    blocks = layout.blocks
    size = blocks.slots
    pair, split = pl.program_id(0), pl.program_id(2)
    sequence, head = pair // layout.kv_heads, pair % layout.kv_heads
    start = start_ref[sequence]
    end = start + layout.rows
    low = start * 0 if layout.window is None else jnp.maximum(start - layout.window + 1, 0)
    first = low // size
    count = (end + size - 1) // size - first
    share = (count + blocks.splits - 1) // blocks.splits
    begin = first + split * share

    q = q_ref[...]
    lanes = jnp.broadcast_to(jnp.arange(q.shape[1])[None, :], (size, q.shape[1]))
    tile_row = pl.program_id(1) * blocks.rows + jnp.arange(blocks.rows)
    row = (tile_row % layout.rows)[:, None]
    tree = None
    if tree_ref is not None:
        words = range(tree_ref.shape[1])
        tree = [plgpu.load(tree_ref.at[sequence, i, tile_row])[:, None] for i in words]

    def attend(block: Any, carry: Any) -> Any:
        acc, highest, total = carry
        position = block * size + jnp.arange(size)
        live = (position >= low) & (position < end)
        if table_ref is None:
            page = jnp.broadcast_to(sequence, position.shape)
        else:
            number = jnp.where(live, position // layout.page_size, 0)
            page = plgpu.load(table_ref.at[sequence, number], mask=live, other=0)
        slot = (page * layout.kv_heads + head) * layout.page_size + position % layout.page_size
        # Dead slots hold whatever was there, NaN for one: they are not loaded.
        shape = (size, q.shape[1])
        at = (jnp.broadcast_to(jnp.where(live, slot, 0)[:, None], shape), lanes)
        mask = jnp.broadcast_to(live[:, None], shape)
        k = plgpu.load(k_ref.at[at], mask=mask, other=0.0).astype(q.dtype)
        v = plgpu.load(v_ref.at[at], mask=mask, other=0.0).astype(q.dtype)
        seen = visible(position[None, :], row, start, layout.rows, layout.window, tree)
        scores = jnp.where(seen, _dot(q, k.T), MASKED)
        peak = jnp.maximum(highest, jnp.max(scores, axis=-1))
        scale = jnp.exp(highest - peak)
        weights = jnp.exp(scores - peak[:, None])
        total = scale * total + jnp.sum(weights, axis=-1)
        acc = scale[:, None] * acc + _dot(weights.astype(q.dtype), v)
        return acc, peak, total

    carry = (
        jnp.zeros(q.shape, jnp.float32),
        jnp.full((blocks.rows,), MASKED, jnp.float32),
        jnp.zeros((blocks.rows,), jnp.float32),
    )
    finish = jnp.minimum(begin + share, first + count)
    acc, highest, total = jax.lax.fori_loop(begin, finish, attend, carry)
    out_ref[...] = acc
    m_ref[...] = highest
    l_ref[...] = total


def _dot(a: Array, b: Array) -> Array:
    """A product, float32 out; float32 operands keep all their bits (no TF32)."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.dot(a, b, precision=precision, preferred_element_type=jnp.float32)
