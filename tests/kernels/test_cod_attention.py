"""Training attention: outputs and gradients against the reference; skipped blocks are not read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from pallas_kernels.cod_attention import MASKED, GpuBlocks, TpuBlocks, cod_attention, visible
from pallas_kernels.cod_attention import shapes as cod_shapes
from pallas_kernels.cod_attention.predicate import visible_spans
from pallas_kernels.cod_attention.tiles import (
    by_head,
    by_row,
    spans_to_tiles,
    tile_bounds,
    visited,
)
from pallas_kernels.target import Target, compile_for
from tests.kernels.contract import PLATFORMS, Call, Case, KernelContract, assert_close

TPU, GPU = TpuBlocks(16, 32), GpuBlocks(16, 16)


def outputs_and_gradients(
    q: Any, keys: Any, values: Any, own: Any, probe: Any, own_probe: Any, **others: Any
) -> Any:
    """Output, weights of the rows' own scores, and the gradient of their probes' product, as
    exact as the queries are."""

    def attend(*given: Any) -> Any:
        q, keys, values, own = given
        return cod_attention(q=q, keys=keys, values=values, own=own, **others)

    outputs, pull_back = jax.vjp(attend, q, keys, values, own)
    return jax.tree.map(lambda x: x.astype(q.dtype), (outputs, pull_back((probe, own_probe))))


def packed(lengths: Sequence[Sequence[int]], length: int) -> np.ndarray:
    """Documents 1, 2, .. of these lengths, then padding."""
    out = np.zeros((len(lengths), length), np.int32)
    for row, parts in zip(out, lengths, strict=True):
        ids = np.repeat(np.arange(1, len(parts) + 1), parts)
        row[: len(ids)] = ids
    return out


def training(
    lengths: Sequence[Sequence[int]],
    length: int,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 64,
    *,
    start: int = 0,
    size: int | None = None,
    slots: tuple[int, ...] = (20, 12, 7),
    unused: int = 3,
    window: int | None = None,
    tpu: TpuBlocks | None = TPU,
    gpu: GpuBlocks | None = GPU,
) -> Any:
    """A builder of calls: depth 0 of one segment, then chains; the last `unused` of every depth
    are slots without an element, whose anchor is the segment's start."""

    def build(rng: np.random.Generator, dtype: Any) -> Call:
        batch, own_rows = len(lengths), length - start if size is None else size
        documents = packed(lengths, length)
        anchors = [np.tile(np.arange(start, start + own_rows), (batch, 1))]
        chains = rng.integers(max(0, start - 1), start + own_rows, (batch, max(slots, default=0)))
        for used in slots:
            block = chains[:, :used].copy()
            block[:, max(0, used - unused) :] = start
            anchors.append(block)
        anchor = np.concatenate(anchors, axis=1).astype(np.int32)
        depth = np.repeat(np.arange(len(slots) + 1), (own_rows, *slots)).astype(np.int32)
        rows = anchor.shape[1]

        def normal(*shape: int, dtype: Any = dtype) -> jax.Array:
            return jnp.asarray(rng.normal(size=shape), dtype)

        own = rng.normal(size=(batch, rows, kv_heads, heads // kv_heads, len(slots)))
        # A row's own scores are those of depths up to its own.
        hidden = np.arange(1, len(slots) + 1) > depth[:, None]
        own = np.where(hidden[None, :, None, None], MASKED, own)
        return Call(
            outputs_and_gradients,
            {
                "q": normal(batch, rows, heads, dim),
                "keys": normal(batch, kv_heads, length, dim),
                "values": normal(batch, kv_heads, length, dim) / 2,
                "own": jnp.asarray(own, jnp.float32),
                "anchor": jnp.asarray(anchor),
                "depth": jnp.asarray(depth),
                "documents": jnp.asarray(documents),
                "probe": normal(batch, rows, heads, dim) / 2,
                "own_probe": normal(*own.shape, dtype=jnp.float32) / 2,
            },
            static={} if window is None else {"window": window},
            tuned={
                "pallas_tpu": {} if tpu is None else {"blocks": tpu},
                "pallas_gpu": {} if gpu is None else {"blocks": gpu},
            },
        )

    return build


F32 = (jnp.float32,)
BF16 = (jnp.bfloat16,)
PACKED = [[30, 11, 40], [96]]


class TestCodAttention(KernelContract):
    CASES: ClassVar = [
        Case("packed", training(PACKED, 96)),
        Case("wide-heads", training([[30, 40]], 96, kv_heads=4, dim=128, slots=()), BF16),
        Case("a-later-segment", training([[50]], 71, start=20, size=41), F32),
        Case("window", training(PACKED, 96, start=32, size=32, window=9), F32),
        # Depths 1 and 2 see nothing of depth 0, only rows of their own.
        Case("window-of-one", training([[9, 40]], 64, window=1, unused=0), F32),
        Case("empty-elements", training([[9], []], 40, slots=(9, 9), unused=9), F32),
        Case("one-head", training([[40]], 40, 1, 1, slots=(3,)), F32, races=True),
    ]

    @settings(
        max_examples=2,
        deadline=None,
        suppress_health_check=[HealthCheck.differing_executors, HealthCheck.too_slow],
    )
    @given(data=st.data())
    def test_any_shape_equals_the_reference(self, data):
        draw = data.draw
        length = draw(st.integers(33, 80))
        cuts = sorted(draw(st.lists(st.integers(1, length - 1), max_size=4, unique=True)))
        parts = np.diff([0, *cuts, length]).tolist()
        kv_heads, group = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 3]))
        build = training(
            [parts[: draw(st.integers(1, len(parts)))]],
            length,
            kv_heads * group,
            kv_heads,
            slots=draw(st.sampled_from([(), (5,), (17, 17, 4)])),
            window=draw(st.sampled_from([None, 1, 2, 20])),
            unused=draw(st.integers(0, 5)),
        )
        call = build(np.random.default_rng(draw(st.integers(0, 99))), jnp.float32)
        implementation = draw(st.sampled_from(self.IMPLEMENTATIONS))
        assert_close(call.interpreted(implementation), call.expected())

    def test_heuristic_blocks_equal_the_reference(self, implementation):
        build = training([[60, 140]], 200, tpu=None, gpu=None)
        call = build(np.random.default_rng(0), jnp.float32)
        assert_close(call.interpreted(implementation), call.expected())

    def test_what_a_tile_does_not_see_is_not_read(self, implementation):
        """Not-a-number in every block that the bounds leave out, forward and backward."""
        call = training([[64, 64]], 128, 2, 1, slots=())(np.random.default_rng(2), jnp.float32)
        blocks = call.tuned[implementation]["blocks"]
        spans = spans_of(call.arrays)
        seen = visited(tile_bounds(spans_to_tiles(spans, blocks.rows)), 128, blocks.keys)
        seen = np.asarray(seen)[0]
        want, (_, d_keys, d_values, _) = call.expected()
        with compile_for(Target(PLATFORMS[implementation], interpret=True)):
            run = call.program(implementation)
            for tile in (1, 6):  # of each document one
                hidden = np.repeat(~seen[tile], blocks.keys)
                assert hidden.any()
                poisoned = {
                    name: call.arrays[name].at[:, :, hidden].set(jnp.nan)
                    for name in ("keys", "values")
                }
                (out, _), (d_q, *_) = run({**call.arrays, **poisoned})
                rows = slice(tile * blocks.rows, (tile + 1) * blocks.rows)
                assert_close(out[:, rows], want[0][:, rows])
                assert np.isfinite(d_q[:, rows]).all()
            block = 1
            blind = np.repeat(~seen[:, block], blocks.rows)
            assert blind.any()
            probe = call.arrays["probe"].at[:, blind].set(jnp.nan)
            _, (_, *found, _) = run({**call.arrays, "probe": probe})
        at = slice(block * blocks.keys, (block + 1) * blocks.keys)
        for got, expected in zip(found, (d_keys, d_values), strict=True):
            assert_close(got[:, :, at], expected[:, :, at])


