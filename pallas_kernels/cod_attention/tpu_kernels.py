"""The kernels of training attention on a TPU: three that never look at what is not seen.

Forward and the gradient of the queries: a grid step is one tile and streams the blocks of keys
and values that the tile sees. The gradient of keys and values: a grid step is one block of them;
it notes which tiles see it, then streams those. Streams go through two buffers: while one part is
worked on the next is copied.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from pallas_kernels.cod_attention.predicate import MASKED


def _heads(x: Array) -> Array:
    """`[group, .., rows]` side by side: `[.., group * rows]`, one row high where there was none."""
    parts = [x[i] if x.ndim == 3 else x[i : i + 1] for i in range(x.shape[0])]
    return jnp.concatenate(parts, axis=1)


def _scaled_heads(q: Array) -> Array:
    return _heads(q) * jnp.asarray(q.shape[1] ** -0.5, q.dtype)


def _stream(count: Any, copies: Callable[[Any, Any], list[Any]], work: Callable[..., None]) -> None:
    """`work(i, turn)` for i < count, each when `copies(i, turn)` are there; turn is the buffer."""

    def start(i: Any, turn: Any) -> None:
        for copy in copies(i, turn):
            copy.start()

    pl.when(count > 0)(lambda: start(0, 0))

    def one(i: Any, turn: Any) -> Any:
        pl.when(i + 1 < count)(lambda: start(i + 1, 1 - turn))
        for copy in copies(i, turn):
            copy.wait()
        work(i, turn)
        return 1 - turn

    jax.lax.fori_loop(0, count, one, jnp.int32(0))


def _scores(
    scores_ref: Any, q: Array, keys: Array, spans: Array, begin: Any, bounds_ref: Any, tile: Any
) -> Array:
    """Scores `[keys, columns]` of a tile and the block of keys from index `begin` on."""
    scores_ref[...] = _dot(keys, q, (0, 0))
    size = keys.shape[1]
    all_see_from, all_see_to = bounds_ref[0, 4 * tile + 2], bounds_ref[0, 4 * tile + 3]

    @pl.when((begin < all_see_from) | (begin + size - 1 > all_see_to))
    def _mask() -> None:
        group = q.shape[1] // spans.shape[1]
        first, last = (jnp.concatenate([spans[i : i + 1]] * group, axis=1) for i in (0, 1))
        index = begin + jax.lax.broadcasted_iota(jnp.int32, scores_ref.shape, 0)
        seen = (index >= first) & (index <= last)
        scores_ref[...] = jnp.where(seen, scores_ref[...], MASKED)

    return scores_ref[...]


def _stream_keys(
    bounds_ref: Any, k_hbm: Any, v_hbm: Any, k_buf: Any, v_buf: Any, arrived: Any, work: Any
) -> None:
    """`work(begin, turn)` for every block of keys that the grid step's tile sees."""
    b, h, tile = (pl.program_id(axis) for axis in range(3))
    size = k_buf.shape[2]
    low, high = bounds_ref[0, 4 * tile], bounds_ref[0, 4 * tile + 1]
    block = low // size
    # A tile that sees nothing has high = -1, which is block 0 where division truncates.
    count = jnp.where(high < low, 0, high // size - block + 1)

    def copies(i: Any, turn: Any) -> list[Any]:
        at = pl.ds(pl.multiple_of((block + i) * size, size), size)
        return [
            pltpu.make_async_copy(
                hbm.at[b, h, slice(None), at], buf.at[turn], arrived.at[lane, turn]
            )
            for lane, (hbm, buf) in enumerate(((k_hbm, k_buf), (v_hbm, v_buf)))
        ]

    _stream(count, copies, lambda i, turn: work((block + i) * size, turn))


def forward_kernel(
    bounds_ref: Any,
    q_ref: Any,
    spans_ref: Any,
    extra_ref: Any,
    k_hbm: Any,
    v_hbm: Any,
    out_ref: Any,
    total_ref: Any,
    k_buf: Any,
    v_buf: Any,
    arrived: Any,
    scores_ref: Any,
    tile_ref: Any,
    m_ref: Any,
    l_ref: Any,
    acc_ref: Any,
) -> None:
    tile = pl.program_id(2)
    tile_ref[...] = _scaled_heads(q_ref[...])
    m_ref[...] = _heads(extra_ref[...])
    l_ref[...] = jnp.ones(l_ref.shape, jnp.float32)
    acc_ref[...] = jnp.zeros(acc_ref.shape, jnp.float32)

    def attend(begin: Any, turn: Any) -> None:
        scores = _scores(
            scores_ref, tile_ref[...], k_buf[turn], spans_ref[...], begin, bounds_ref, tile
        )
        highest = jnp.maximum(m_ref[...], jnp.max(scores, axis=0, keepdims=True))
        scale = jnp.exp(m_ref[...] - highest)
        weights = jnp.exp(scores - highest)
        l_ref[...] = scale * l_ref[...] + jnp.sum(weights, axis=0, keepdims=True)
        m_ref[...] = highest
        part = _dot(v_buf[turn], weights.astype(v_buf.dtype), (1, 0))
        acc_ref[...] = scale * acc_ref[...] + part

    _stream_keys(bounds_ref, k_hbm, v_hbm, k_buf, v_buf, arrived, attend)
    out = (acc_ref[...] / l_ref[...]).astype(out_ref.dtype)
    total = m_ref[...] + jnp.log(l_ref[...])
    rows = out_ref.shape[2]
    for head in range(out_ref.shape[0]):
        at = slice(head * rows, (head + 1) * rows)
        out_ref[head] = out[:, at]
        total_ref[head : head + 1] = total[:, at]


def d_queries_kernel(
    bounds_ref: Any,
    q_ref: Any,
    spans_ref: Any,
    d_out_ref: Any,
    total_ref: Any,
    shift_ref: Any,
    k_hbm: Any,
    v_hbm: Any,
    d_q_ref: Any,
    k_buf: Any,
    v_buf: Any,
    arrived: Any,
    scores_ref: Any,
    tile_ref: Any,
    d_out_tile: Any,
    acc_ref: Any,
) -> None:
    tile = pl.program_id(2)
    tile_ref[...] = _scaled_heads(q_ref[...])
    d_out_tile[...] = _heads(d_out_ref[...])
    acc_ref[...] = jnp.zeros(acc_ref.shape, jnp.float32)
    total, shift = _heads(total_ref[...]), _heads(shift_ref[...])

    def add(begin: Any, turn: Any) -> None:
        scores = _scores(
            scores_ref, tile_ref[...], k_buf[turn], spans_ref[...], begin, bounds_ref, tile
        )
        _, d_scores = _gradients(scores, v_buf[turn], d_out_tile[...], total, shift)
        acc_ref[...] += _dot(k_buf[turn], d_scores.astype(k_buf.dtype), (1, 0))

    _stream_keys(bounds_ref, k_hbm, v_hbm, k_buf, v_buf, arrived, add)
    d_q = (acc_ref[...] * acc_ref.shape[0] ** -0.5).astype(d_q_ref.dtype)
    rows = d_q_ref.shape[2]
    for head in range(d_q_ref.shape[0]):
        d_q_ref[head] = d_q[:, head * rows : (head + 1) * rows]


def d_keys_kernel(
    bounds_ref: Any,
    k_ref: Any,
    v_ref: Any,
    q_hbm: Any,
    d_out_hbm: Any,
    total_hbm: Any,
    shift_hbm: Any,
    spans_hbm: Any,
    d_k_ref: Any,
    d_v_ref: Any,
    q_buf: Any,
    d_out_buf: Any,
    total_buf: Any,
    shift_buf: Any,
    spans_buf: Any,
    arrived: Any,
    tiles_ref: Any,
    scores_ref: Any,
    d_k_acc: Any,
    d_v_acc: Any,
) -> None:
    b, h, block = (pl.program_id(axis) for axis in range(3))
    size = k_ref.shape[1]
    rows = spans_buf.shape[2]
    begin = block * size
    d_k_acc[...] = jnp.zeros(d_k_acc.shape, jnp.float32)
    d_v_acc[...] = jnp.zeros(d_v_acc.shape, jnp.float32)

    def note(tile: Any, count: Any) -> Any:
        low, high = bounds_ref[0, 4 * tile], bounds_ref[0, 4 * tile + 1]
        seen = (low < begin + size) & (high >= begin)

        @pl.when(seen)
        def _keep() -> None:
            tiles_ref[count] = tile

        return count + seen.astype(jnp.int32)

    count = jax.lax.fori_loop(0, spans_hbm.shape[1], note, jnp.int32(0))

    def copies(i: Any, turn: Any) -> list[Any]:
        tile = tiles_ref[i]
        at = pl.ds(pl.multiple_of(tile * rows, rows), rows)
        sources = (
            (q_hbm.at[b, h, :, :, at], q_buf),
            (d_out_hbm.at[b, h, :, :, at], d_out_buf),
            (total_hbm.at[b, h, :, at], total_buf),
            (shift_hbm.at[b, h, :, at], shift_buf),
            (spans_hbm.at[b, tile], spans_buf),
        )
        return [
            pltpu.make_async_copy(source, buf.at[turn], arrived.at[lane, turn])
            for lane, (source, buf) in enumerate(sources)
        ]

    def add(i: Any, turn: Any) -> None:
        q, d_out = _scaled_heads(q_buf[turn]), _heads(d_out_buf[turn])
        scores = _scores(
            scores_ref, q, k_ref[...], spans_buf[turn], begin, bounds_ref, tiles_ref[i]
        )
        total, shift = _heads(total_buf[turn]), _heads(shift_buf[turn])
        weights, d_scores = _gradients(scores, v_ref[...], d_out, total, shift)
        d_v_acc[...] += _dot(d_out, weights.astype(d_out.dtype), (1, 1))
        d_k_acc[...] += _dot(q, d_scores.astype(q.dtype), (1, 1))

    _stream(count, copies, add)
    d_k_ref[...] = d_k_acc[...].astype(d_k_ref.dtype)
    d_v_ref[...] = d_v_acc[...].astype(d_v_ref.dtype)


def _gradients(
    scores: Array, values: Array, d_out: Array, total: Array, shift: Array
) -> tuple[Array, Array]:
    """Weights of a block's scores, and the gradient of the scores."""
    weights = jnp.exp(scores - total)
    return weights, weights * (_dot(values, d_out, (0, 0)) - shift)


def _dot(a: Array, b: Array, contract: tuple[int, int]) -> Array:
    """A product, float32 out; float32 operands keep all their bits."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dims = (((contract[0],), (contract[1],)), ((), ()))
    return jax.lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)
