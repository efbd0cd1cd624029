"""Cache writes for TPU (Mosaic): only the tiles that hold a new row are read and written.

A grid step is one tile of slots of one sequence, all key heads. The caches are aliased to the
outputs, so that every other tile stays where it is. Rows start anywhere in a tile: they are
rolled to their slots in float32 (exact for every cache dtype), where rows can be moved one by
one.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.layout import slot_tile, slots_minor
from pallas_kernels.target import Target, out_struct


def write_cache(
    keys: Float[Array, "pages kv_heads page_size dim"],
    values: Float[Array, "pages kv_heads page_size dim"],
    new_keys: Float[Array, "batch rows kv_heads dim"],
    new_values: Float[Array, "batch rows kv_heads dim"],
    page_table: Int[Array, "batch pages_per_sequence"] | None,
    start: Int[Array, "batch"],
    *,
    target: Target,
) -> tuple[Array, Array]:
    """`page_table` None: page b is the whole, contiguous cache of sequence b, maybe a ring."""
    batch, rows, kv_heads, dim = new_keys.shape
    page_size = keys.shape[2]
    tile = slot_tile(dim, keys.dtype)
    minor = slots_minor(dim)
    slot_axis = 2 if minor else 1
    scalars = [start.astype(jnp.int32)]
    if page_table is not None:
        scalars.append(page_table.astype(jnp.int32).reshape(-1))

    def tiled(new: Array) -> Array:
        new = jnp.pad(new, ((0, 0), (0, -rows % tile), (0, 0), (0, 0)))
        return new.transpose((0, 2, 3, 1) if minor else (0, 2, 1, 3))

    def view(cache: Array) -> Array:
        return cache.swapaxes(2, 3) if minor else cache

    def tile_at(sequence: Any, step: Any, start_ref: Any, *table: Any) -> tuple[Any, ...]:
        position = _tile_number(start_ref[sequence], rows, tile, step) * tile
        page = sequence
        if table:
            width = table[0].shape[0] // batch
            page = table[0][sequence * width + position // page_size]
        place = (position % page_size) // tile
        return (page, 0, 0, place) if minor else (page, 0, place, 0)

    new_spec = pl.BlockSpec(
        (None, *tiled(new_keys).shape[1:]), lambda sequence, *_: (sequence, 0, 0, 0)
    )
    shape = (kv_heads, dim, tile) if minor else (kv_heads, tile, dim)
    cache_spec = pl.BlockSpec((None, *shape), tile_at)
    steps = (rows + tile - 2) // tile + 1
    written = pl.pallas_call(
        functools.partial(_kernel, rows=rows, tile=tile, slot_axis=slot_axis),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(batch, steps),
            in_specs=[new_spec, new_spec, cache_spec, cache_spec],
            out_specs=[cache_spec, cache_spec],
        ),
        out_shape=[out_struct(view(cache).shape, cache.dtype, cache) for cache in (keys, values)],
        input_output_aliases={len(scalars) + 2: 0, len(scalars) + 3: 1},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=0,
            transcendentals=0,
            bytes_accessed=4 * batch * steps * kv_heads * tile * dim * keys.dtype.itemsize,
        ),
        interpret=target.interpret,
        name="cache_write",
    )(*scalars, tiled(new_keys), tiled(new_values), view(keys), view(values))
    return view(written[0]), view(written[1])


def _tile_number(start: Any, rows: int, tile: int, step: Any) -> Any:
    """The tile that a grid step writes; steps past the last tile repeat it, to the same effect."""
    return jnp.minimum(start // tile + step, (start + rows - 1) // tile)


def _kernel(start_ref: Any, *refs: Any, rows: int, tile: int, slot_axis: int) -> None:
    *new_refs, key_ref, value_ref, key_out, value_out = refs[-6:]
    start = start_ref[pl.program_id(0)]
    base = _tile_number(start, rows, tile, pl.program_id(1)) * tile
    for new_ref, old_ref, out_ref in zip(
        new_refs, (key_ref, value_ref), (key_out, value_out), strict=True
    ):
        new = new_ref[...].astype(jnp.float32)
        size = new.shape[slot_axis]
        # Slot t of the tile takes row base + t - start.
        rolled = pltpu.roll(new, jnp.mod(start - base, size), slot_axis)
        rolled = jax.lax.slice_in_dim(rolled, 0, tile, axis=slot_axis)
        row = base - start + jax.lax.broadcasted_iota(jnp.int32, rolled.shape, slot_axis)
        old = old_ref[...]
        # Selected as float32: a mask has the layout of the elements that it was made beside.
        chosen = jnp.where((row >= 0) & (row < rows), rolled, old.astype(jnp.float32))
        out_ref[...] = chosen.astype(old.dtype)