def spans_of(arrays: Any, window: int | None = None) -> jax.Array:
    return visible_spans(arrays["anchor"], arrays["depth"], arrays["documents"], window)


@pytest.mark.parametrize("window", [None, 1, 2, 9])
def test_a_span_is_what_the_predicate_shows(window):
    call = training(PACKED, 96, slots=(30, 20, 9))(np.random.default_rng(4), jnp.float32)
    anchor, documents = (np.asarray(call.arrays[name]) for name in ("anchor", "documents"))
    depth, index = np.asarray(call.arrays["depth"]), np.arange(96)
    first, last = np.asarray(spans_of(call.arrays, window)).swapaxes(0, 1)
    spanned = (index >= first[..., None]) & (index <= last[..., None])
    document = np.take_along_axis(documents, anchor, axis=1)
    same = document[..., None] == documents[:, None]
    seen = visible(anchor[..., None], depth[:, None], index, 0, same, window)
    np.testing.assert_array_equal(spanned, seen)
    assert spanned.any(axis=-1)[:, depth == 0].all()


@pytest.mark.parametrize("window", [None, 9])
def test_blocks_that_are_left_out_hold_nothing_that_is_seen(window):
    call = training(PACKED, 96, slots=(30, 20, 9))(np.random.default_rng(4), jnp.float32)
    first, last = np.asarray(spans_of(call.arrays, window)).swapaxes(0, 1)
    tiles = spans_to_tiles(spans_of(call.arrays, window), 8)
    kept = np.asarray(visited(tile_bounds(tiles), 96, 16))
    for sequence in range(2):
        for tile, blocks in enumerate(kept[sequence]):
            rows = slice(8 * tile, 8 * tile + 8)
            for block, is_kept in enumerate(blocks):
                low, high = 16 * block, 16 * block + 15
                inside = (first[sequence, rows] <= high) & (last[sequence, rows] >= low)
                assert is_kept or not inside.any()
                # Depth 0 stands in order, so that nothing is kept for no row's sake.
                if rows.stop <= 96:
                    assert is_kept == inside.any()


