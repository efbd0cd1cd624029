"""New rows into a key-value cache, in place: K+1 rows a sequence at ragged positions."""

from __future__ import annotations

from jaxtyping import Array, Float, Int

from pallas_kernels.cache_write import gpu, reference, tpu
from pallas_kernels.layout import check_lengths, slot_tile
from pallas_kernels.target import Implementation, choose, current_target

__all__ = ["write_cache", "write_cache_paged"]

MAX_ROWS = 64
HEAD_DIMS = (64, 128)


def write_cache(
    keys: Float[Array, "batch kv_heads capacity dim"],
    values: Float[Array, "batch kv_heads capacity dim"],
    new_keys: Float[Array, "batch rows kv_heads dim"],
    new_values: Float[Array, "batch rows kv_heads dim"],
    start: Int[Array, "batch"],
    *,
    ring: bool = False,
    implementation: Implementation | None = None,
) -> tuple[
    Float[Array, "batch kv_heads capacity dim"], Float[Array, "batch kv_heads capacity dim"]
]:
    """Rows of sequence b at positions `start[b] .. start[b] + rows - 1`.

    The caches are updated in place where the caller donates them or carries them through a
    loop.

    Args:
      keys, values: the caches; position p is slot p, in a ring slot `p % capacity`.
      new_keys, new_values: cast to the cache's dtype.
      start: at least 0. Unless `ring`, the caller guarantees `start + rows <= capacity`: under
        jit it cannot be checked, and what lies past the end would be written over.
      ring: the cache wraps; rows <= capacity.
      implementation: None picks by platform (see `pallas_kernels.target`); an explicit choice
        never falls back.

    Returns:
      The caches with the rows written.

    Raises:
      NotImplementedError: an explicit `implementation` that does not exist or does not cover
        these arguments on this device.
      ValueError: a concrete `start` whose rows do not fit the cache.
    """
    rows, capacity = new_keys.shape[1], keys.shape[2]
    if not ring:
        check_lengths(start, rows, capacity)
    if implementation is None and keys.shape[0] == 1 and not ring:
        # XLA makes one slice update of it: see docs/kernels.md.
        implementation = "reference"
    chosen = _choose(keys, rows, implementation)
    if chosen == "reference":
        return reference.write_cache(keys, values, new_keys, new_values, start, ring=ring)
    write = tpu.write_cache if chosen == "pallas_tpu" else gpu.write_cache
    return write(keys, values, new_keys, new_values, None, start, target=current_target())


def write_cache_paged(
    key_pages: Float[Array, "pages kv_heads page_size dim"],
    value_pages: Float[Array, "pages kv_heads page_size dim"],
    new_keys: Float[Array, "batch rows kv_heads dim"],
    new_values: Float[Array, "batch rows kv_heads dim"],
    page_table: Int[Array, "batch pages_per_sequence"],
    start: Int[Array, "batch"],
    *,
    implementation: Implementation | None = None,
) -> tuple[
    Float[Array, "pages kv_heads page_size dim"], Float[Array, "pages kv_heads page_size dim"]
]:
    """`write_cache` into pages: position p of sequence b is slot `p % page_size` of page
    `page_table[b, p // page_size]`.

    No two sequences write to one page, but for pages that nobody reads. Arguments, result and
    errors as there.
    """
    rows = new_keys.shape[1]
    check_lengths(start, rows, page_table.shape[1] * key_pages.shape[2])
    chosen = _choose(key_pages, rows, implementation)
    if chosen == "reference":
        return reference.write_cache_paged(
            key_pages, value_pages, new_keys, new_values, page_table, start
        )
    write = tpu.write_cache if chosen == "pallas_tpu" else gpu.write_cache
    target = current_target()
    return write(key_pages, value_pages, new_keys, new_values, page_table, start, target=target)


def _choose(keys: Array, rows: int, implementation: str | None) -> Implementation:
    def limit() -> str | None:
        dim = keys.shape[3]
        if dim not in HEAD_DIMS:
            return f"supports head_dim 64 and 128, found {dim}"
        if rows > MAX_ROWS:
            return f"supports rows 1 to {MAX_ROWS}, found {rows}"
        return None

    def tpu_limit() -> str | None:
        page_size, dim = keys.shape[2:]
        tile = slot_tile(dim, keys.dtype)
        if limit() is None and page_size % tile:
            return (
                f"supports page sizes and capacities that are multiples of {tile} for a "
                f"{keys.dtype} cache of head_dim {dim}, found {page_size}"
            )
        return limit()

    return choose("cache_write", implementation, {"pallas_tpu": tpu_limit, "pallas_gpu": limit})
