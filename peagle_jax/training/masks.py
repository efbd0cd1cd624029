"""The rows of a pass of P-EAGLE training, and attention among them.

Element (anchor a, depth d) stands at position a + d. It sees depth 0 up to its anchor and its
own chain up to itself, in its document: exactly the rows that a draft step whose last real row
stands at a finds in the cache. So no `[rows, rows]` mask exists: a row's keys are those of
depth 0, told by comparing two integers, and the K - 1 at most of its own chain.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.cod_attention import MASKED, Implementation, cod_attention, visible
from peagle_jax.config import BlockConfig
from peagle_jax.models.attention import Attend
from peagle_jax.training.cod import Chains


@struct.dataclass
class BaseKeys:
    """One layer's keys (rotated) and values of depth 0, by index in the packed row."""

    keys: Float[Array, "batch kv_heads length dim"]
    values: Float[Array, "batch kv_heads length dim"]


Kept = tuple[BaseKeys, ...]  # of every layer


def no_keys(config: BlockConfig, batch: int, length: int, dtype: Any) -> Kept:
    """Room for the keys and values of `length` indices."""
    zeros = jnp.zeros((batch, config.num_kv_heads, length, config.head_dim), dtype)
    return (BaseKeys(zeros, zeros),) * config.num_layers


@struct.dataclass
class SegmentRows:
    """The rows of one call: depth 0 at indices `start ..` of each packed row, then chains.

    documents: of the whole packed row; 0 = padding.
    start: first index of depth 0, the same in every packed row; may be traced.
    size: how many of depth 0.
    chains: `[batch, chains]`; their anchors may lie before `start`, never past the last index.
    """

    documents: Int[Array, "batch length"]
    start: Int[Array, ""] | int
    size: int = struct.field(pytree_node=False)
    chains: Chains

    @property
    def anchor(self) -> Int[Array, "batch rows"]:
        """Index of every row's anchor: of the row itself at depth 0."""
        batch = self.documents.shape[0]
        own = jnp.broadcast_to(self.start + jnp.arange(self.size), (batch, self.size))
        return jnp.concatenate([own, self.chains.anchors], axis=1)

    @property
    def depth(self) -> np.ndarray:
        """int32 `[rows]`."""
        return np.concatenate([np.zeros(self.size, np.int32), self.chains.depth])

    @property
    def valid(self) -> Bool[Array, "batch rows"]:
        """False for slots without an element; depth 0 is always there."""
        own = jnp.ones((self.documents.shape[0], self.size), bool)
        return jnp.concatenate([own, self.chains.valid], axis=1)

    @property
    def depth_0(self) -> SegmentRows:
        """The same without chains."""
        return self.replace(chains=self.chains.none)  # type: ignore[attr-defined]


def segment_attends(
    kept: Kept,
    rows: SegmentRows,
    windows: Sequence[int | None],
    implementation: Implementation | None = None,
) -> list[Attend]:
    """An Attend a layer for a pass over `rows`; each carries its own depth-0 keys and values.

    Args:
      kept: keys and values of depth 0 by index. Those before `rows.start` are attended to;
        the pass's own take the place of what stands there, and later ones are not looked at.
      windows: sliding window of every layer, None = full attention.
    """

    def attend_layer(layer: BaseKeys, window: int | None) -> Attend:
        def attend(q: Array, k: Array, v: Array) -> tuple[Array, BaseKeys]:
            own = BaseKeys(*(jnp.swapaxes(x[:, : rows.size], 1, 2) for x in (k, v)))
            base = write_rows(layer, own, rows.start)
            out = chain_attention(q, k, v, base, rows, window=window, implementation=implementation)
            return out, own

        return attend

    return [attend_layer(*each) for each in zip(kept, windows, strict=True)]


def write_rows(kept: Any, own: Any, start: Int[Array, ""] | int) -> Any:
    """`kept` with `own` at indices `start ..` of the third axis, leaf by leaf."""
    return jax.tree.map(
        lambda old, new: jax.lax.dynamic_update_slice_in_dim(
            old, new.astype(old.dtype), start, axis=2
        ),
        kept,
        own,
    )


def read_rows(kept: Any, start: Int[Array, ""] | int, size: int) -> Any:
    """The inverse of `write_rows`: indices `start .. start + size - 1`."""
    return jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, start, size, axis=2), kept)


