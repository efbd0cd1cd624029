"""Key-value caches: frozen pytrees that a forward pass takes and returns.

A slot's index is its token's position. Nothing is ever removed: rejected tokens
are rolled back by the caller's length alone, their slots are overwritten by the
tokens that take their positions, and until then no query attends to them, since
a row at position p sees slots 0..p only and the rows of a call are written
before they are read.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from peagle_jax.config import BlockConfig


@struct.dataclass
class LayerCache:
    """One layer's keys (rotated) and values."""

    keys: Float[Array, "batch kv_heads capacity dim"]
    values: Float[Array, "batch kv_heads capacity dim"]

    def write(
        self,
        start: Int[Array, "batch"],
        keys: Float[Array, "batch rows kv_heads dim"],
        values: Float[Array, "batch rows kv_heads dim"],
    ) -> LayerCache:
        """New rows of sequence b at slots `start[b] .. start[b] + rows - 1`.

        The caller guarantees `start + rows <= capacity` (see `required_capacity`
        in decoding/speculate.py): out of range, XLA would clip the index
        silently and overwrite valid slots.
        """
        return LayerCache(
            keys=_write_rows(self.keys, keys, start), values=_write_rows(self.values, values, start)
        )


@struct.dataclass
class KVCache:
    """A network's cache, a LayerCache a layer: separate arrays, because slicing a
    stacked one inside jit copies it on CPU."""

    layers: tuple[LayerCache, ...]

    @classmethod
    def init(cls, config: BlockConfig, batch: int, capacity: int, dtype: Any) -> KVCache:
        """Empty cache with room for `capacity` positions of `batch` sequences."""
        shape = (batch, config.num_kv_heads, capacity, config.head_dim)
        return cls(
            layers=tuple(
                LayerCache(keys=jnp.zeros(shape, dtype), values=jnp.zeros(shape, dtype))
                for _ in range(config.num_layers)
            )
        )

    @property
    def capacity(self) -> int:
        """Positions that fit."""
        return self.layers[0].keys.shape[2]


def _write_rows(
    cache: Float[Array, "batch kv_heads capacity dim"],
    rows: Float[Array, "batch rows kv_heads dim"],
    start: Int[Array, "batch"],
) -> Float[Array, "batch kv_heads capacity dim"]:
    rows = jnp.swapaxes(rows, 1, 2).astype(cache.dtype)
    if cache.shape[0] == 1:
        # One slice update; the batched form below becomes a scatter loop.
        return jax.lax.dynamic_update_slice(cache, rows, (0, 0, start[0], 0))
    return jax.vmap(lambda c, r, s: jax.lax.dynamic_update_slice(c, r, (0, s, 0)))(
        cache, rows, start
    )
