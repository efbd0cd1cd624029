"""Plain-JAX cache writes: the meaning every kernel is tested against."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def write_cache(
    keys: Float[Array, "batch kv_heads capacity dim"],
    values: Float[Array, "batch kv_heads capacity dim"],
    new_keys: Float[Array, "batch rows kv_heads dim"],
    new_values: Float[Array, "batch rows kv_heads dim"],
    start: Int[Array, "batch"],
    *,
    ring: bool = False,
) -> tuple[Array, Array]:
    """See `pallas_kernels.cache_write.write_cache`."""
    write = _write_ring if ring else _write_rows
    return write(keys, new_keys, start), write(values, new_values, start)


def write_cache_paged(
    key_pages: Float[Array, "pages kv_heads page_size dim"],
    value_pages: Float[Array, "pages kv_heads page_size dim"],
    new_keys: Float[Array, "batch rows kv_heads dim"],
    new_values: Float[Array, "batch rows kv_heads dim"],
    page_table: Int[Array, "batch pages_per_sequence"],
    start: Int[Array, "batch"],
) -> tuple[Array, Array]:
    """See `pallas_kernels.cache_write.write_cache_paged`."""
    page_size = key_pages.shape[2]
    position = start[:, None] + jnp.arange(new_keys.shape[1])
    page = jnp.take_along_axis(page_table, position // page_size, axis=1)
    slot = position % page_size
    return (
        key_pages.at[page, :, slot].set(new_keys.astype(key_pages.dtype)),
        value_pages.at[page, :, slot].set(new_values.astype(value_pages.dtype)),
    )


def _write_rows(cache: Array, rows: Array, start: Array) -> Array:
    rows = jnp.swapaxes(rows, 1, 2).astype(cache.dtype)
    if cache.shape[0] == 1:
        # One slice update; the batched form below becomes a scatter loop.
        return jax.lax.dynamic_update_slice(cache, rows, (0, 0, start[0], 0))
    return jax.vmap(lambda c, r, s: jax.lax.dynamic_update_slice(c, r, (0, s, 0)))(
        cache, rows, start
    )


def _write_ring(cache: Array, rows: Array, start: Array) -> Array:
    slot = (start[:, None] + jnp.arange(rows.shape[1])) % cache.shape[2]
    sequence = jnp.arange(cache.shape[0])[:, None]
    return cache.at[sequence, :, slot].set(rows.astype(cache.dtype))
