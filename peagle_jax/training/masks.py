"""What an element of P-EAGLE training sees, and attention under that mask.

Element (anchor a, depth d) stands at position a + d. It sees depth 0 up to its anchor and its
own chain up to itself, in its document: exactly the rows that a draft step whose last real row
stands at a finds in the cache. So no `[rows, rows]` mask exists: a row's keys are those of
depth 0, told by comparing two integers, and the K - 1 at most of its own chain.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from peagle_jax.config import BlockConfig
from peagle_jax.models.attention import Attend
from peagle_jax.training.cod import Chains

Implementation = Literal["reference"]

MASKED = -1e30  # finite: -inf would turn a row that sees nothing (padding) into NaN
# Scores that exist at once: rows are taken in blocks of as many as give this many, all heads
# together, so that a block's few arrays stay in a CPU's cache and out of the way of the rest.
SCORES = 1 << 21


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


def visible(
    query_anchor: Any,
    query_depth: Any,
    key_anchor: Any,
    key_depth: Any,
    same_document: Any,
    window: int | None,
) -> Bool[Array, "..."]:
    """Whether the query element sees the key element; arguments broadcast.

    `window` is in positions, as in decoding: a row sees itself and the `window - 1` positions
    before it, of its own chain too. Indices in a packed row stand for positions, since
    the rows of a document are neighbours.
    """
    seen = jnp.where(
        key_depth == 0,
        key_anchor <= query_anchor,
        (key_anchor == query_anchor) & (key_depth <= query_depth),
    )
    seen &= same_document
    if window is not None:
        seen &= key_anchor + key_depth > query_anchor + query_depth - window
    return seen


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
      implementation: None picks by platform; an explicit choice never falls back.
        "reference" is plain JAX; scores of a block of rows exist at a time, in the
        backward pass too.

    Raises:
      NotImplementedError: `implementation` is one that does not exist here.
    """
    if implementation not in (None, "reference"):
        raise NotImplementedError(
            f"chain_attention: implementation {implementation!r} is not available; "
            "supported: 'reference'"
        )
    slots, size = rows.chains.slots, rows.size
    own = _own_scores(q[:, size:], k[:, size:], slots, window)
    # Depth 0 has no chain of its own: its row there is among the keys of depth 0.
    own = jnp.pad(own, ((0, 0), (size, 0), (0, 0), (0, 0), (0, 0)), constant_values=MASKED)
    out, weights = attend_in_blocks(
        q, base.keys, base.values, rows.anchor, rows.depth, rows.documents, window, own
    )
    if not slots:
        return out
    weights = _by_chain(weights[:, size:].astype(v.dtype), slots)
    below = _product("nqe,nex->nqx", weights, _by_chain(v[:, size:, :, None], slots))
    below = _by_element(below, slots, v.shape[0], v.shape[2])
    below = below.reshape(out[:, size:].shape).astype(out.dtype)
    return jnp.concatenate([out[:, :size], out[:, size:] + below], axis=1)


def attend_in_blocks(
    q: Float[Array, "batch rows heads dim"],
    keys: Float[Array, "batch kv_heads length dim"],
    values: Float[Array, "batch kv_heads length dim"],
    anchor: Int[Array, "batch rows"],
    depth: Int[np.ndarray, "rows"],
    documents: Int[Array, "batch length"],
    window: int | None,
    own: Float[Array, "batch rows kv_heads group own"],
    query_block: int | None = None,
) -> tuple[Float[Array, "batch rows heads dim"], Float[Array, "batch rows kv_heads group own"]]:
    """Attention over depth 0, sharing its softmax with scores that are already there.

    Args:
      anchor, depth: of every row; see `visible`.
      own: each row's scores over keys of its own, MASKED where there is none.
      query_block: rows whose scores exist at once; None = as many as SCORES allows, in eights.

    Returns:
      The part of the output that the keys of depth 0 give, and the weights of `own`.
    """
    batch, num_rows, heads, dim = q.shape
    kv_heads, length = keys.shape[1:3]
    group = heads // kv_heads
    query_block = query_block or max(8, SCORES // (batch * heads * length) // 8 * 8)
    blocks = -(-num_rows // query_block)
    size = -(-num_rows // blocks)
    index = jnp.arange(length)
    # Blocks see a cast of a float32 copy: what they add to the gradient of keys and values is
    # then added in float32. A sum of a thousand blocks in bfloat16 is wrong by percents.
    wide = keys.astype(jnp.float32), values.astype(jnp.float32)
    dtype = values.dtype

    def one_block(block: tuple[Array, ...]) -> tuple[Array, Array]:
        rows, at, deep, extra = block
        keys, values = (x.astype(dtype) for x in wide)
        document = jnp.take_along_axis(documents, at, axis=1)
        seen = visible(
            at[:, :, None],
            deep[:, :, None],
            index,
            0,
            document[:, :, None] == documents[:, None],
            window,
        )
        # All query heads of a group are rows of one product per key head.
        grouped = (rows * dim**-0.5).reshape(batch, size, kv_heads, group, dim)
        grouped = grouped.transpose(0, 2, 3, 1, 4).reshape(batch, kv_heads, group * size, dim)
        scores = _product("bkrd,bktd->bkrt", grouped, keys)
        scores = scores.reshape(batch, kv_heads, group, size, length)
        scores = jnp.where(seen[:, None, None], scores, MASKED)
        extra = extra.transpose(0, 2, 3, 1, 4)
        top = jnp.max(scores, axis=-1, keepdims=True)
        top = jnp.maximum(top, jnp.max(extra, axis=-1, keepdims=True, initial=MASKED))
        top = jax.lax.stop_gradient(top)
        scores, extra = jnp.exp(scores - top), jnp.exp(extra - top)
        total = jnp.sum(scores, -1, keepdims=True) + jnp.sum(extra, -1, keepdims=True)
        scores = scores.astype(values.dtype).reshape(batch, kv_heads, group * size, length)
        out = _product("bkrt,bktd->bkrd", scores, values)
        out = out.reshape(batch, kv_heads, group, size, dim) / total
        out = out.transpose(0, 3, 1, 2, 4).reshape(batch, size, heads, dim).astype(q.dtype)
        return out, (extra / total).transpose(0, 3, 1, 2, 4)

    def split(x: Array) -> Array:
        padded = jnp.pad(x, ((0, 0), (0, blocks * size - num_rows), *[(0, 0)] * (x.ndim - 2)))
        return jnp.moveaxis(padded.reshape(x.shape[0], blocks, size, *x.shape[2:]), 1, 0)

    inputs = jax.tree.map(split, (q, anchor, jnp.asarray(depth)[None], own))
    # The backward pass computes a block's scores again instead of keeping them.
    outputs = jax.lax.map(jax.checkpoint(one_block, prevent_cse=False), inputs)
    out, weights = (
        jnp.moveaxis(x, 0, 1).reshape(batch, blocks * size, *x.shape[3:])[:, :num_rows]
        for x in outputs
    )
    return out, weights


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
