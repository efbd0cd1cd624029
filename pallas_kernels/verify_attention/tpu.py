"""Verification attention for TPU (Mosaic): one pass over the live blocks of a cache.

A grid step is one sequence and some of its key heads. It streams the cache from HBM in blocks
through two buffers: while a block is attended to, the next one is on its way, which at the end of
a step is the first block of the next step. Blocks outside `[first visible slot, last row]` are
never read. A block arrives in chunks: a page each in a paged cache; a contiguous cache is one
page a sequence, a chunk being a divisor of its capacity so that a ring wraps between chunks.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.layout import slots_minor, sublanes
from pallas_kernels.target import Target, out_struct
from pallas_kernels.verify_attention.rows import (
    MASKED,
    group_rows,
    group_sinks,
    pack_tree,
    ungroup_rows,
    visible,
)
from pallas_kernels.verify_attention.shapes import TpuBlocks


class Layout(NamedTuple):
    """What the kernel is specialised to."""

    rows: int
    window: int | None
    page_size: int
    paged: bool
    slots_minor: bool  # blocks are [heads, dim, slots]: see pallas_kernels/layout.py
    steps: int  # grid steps a core
    groups: int  # blocks of key heads a sequence
    blocks: TpuBlocks


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
    blocks: TpuBlocks,
    target: Target,
) -> Float[Array, "batch rows heads dim"]:
    """`page_table` None: page b is the whole, contiguous cache of sequence b, maybe a ring."""
    batch, rows, heads, dim = q.shape
    kv_heads, page_size = keys.shape[1:3]
    group = heads // kv_heads
    tile = sublanes(q.dtype)
    tiles = group_rows(q, kv_heads, tile)
    tile_rows = tiles.shape[2]
    groups = kv_heads // blocks.heads
    cores = blocks.cores if (batch * groups) % blocks.cores == 0 else 1
    layout = Layout(
        rows,
        window,
        page_size,
        page_table is not None,
        slots_minor(dim),
        batch * groups // cores,
        groups,
        blocks,
    )
    block = (blocks.heads, blocks.slots, dim)
    if layout.slots_minor:
        keys, values = keys.swapaxes(2, 3), values.swapaxes(2, 3)
        block = (blocks.heads, dim, blocks.slots)

    scalars = [start.astype(jnp.int32)]
    if page_table is not None:
        scalars.append(page_table.astype(jnp.int32).reshape(-1))

    def at(core: Any, step: Any, *_: Any) -> tuple[Any, Any]:
        index = core * layout.steps + step
        return index // groups, index % groups

    def tile_spec(width: int) -> pl.BlockSpec:
        shape = (None, blocks.heads, tile_rows, width)
        return pl.BlockSpec(shape, lambda *ids: (*at(*ids), 0, 0))

    operands: list[Array] = [tiles]
    specs = [tile_spec(dim)]
    if sinks is not None:
        operands.append(group_sinks(sinks, kv_heads, rows, tile)[..., None])
        specs.append(pl.BlockSpec((blocks.heads, tile_rows, 1), lambda *ids: (at(*ids)[1], 0, 0)))
    if tree is not None:
        packed = pack_tree(tree, group, tile)
        operands.append(packed)
        specs.append(pl.BlockSpec((None, *packed.shape[1:]), lambda *ids: (at(*ids)[0], 0, 0)))
    if not target.interpret:
        # XLA would copy caches that fit to VMEM before the call, dead slots and all.
        keys, values = (
            pltpu.with_memory_space_constraint(cache, pltpu.HBM) for cache in (keys, values)
        )
    buffer = pltpu.VMEM((2, *block), keys.dtype)
    column = pltpu.VMEM((blocks.heads, tile_rows, 1), jnp.float32)
    out = pl.pallas_call(
        functools.partial(
            _kernel, layout=layout, has_sinks=sinks is not None, has_tree=tree is not None
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(cores, layout.steps),
            in_specs=[
                *specs,
                pl.BlockSpec(memory_space=pl.ANY),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=tile_spec(dim),
            scratch_shapes=[
                buffer,
                buffer,
                pltpu.SemaphoreType.DMA((2, 2)),
                pltpu.SMEM((1,), jnp.int32),
                column,
                column,
                pltpu.VMEM((blocks.heads, tile_rows, dim), jnp.float32),
            ],
        ),
        out_shape=out_struct(tiles.shape, q.dtype, q),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=_cost(tiles, keys, page_size * _pages(page_table)),
        interpret=target.interpret,
        name="verify_attention",
    )(*scalars, *operands, keys, values)
    return ungroup_rows(out, rows, heads)


def _pages(page_table: Array | None) -> int:
    return 1 if page_table is None else page_table.shape[1]


def _cost(tiles: Array, keys: Array, context: int) -> pl.CostEstimate:
    """Work at full caches: lengths are not known before the launch."""
    batch, kv_heads, tile_rows, dim = tiles.shape
    scores = batch * kv_heads * tile_rows * context
    cache = 2 * batch * kv_heads * context * dim * keys.dtype.itemsize
    return pl.CostEstimate(
        flops=4 * scores * dim,
        transcendentals=scores,
        bytes_accessed=cache + 2 * tiles.size * tiles.dtype.itemsize,
    )


class _Span(NamedTuple):
    """The live slots of a sequence: positions `low .. end - 1`, in `count` blocks from `first`."""

    low: Any
    end: Any
    first: Any
    count: Any


def _span(start: Any, layout: Layout) -> _Span:
    size = layout.blocks.slots
    end = start + layout.rows
    # Every row is masked by its own window; this is where the first row's begins.
    low = start * 0 if layout.window is None else jnp.maximum(start - layout.window + 1, 0)
    first = low // size
    return _Span(low, end, first, (end + size - 1) // size - first)


def _kernel(*arguments: Any, layout: Layout, has_sinks: bool, has_tree: bool) -> None:
    refs = list(arguments)
    start_ref = refs.pop(0)
    table_ref = refs.pop(0) if layout.paged else None
    q_ref = refs.pop(0)
    sinks_ref = refs.pop(0) if has_sinks else None
    tree_ref = refs.pop(0) if has_tree else None
    k_hbm, v_hbm, out_ref, k_buf, v_buf, arrived, turn_ref, m_ref, l_ref, acc_ref = refs
    size, chunk = layout.blocks.slots, layout.blocks.chunk
    slot_axis = 2 if layout.slots_minor else 1
    step = pl.program_id(1)
    index = pl.program_id(0) * layout.steps + step

    def copies(block: Any, turn: Any, index: Any, act: str) -> None:
        """Starts or awaits the copies of the live chunks of a block of step `index`."""
        sequence, heads = index // layout.groups, index % layout.groups
        span = _span(start_ref[sequence], layout)
        base = block * size
        heads = pl.ds(heads * layout.blocks.heads, layout.blocks.heads)

        def one(i: Any, _: Any) -> None:
            position = base + i * chunk
            if table_ref is None:
                page = sequence
            else:
                width = table_ref.shape[0] // start_ref.shape[0]
                page = table_ref[sequence * width + position // layout.page_size]
            offset = pl.multiple_of(position % layout.page_size, chunk)
            into = pl.ds(pl.multiple_of(i * chunk, chunk), chunk)
            source: tuple[Any, ...] = (page, heads, pl.ds(offset, chunk))
            goal: tuple[Any, ...] = (turn, slice(None), into)
            if layout.slots_minor:
                source = (page, heads, slice(None), pl.ds(offset, chunk))
                goal = (turn, slice(None), slice(None), into)
            for lane, (hbm, buf) in enumerate(((k_hbm, k_buf), (v_hbm, v_buf))):
                copy = pltpu.make_async_copy(hbm.at[source], buf.at[goal], arrived.at[lane, turn])
                copy.start() if act == "start" else copy.wait()

        first = jnp.maximum(span.low - base, 0) // chunk
        last = (jnp.minimum(span.end - base, size) + chunk - 1) // chunk
        jax.lax.fori_loop(first, last, one, None)

    sequence = index // layout.groups
    start = start_ref[sequence]
    span = _span(start, layout)

    @pl.when(step == 0)
    def _first_step() -> None:
        turn_ref[0] = 0
        copies(span.first, 0, index, "start")

    if sinks_ref is None:
        m_ref[...] = jnp.full(m_ref.shape, MASKED, jnp.float32)
        l_ref[...] = jnp.zeros(l_ref.shape, jnp.float32)
    else:
        m_ref[...] = sinks_ref[...]
        l_ref[...] = jnp.ones(l_ref.shape, jnp.float32)
    acc_ref[...] = jnp.zeros(acc_ref.shape, jnp.float32)
    tile_rows = q_ref.shape[1]
    row = jax.lax.broadcasted_iota(jnp.int32, (tile_rows, 1), 0) % layout.rows
    tree = None if tree_ref is None else [tree_ref[:, i : i + 1] for i in range(tree_ref.shape[1])]

    def attend(i: Any, turn: Any) -> Any:
        block = span.first + i

        @pl.when(i + 1 < span.count)
        def _next_block() -> None:
            copies(block + 1, 1 - turn, index, "start")

        @pl.when((i + 1 == span.count) & (step + 1 < layout.steps))
        def _next_step() -> None:
            following = _span(start_ref[(index + 1) // layout.groups], layout)
            copies(following.first, 1 - turn, index + 1, "start")

        copies(block, turn, index, "wait")
        base = block * size

        # Dead slots hold whatever was there, NaN for one: their weight is 0, and 0 * NaN is NaN.
        @pl.when((base < span.low) | (base + size > span.end))
        def _clear_dead() -> None:
            slot = base + jax.lax.broadcasted_iota(jnp.int32, v_buf.shape[1:], slot_axis)
            live = (slot >= span.low) & (slot < span.end)
            v_buf[turn] = jnp.where(live, v_buf[turn], jnp.zeros((), v_buf.dtype))

        position = base + jax.lax.broadcasted_iota(jnp.int32, (1, size), 1)
        seen = visible(position, row, start, layout.rows, layout.window, tree)
        q = q_ref[...]
        scores = _dot(q, k_buf[turn].astype(q.dtype), (2, 3 - slot_axis))
        scores = jnp.where(seen[None], scores, MASKED)
        highest = jnp.maximum(m_ref[...], jnp.max(scores, axis=-1, keepdims=True))
        scale = jnp.exp(m_ref[...] - highest)
        weights = jnp.exp(scores - highest)
        l_ref[...] = scale * l_ref[...] + jnp.sum(weights, axis=-1, keepdims=True)
        m_ref[...] = highest
        acc_ref[...] = scale * acc_ref[...] + _dot(
            weights.astype(q.dtype), v_buf[turn].astype(q.dtype), (2, slot_axis)
        )
        return 1 - turn

    turn_ref[0] = jax.lax.fori_loop(0, span.count, attend, turn_ref[0])
    out_ref[...] = (acc_ref[...] / l_ref[...]).astype(out_ref.dtype)


def _dot(a: Array, b: Array, contract: tuple[int, int]) -> Array:
    """Products head by head, float32 out; float32 operands keep all their bits."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dims = (((contract[0],), (contract[1],)), ((0,), (0,)))
    return jax.lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)
