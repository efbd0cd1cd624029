"""Plain-JAX cache writes: the meaning every kernel is tested against."""

from __future__ import annotations

from typing import Any

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
        if rows.shape[2] == 1 < cache.shape[2]:
            return jax.lax.platform_dependent(
                cache, rows, start[0], cpu=_write_beside_neighbour, default=_write_slice
            )
        return _write_slice(cache, rows, start[0])
    return jax.vmap(lambda c, r, s: jax.lax.dynamic_update_slice(c, r, (0, s, 0)))(
        cache, rows, start
    )


def _write_slice(cache: Array, rows: Array, start: Array) -> Array:
    return jax.lax.dynamic_update_slice(cache, rows, (0, 0, start, 0))


def _write_beside_neighbour(cache: Array, row: Array, start: Array) -> Array:
    """One row, together with what its neighbour holds: of one alone XLA on CPU would make an
    update for each reader, each on a copy of the cache."""
    at = jnp.minimum(start, cache.shape[2] - 2)
    pair = jax.lax.dynamic_slice_in_dim(cache, at, 2, axis=2)
    here = jnp.arange(2)[:, None] == start - at
    return _write_slice(cache, jnp.where(here, row, pair), at)


def _write_ring(cache: Array, rows: Array, start: Array) -> Array:
    """Two slice updates: the rows up to the ring's end, and those that come round.

    Both take whole blocks of `rows` slots, so that their sizes are static; where a block
    holds no new row it writes back what was there.
    """
    count, capacity = rows.shape[1], cache.shape[2]
    rows = jnp.swapaxes(rows, 1, 2).astype(cache.dtype)
    slot = start % capacity
    at = jnp.minimum(slot, capacity - count)
    round_ = slot - at  # how many rows come round
    index = jnp.arange(count)
    source = (index - round_[:, None]) % count
    turned = jnp.take_along_axis(rows, source[:, None, :, None], axis=2)
    comes_round = (index < round_[:, None])[:, None, :, None]

    def write(ring: Array, turned: Array, comes_round: Array, at: Array) -> Array:
        shape = turned.shape
        for begin, old in ((at, comes_round), (jnp.zeros_like(at), ~comes_round)):
            place: list[Any] = [0] * (ring.ndim - 2) + [begin, 0]
            there = jax.lax.dynamic_slice(ring, place, shape)
            block = jnp.where(old, there, turned)
            ring = jax.lax.dynamic_update_slice(ring, block, place)
        return ring

    if cache.shape[0] == 1:
        return write(cache, turned, comes_round, at[0])
    return jax.vmap(write)(cache, turned, comes_round, at)
