"""Key-value caches: frozen pytrees that a forward pass takes and returns.

A slot's index is its token's position; in a layer with a sliding window the slots may be a
ring, where it is the position modulo the number of slots. Nothing is ever removed: rejected
tokens are rolled back by the caller's length alone, their slots are overwritten by the tokens
that take their positions, and until then no query attends to them.

In a cache of all positions that is so because a row at position p sees slots 0 .. p only, and
the rows of a call are written before they are read. In a ring a rejected token's slot also
stood for the position one turn before. So a ring has `window - 1 + span` slots, where span
bounds how far a write ever reached past the first position of any later call: what was
overwritten lies before every window by then. Padding that reaches further is not written.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.cache_write import write_cache
from pallas_kernels.verify_attention import verify_attention
from peagle_jax.config import BlockConfig

_RING_TILE = 8  # a ring has a multiple of so many slots


@struct.dataclass
class LayerCache:
    """One layer's keys (rotated) and values."""

    keys: Float[Array, "batch kv_heads capacity dim"]
    values: Float[Array, "batch kv_heads capacity dim"]
    ring: bool = struct.field(pytree_node=False, default=False)

    @property
    def capacity(self) -> int:
        """Slots."""
        return self.keys.shape[2]

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
    ) -> tuple[Float[Array, "batch rows heads dim"], LayerCache]:
        """New rows at positions `start ..`, written and attending; see `CachedAttend`."""
        rows = q.shape[1]
        overfull = window is not None and window - 1 + rows > self.capacity
        if self.ring and window and (counts is not None or overfull):
            real = jnp.full_like(start, rows) if counts is None else counts
            written = self.write_some(start, real, k, v)
            seen = self.beside(start, window, k, v)
        else:
            seen = written = self.write(start, k, v)
        out = verify_attention(
            q, seen.keys, seen.values, start, window=window, sinks=sinks, tree=tree
        )
        return out, written

    def write(
        self,
        start: Int[Array, "batch"],
        keys: Float[Array, "batch rows kv_heads dim"],
        values: Float[Array, "batch rows kv_heads dim"],
    ) -> LayerCache:
        """New rows of sequence b at positions `start[b] .. start[b] + rows - 1`.

        The caller guarantees `start + rows <= capacity` where there is no ring (see
        `required_capacity` in decoding/speculate.py): out of range, XLA would clip the index
        silently and overwrite valid slots.
        """
        written = write_cache(
            self.keys,
            self.values,
            keys,
            values,
            start,
            ring=self.ring,
            implementation="reference",  # XLA updates the loop's cache in place
        )
        return dataclasses.replace(self, keys=written[0], values=written[1])

    def moved(self, start: Int[Array, "batch"], rows: Int[Array, "batch rows"]) -> LayerCache:
        """What was written last at positions `start ..`, row `rows[j]` of it now as row j."""
        slots = start[:, None] + rows
        if self.ring:
            slots %= self.capacity

        def take(x: Array) -> Array:
            return jax.vmap(lambda one, at: one[:, at].swapaxes(0, 1))(x, slots)

        return self.write(start, take(self.keys), take(self.values))

    def write_some(
        self,
        start: Int[Array, "batch"],
        counts: Int[Array, "batch"],
        keys: Float[Array, "batch rows kv_heads dim"],
        values: Float[Array, "batch rows kv_heads dim"],
    ) -> LayerCache:
        """Of a ring: only the first `counts[b]` of any number of new rows."""
        slot = jnp.arange(self.capacity)
        position = _held(slot, (start + counts - 1)[:, None], self.capacity)
        new = position >= start[:, None]
        source = jnp.where(new, self.capacity + position - start[:, None], slot)
        return self._gather(source, keys, values)

    def beside(
        self,
        start: Int[Array, "batch"],
        window: int,
        keys: Float[Array, "batch rows kv_heads dim"],
        values: Float[Array, "batch rows kv_heads dim"],
    ) -> LayerCache:
        """Of a ring: the `window - 1` positions before any number of new rows, and these rows.

        It is a ring of just so many slots: for one call to attend to.
        """
        size = window - 1 + keys.shape[1]
        last = (start + keys.shape[1] - 1)[:, None]
        position = _held(jnp.arange(size), last, size)
        new = position >= start[:, None]
        old = position % self.capacity
        return self._gather(
            jnp.where(new, self.capacity + position - start[:, None], old), keys, values
        )

    def _gather(
        self,
        source: Int[Array, "batch slots"],
        keys: Float[Array, "batch rows kv_heads dim"],
        values: Float[Array, "batch rows kv_heads dim"],
    ) -> LayerCache:
        """Slots taken from this cache's and the new rows, one after the other."""

        def take(old: Array, new: Array) -> Array:
            both = jnp.concatenate([old, jnp.swapaxes(new, 1, 2).astype(old.dtype)], axis=2)
            return jnp.take_along_axis(both, source[:, None, :, None], axis=2)

        return dataclasses.replace(
            self, keys=take(self.keys, keys), values=take(self.values, values)
        )


@struct.dataclass
class KVCache:
    """A network's cache, a LayerCache a layer: separate arrays, because slicing a
    stacked one inside jit copies it on CPU."""

    layers: tuple[LayerCache, ...]

    @classmethod
    def init(
        cls, config: BlockConfig, batch: int, capacity: int, dtype: Any, span: int | None = None
    ) -> KVCache:
        """Empty cache with room for `capacity` positions of `batch` sequences.

        Args:
          span: makes rings of the layers with a window: no write that counts or could be
            rolled back reaches more than this many positions past the first position of a
            later call. None = every layer keeps all positions.
        """
        layers = []
        for index in range(config.num_layers):
            slots, window = capacity, config.window(index)
            if span is not None and window is not None:
                slots = min(slots, -(-(window - 1 + span) // _RING_TILE) * _RING_TILE)
            shape = (batch, config.num_kv_heads, slots, config.head_dim)
            keys, values = (jnp.zeros(shape, dtype) for _ in range(2))
            layers.append(LayerCache(keys, values, ring=slots < capacity))
        return cls(layers=tuple(layers))

    def with_layers(self, layers: Sequence[LayerCache]) -> KVCache:
        """The cache of these layers."""
        return KVCache(tuple(layers))

    @property
    def capacity(self) -> int:
        """Positions that fit, in the layers that keep all of them."""
        return max(layer.capacity for layer in self.layers)


def _held(slot: Array, last: Array, capacity: int) -> Array:
    """The newest position up to `last` that a ring's slot stands for; below 0 = none."""
    return last - (last - slot) % capacity