@pytest.mark.parametrize(
    ("documents", "window", "least", "most"),
    [([20480], None, 0.45, 0.5), ([2048] * 10, None, 0.9, 0.95), ([20480], 512, 0.9, 0.97)],
)
def test_the_share_of_a_long_row_that_is_skipped(documents, window, least, most):
    """Depth 0 of 20,480 tokens under the tiling of a released drafter's heads."""
    blocks = cod_shapes.blocks(cod_shapes.Problem(8, 64, "bfloat16"), Target("tpu"))
    at = jnp.arange(20480)[None]
    row = jnp.asarray(packed([documents], 20480))
    spans = visible_spans(at, jnp.zeros(20480, jnp.int32), row, window)
    kept = visited(tile_bounds(spans_to_tiles(spans, blocks.rows)), 20480, blocks.keys)
    assert least < 1 - float(jnp.mean(kept)) < most


def test_arrays_are_turned_back():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 21, 6, 3)), jnp.float32)
    turned = by_head(x, 2)
    # Key head 1, its group's head 2: head 5.
    np.testing.assert_array_equal(turned[:, 1, 2, :, 20], x[:, 20, 5])
    np.testing.assert_array_equal(by_row(turned), x)


@pytest.mark.parametrize(
    ("dim", "dtype", "message"),
    [
        (32, jnp.float32, "supports head_dim 64 and 128, found 32"),
        (64, jnp.float16, "supports bfloat16 or float32 .* found float16"),
    ],
)
def test_what_a_kernel_does_not_cover_is_refused(dim, dtype, message):
    call = training([[9]], 9, dim=dim, slots=())(np.random.default_rng(0), dtype)
    with compile_for(Target("tpu", interpret=True)):
        with pytest.raises(NotImplementedError, match=message):
            call.function(**call.arrays, implementation="pallas_tpu")
        call.function(**call.arrays)  # the reference, where nothing is said
