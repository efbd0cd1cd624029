"""Attention: projections, optional q/k norms, RoPE; what is attended to is given.

`Attend` is the seam between a network and where its keys and values live:
decoding writes a cache and calls the verification-attention kernel, training
attends among the rows of one call under its own mask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from peagle_jax.config import BlockConfig
from peagle_jax.models.cache import LayerCache
from peagle_jax.models.layers import Linear, RMSNorm, beside, declare, normal_init, rotate
from peagle_jax.models.paged_cache import Cache, PagedLayerCache

# (q [batch, rows, heads, dim], k, v [batch, rows, kv_heads, dim], in networks with attention
# sinks also these, [heads]) ->
# (output [batch, rows, heads, dim], whatever this layer carries on, such as its cache)
Attend = Callable[..., tuple[Array, Any]]


class Attention(nn.Module):
    """Grouped-query attention over whatever `attend` provides.

    `in_features` is the width of the input: the hidden size, or twice that in a
    drafter's first layer.
    """

    config: BlockConfig
    in_features: int
    dtype: Any

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "batch rows in"],
        rope: tuple[Float[Array, "batch rows half"], Float[Array, "batch rows half"]],
        attend: Attend,
    ) -> tuple[Float[Array, "batch rows hidden"], Any]:
        c = self.config

        def project(heads: int, axis: str, name: str) -> Linear:
            size = heads * c.head_dim
            axes = (axis, "embed")
            return Linear(size, self.in_features, axes, c.qkv_bias, self.dtype, name=name)

        projected = beside(
            self,
            [
                project(c.num_heads, "heads", "q_proj"),
                project(c.num_kv_heads, "kv_heads", "k_proj"),
                project(c.num_kv_heads, "kv_heads", "v_proj"),
            ],
            x,
        )
        q, k, v = (y.reshape(*x.shape[:2], -1, c.head_dim) for y in projected)
        if c.qk_norm:
            q = RMSNorm(c.head_dim, c.rms_norm_eps, self.dtype, name="q_norm")(q)
            k = RMSNorm(c.head_dim, c.rms_norm_eps, self.dtype, name="k_norm")(k)
        sinks: tuple[Array, ...] = ()
        if c.sinks:
            shape = (c.num_heads,)
            sinks = (declare(self, "sinks", shape, ("heads",), normal_init, self.dtype),)
        out, carried = attend(rotate(q, *rope), rotate(k, *rope), v, *sinks)
        out = out.reshape(*x.shape[:2], c.num_heads * c.head_dim)
        size = c.num_heads * c.head_dim
        o_proj = Linear(
            c.hidden_size, size, ("embed", "heads"), c.out_bias, self.dtype, name="o_proj"
        )
        return o_proj(out), carried


@struct.dataclass
class CachedAttend:
    """Attention of new rows at positions `start ..` over the cache they are written to.

    A pytree, so that layers alike share one trace (see `block.run_block`).

    window: sliding window in tokens; None = all positions.
    counts: how many of a sequence's rows are real, the rest being padding; None = all. In
        a ring padding must not be written, and a call of more rows than its slots allow
        attends to the window before it and to its own rows.
    tree: the rows are branches, see `verify_attention`; None = one chain.
    """

    cache: LayerCache | PagedLayerCache
    start: Int[Array, "batch"]
    window: int | None = struct.field(pytree_node=False)
    counts: Int[Array, "batch"] | None = None
    tree: Bool[Array, "batch rows rows"] | None = None

    def __call__(
        self, q: Array, k: Array, v: Array, sinks: Array | None = None
    ) -> tuple[Array, LayerCache | PagedLayerCache]:
        """The output rows, and the cache with the new keys and values."""
        return self.cache.attend(
            q,
            k,
            v,
            self.start,
            window=self.window,
            counts=self.counts,
            sinks=sinks,
            tree=self.tree,
        )


def cached_attends(
    config: BlockConfig,
    cache: Cache,
    start: Int[Array, "batch"],
    counts: Int[Array, "batch"] | None,
    tree: Bool[Array, "batch rows rows"] | None = None,
) -> list[CachedAttend]:
    """A CachedAttend for each layer of a network."""
    layers: Sequence[LayerCache | PagedLayerCache] = cache.layers
    return [
        CachedAttend(layer, start, config.window(index), counts, tree)
        for index, layer in enumerate(layers)
    ]