def chain_attention(
    q: Float[Array, "batch rows heads dim"],
    k: Float[Array, "batch rows kv_heads dim"],
    v: Float[Array, "batch rows kv_heads dim"],
    base: BaseKeys,
    rows: SegmentRows,
    *,
    window: int | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "batch rows heads dim"]:
    """Attention of `rows` under the mask of `visible`; softmax in float32.

    Args:
      q, k, v: rotated; of every row, depth 0 first. heads is a multiple of kv_heads.
      base: keys and values of depth 0 by index, this call's own among them.
      implementation: of the attention over depth 0; see `pallas_kernels.cod_attention`.

    Raises:
      NotImplementedError: `implementation` is one that does not exist, or not for these
        arguments on this device.
    """
    slots, size = rows.chains.slots, rows.size
    own = _own_scores(q[:, size:], k[:, size:], slots, window)
    # Depth 0 has no chain of its own: its row there is among the keys of depth 0.
    own = jnp.pad(own, ((0, 0), (size, 0), (0, 0), (0, 0), (0, 0)), constant_values=MASKED)
    out, weights = cod_attention(
        q,
        base.keys,
        base.values,
        rows.anchor,
        rows.depth,
        rows.documents,
        own,
        window=window,
        implementation=implementation,
    )
    if not slots:
        return out
    weights = _by_chain(weights[:, size:].astype(v.dtype), slots)
    below = _product("nqe,nex->nqx", weights, _by_chain(v[:, size:, :, None], slots))
    below = _by_element(below, slots, v.shape[0], v.shape[2])
    below = below.reshape(out[:, size:].shape).astype(out.dtype)
    return jnp.concatenate([out[:, :size], out[:, size:] + below], axis=1)


def _own_scores(
    q: Float[Array, "batch elements heads dim"],
    k: Float[Array, "batch elements kv_heads dim"],
    slots: tuple[int, ...],
    window: int | None,
) -> Float[Array, "batch elements kv_heads group own"]:
    """Scores of every element over depths 1 .. K-1 of its chain, MASKED where it sees none."""
    batch, elements, heads, dim = q.shape
    kv_heads, group, depths = k.shape[2], heads // k.shape[2], len(slots)
    if not slots:
        return jnp.zeros((batch, elements, kv_heads, group, 0), jnp.float32)
    queries = (q * dim**-0.5).reshape(batch, elements, kv_heads, group, dim)
    scores = _product("nqx,nex->nqe", _by_chain(queries, slots), _by_chain(k[:, :, :, None], slots))
    at = np.arange(1, depths + 1)
    seen = np.repeat(visible(0, at[:, None], 0, at, True, window), group, axis=0)
    return _by_element(jnp.where(seen, scores, MASKED), slots, batch, kv_heads)


def _by_chain(
    x: Float[Array, "batch elements kv_heads group last"], slots: tuple[int, ...]
) -> Float[Array, "lists members last"]:
    """The elements of each chain and key head side by side: members = depths * group.

    Chain j's elements are the j-th of every depth's block, so this is no gather. The lists
    come first, as small products of batches want them (a sixth of the time on CPU).
    """
    batch, _, kv_heads, group, last = x.shape
    most, depths = slots[0], len(slots)
    ends = np.cumsum(slots).tolist()
    blocks = [
        jnp.pad(x[:, end - size : end], ((0, 0), (0, most - size), *[(0, 0)] * 3))
        for size, end in zip(slots, ends, strict=True)
    ]
    lists = jnp.stack(blocks, axis=1).transpose(0, 2, 3, 1, 4, 5)
    return lists.reshape(batch * most * kv_heads, depths * group, last)


def _by_element(
    x: Float[Array, "lists members last"], slots: tuple[int, ...], batch: int, kv_heads: int
) -> Float[Array, "batch elements kv_heads group last"]:
    """The inverse of `_by_chain`."""
    lists = x.reshape(batch, slots[0], kv_heads, len(slots), -1, x.shape[-1])
    blocks = lists.transpose(0, 3, 1, 2, 4, 5)
    return jnp.concatenate([blocks[:, d, :size] for d, size in enumerate(slots)], axis=1)


def _product(equation: str, a: Array, b: Array) -> Array:
    return jnp.einsum(equation, a, b, preferred_element_type=jnp.float32)
