"""Key-value caches in pages: sequences of any length share one pool of equal pieces.

Position p of sequence b is slot `p % page_size` of page `table[b, p // page_size]`. Rollback is
by length alone, as in cache.py. Every layer keeps all positions: with a sliding window a row sees
the pages of its window only, but the pages before it are not given back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from flax import struct
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.cache_write import write_cache_paged
from pallas_kernels.verify_attention import verify_attention_paged
from peagle_jax.config import BlockConfig
from peagle_jax.models.cache import KVCache
from peagle_jax.sharding import per_device


@struct.dataclass
class LayerPages:
    """One layer's keys (rotated) and values, of all sequences."""

    keys: Float[Array, "pages kv_heads page_size dim"]
    values: Float[Array, "pages kv_heads page_size dim"]


@struct.dataclass
class PagedLayerCache:
    """One layer's pages, and which of them hold the sequences of a call.

    split_over: the mesh axis over which heads lie apart; None = every device has all of them.
    """

    pages: LayerPages
    table: Int[Array, "batch pages_per_sequence"]
    split_over: str | None = struct.field(pytree_node=False, default=None)

    @property
    def capacity(self) -> int:
        """Positions that a sequence has in this call."""
        return self.table.shape[1] * self.pages.keys.shape[2]

    def attend(
        self,
        q: Float[Array, "batch rows heads dim"],
        k: Float[Array, "batch rows kv_heads dim"],
        v: Float[Array, "batch rows kv_heads dim"],
        start: Int[Array, "batch"],
        *,
        window: int | None,
        counts: Int[Array, "batch"] | None,
        sinks: Float[Array, "heads"] | None,
        tree: Bool[Array, "batch rows rows"] | None = None,
    ) -> tuple[Float[Array, "batch rows heads dim"], PagedLayerCache]:
        """New rows at positions `start ..`, written and attending; see `CachedAttend`.

        The caller guarantees `start + rows <= capacity`. Padding is written like real rows:
        past a sequence's pages onto the null page, and in its pages where real rows will be
        written before they are read.
        """
        del counts

        def run(
            q: Array,
            k: Array,
            v: Array,
            old: LayerPages,
            table: Array,
            start: Array,
            sinks: Any,
            tree: Any,
        ) -> tuple[Array, LayerPages]:
            keys, values = write_cache_paged(old.keys, old.values, k, v, table, start)
            out = verify_attention_paged(
                q, keys, values, table, start, window=window, sinks=sinks, tree=tree
            )
            return out, LayerPages(keys, values)

        axis, whole = self.split_over, PartitionSpec()
        rows, pages = PartitionSpec(None, None, axis), PartitionSpec(None, axis)
        run_split = per_device(
            run,
            (rows, rows, rows, pages, whole, whole, PartitionSpec(axis), whole),
            (rows, pages),
        )
        out, new = run_split(q, k, v, self.pages, self.table, start, sinks, tree)
        return out, dataclasses.replace(self, pages=new)

    def moved(self, start: Int[Array, "batch"], rows: Int[Array, "batch rows"]) -> PagedLayerCache:
        """What was written last at positions `start ..`, row `rows[j]` of it now as row j."""

        def run(old: LayerPages, table: Array, start: Array, rows: Array) -> LayerPages:
            size = old.keys.shape[2]
            at = start[:, None] + rows
            page = jnp.take_along_axis(table, at // size, axis=1)
            keys, values = (x[page, :, at % size] for x in (old.keys, old.values))
            return LayerPages(*write_cache_paged(old.keys, old.values, keys, values, table, start))

        whole, pages = PartitionSpec(), PartitionSpec(None, self.split_over)
        run_split = per_device(run, (pages, whole, whole, whole), pages)
        return dataclasses.replace(self, pages=run_split(self.pages, self.table, start, rows))


@struct.dataclass
class PagedKVCache:
    """A network's pages, and one table for all its layers; `split_over` as there."""

    pages: tuple[LayerPages, ...]
    table: Int[Array, "batch pages_per_sequence"]
    split_over: str | None = struct.field(pytree_node=False, default=None)

    @property
    def layers(self) -> tuple[PagedLayerCache, ...]:
        """The cache a layer."""
        return tuple(PagedLayerCache(pages, self.table, self.split_over) for pages in self.pages)

    def with_layers(self, layers: Sequence[PagedLayerCache]) -> PagedKVCache:
        """The cache of these layers, which have this table."""
        return dataclasses.replace(self, pages=tuple(layer.pages for layer in layers))


# What a network's pass takes and returns: each with `layers` and `with_layers`.
Cache = KVCache | PagedKVCache


def init_pages(
    config: BlockConfig, num_pages: int, page_size: int, dtype: Any
) -> tuple[LayerPages, ...]:
    """Pages of a network, all zero; page 0, the null page, is one of `num_pages`."""
    shape = (num_pages, config.num_kv_heads, page_size, config.head_dim)
    return tuple(
        LayerPages(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))
        for _ in range(config.num_layers)
    )


def bytes_a_position(config: BlockConfig, dtype: Any) -> int:
    """Bytes that one position takes in all layers of a network."""
    elements = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    return elements * jnp.dtype(dtype).itemsize
