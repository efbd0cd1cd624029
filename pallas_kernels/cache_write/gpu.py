"""Cache writes for CUDA GPUs (Triton): a program stores the rows of one key head of a sequence."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

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
    whole = pl.BlockSpec(memory_space=pl.ANY)
    flat = [cache.reshape(-1, dim) for cache in (keys, values)]
    operands = [start.astype(jnp.int32)]
    if page_table is not None:
        operands.append(page_table.astype(jnp.int32))
    aliases = {len(operands) + 2: 0, len(operands) + 3: 1}
    written = pl.pallas_call(
        functools.partial(
            _kernel,
            rows=rows,
            kv_heads=kv_heads,
            page_size=keys.shape[2],
            paged=page_table is not None,
        ),
        grid=(batch, kv_heads),
        in_specs=[whole] * (len(operands) + 4),
        out_specs=[whole, whole],
        out_shape=[out_struct(cache.shape, cache.dtype, cache) for cache in flat],
        input_output_aliases=aliases,
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=bool(target.interpret),
        name="cache_write",
    )(*operands, new_keys, new_values, *flat)
    return written[0].reshape(keys.shape), written[1].reshape(values.shape)


def _kernel(
    start_ref: Any, *refs: Any, rows: int, kv_heads: int, page_size: int, paged: bool
) -> None:
    table_ref = refs[0] if paged else None
    key_ref, value_ref, _, _, key_out, value_out = refs[-6:]
    sequence, head = pl.program_id(0), pl.program_id(1)
    dim = key_ref.shape[3]
    # Triton's tiles have a power of two of rows: the last row is stored again in the rest.
    row = jnp.minimum(jnp.arange(1 << (rows - 1).bit_length()), rows - 1)
    position = start_ref[sequence] + row
    if table_ref is None:
        page = jnp.broadcast_to(sequence, row.shape)
    else:
        page = plgpu.load(table_ref.at[sequence, position // page_size])
    slot = (page * kv_heads + head) * page_size + position % page_size

    shape = (row.shape[0], dim)
    lane = jnp.broadcast_to(jnp.arange(dim)[None, :], shape)
    source = (sequence, jnp.broadcast_to(row[:, None], shape), head, lane)
    goal = (jnp.broadcast_to(slot[:, None], shape), lane)
    for new_ref, out_ref in ((key_ref, key_out), (value_ref, value_out)):
        new = plgpu.load(new_ref.at[source])
        plgpu.store(out_ref.at[goal], new.astype(out_ref.dtype))
