"""Verification attention: kernels against the reference, on caches that are poisoned."""

from __future__ import annotations

from typing import Any, ClassVar

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from pallas_kernels.target import Target, compile_for
from pallas_kernels.verify_attention import (
    GpuBlocks,
    TpuBlocks,
    reference,
    verify_attention,
    verify_attention_paged,
)
from tests.kernels.contract import Call, Case, KernelContract, assert_close, parents


def poisoned(cache: np.ndarray, low: np.ndarray, end: np.ndarray) -> np.ndarray:
    """The cache with NaN in every slot outside `low .. end - 1` of its sequence."""
    cache = cache.copy()
    for sequence, (first, last) in enumerate(zip(low, end, strict=True)):
        cache[sequence, :, :first] = np.nan
        cache[sequence, :, last:] = np.nan
    return cache


def in_pages(cache: np.ndarray, page: int, order: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A contiguous cache cut into pages that lie in `order`, and the page table."""
    batch, kv_heads, capacity, dim = cache.shape
    count = capacity // page
    cut = cache.reshape(batch, kv_heads, count, page, dim).swapaxes(1, 2)
    pages = np.empty_like(cut.reshape(-1, kv_heads, page, dim))
    pages[order] = cut.reshape(pages.shape)
    return pages, order.reshape(batch, count)


def attention(
    batch: int,
    rows: int,
    heads: int,
    kv_heads: int,
    dim: int,
    capacity: int,
    *,
    window: int | None = None,
    sinks: bool = False,
    tree: bool = False,
    ring: bool = False,
    page: int | None = None,
    starts: tuple[int, ...] | None = None,
    cache_dtype: Any = None,
    tpu: TpuBlocks | None = None,
    gpu: GpuBlocks | None = None,
) -> Any:
    """A builder of calls; slots that no row may see hold NaN, and their pages are nowhere."""

    def build(rng: np.random.Generator, dtype: Any) -> Call:
        held = dtype if cache_dtype is None else cache_dtype
        q = jnp.asarray(rng.normal(size=(batch, rows, heads, dim)), dtype)
        caches = [
            np.asarray(jnp.asarray(rng.normal(size=(batch, kv_heads, capacity, dim)), held))
            for _ in range(2)
        ]
        most = 3 * capacity if ring else capacity - rows
        start = np.asarray(starts if starts else rng.integers(0, most + 1, batch), np.int32)
        static: dict[str, Any] = {"window": window} if window else {}
        arrays: dict[str, Any] = {"q": q, "start": jnp.asarray(start)}
        if sinks:
            arrays["sinks"] = jnp.asarray(rng.normal(size=heads), jnp.float32)
        if tree:
            mask = np.zeros((batch, rows, rows), bool)
            for one in mask:
                for row, parent in enumerate(parents(rng, rows)):
                    one[row] = one[parent] if parent >= 0 else False
                    one[row, row] = True
            arrays["tree"] = jnp.asarray(mask)
        low = np.maximum(start - window + 1, 0) if window and not ring else 0 * start
        end = start + rows if not ring else np.where(start < capacity, start + rows, capacity)
        clean, names = caches, ("keys", "values")
        function: Any = verify_attention
        dirty = [poisoned(cache, low, end) for cache in caches]
        if page is not None:
            names, function = ("key_pages", "value_pages"), verify_attention_paged
            order = rng.permutation(batch * capacity // page)
            (clean, dirty) = (
                [in_pages(cache, page, order)[0] for cache in kind] for kind in (caches, dirty)
            )
            table = order.reshape(batch, -1).astype(np.int32)
            number = np.arange(table.shape[1]) * page
            dead = (number >= end[:, None]) | (number + page <= low[:, None])
            arrays["page_table"] = jnp.asarray(np.where(dead, -7, table))
        default = TpuBlocks(kv_heads, 128, 128) if dim == 64 else TpuBlocks(kv_heads, 32, 16)
        return Call(
            function,
            arrays | {n: jnp.asarray(c) for n, c in zip(names, dirty, strict=True)},
            {n: jnp.asarray(c) for n, c in zip(names, clean, strict=True)},
            static,
            {
                "pallas_tpu": {"blocks": tpu or default},
                "pallas_gpu": {"blocks": gpu or GpuBlocks(16, 32, 2)},
            },
        )

    return build


F32 = (jnp.float32,)
BF16 = (jnp.bfloat16,)


class TestVerifyAttention(KernelContract):
    CASES: ClassVar = [
        Case("verify", attention(3, 5, 8, 2, 128, 96, starts=(0, 90, 27)), races=True),
        Case("decode", attention(2, 1, 4, 4, 128, 64), BF16),
        Case("slots-along-lanes", attention(3, 8, 8, 2, 64, 256, starts=(0, 127, 140), sinks=True)),
        Case("lanes-window", attention(2, 3, 4, 2, 64, 384, window=20, starts=(250, 380)), F32),
        Case("window", attention(2, 5, 8, 2, 128, 96, window=20), F32),
        Case(
            "head-blocks",
            attention(2, 3, 8, 4, 128, 64, tpu=TpuBlocks(2, 16, 16), gpu=GpuBlocks(16, 16, 3)),
            F32,
        ),
        Case(
            "ring", attention(3, 5, 4, 2, 128, 48, window=20, ring=True, starts=(3, 70, 141)), F32
        ),
        Case("tree-of-two-words", attention(2, 40, 4, 2, 128, 96, tree=True)),
        Case(
            "everything-at-once",
            attention(2, 5, 4, 2, 128, 48, window=20, ring=True, tree=True, sinks=True),
            F32,
        ),
        Case("paged", attention(3, 5, 8, 2, 128, 96, page=16), races=True),
        Case(
            "paged-window",
            attention(2, 5, 8, 2, 128, 96, page=16, window=40, sinks=True, starts=(2, 80)),
            F32,
        ),
        Case("large-pages", attention(2, 5, 4, 2, 64, 512, page=256), F32),
        Case("float8-cache", attention(2, 5, 4, 2, 128, 64, cache_dtype=jnp.float8_e4m3fn), F32),
    ]

    @settings(
        max_examples=3, deadline=None, suppress_health_check=[HealthCheck.differing_executors]
    )
    @given(data=st.data())
    def test_any_shape_equals_the_reference(self, data):
        draw = data.draw
        kv_heads, group = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 3]))
        rows = draw(st.integers(1, 12))
        build = attention(
            draw(st.integers(1, 2)),
            rows,
            kv_heads * group,
            kv_heads,
            128,
            draw(st.sampled_from([32, 48])),
            window=draw(st.sampled_from([None, 1, 7, 30])),
            sinks=draw(st.booleans()),
            tree=draw(st.booleans()),
            page=draw(st.sampled_from([None, 16])),
        )
        call = build(np.random.default_rng(draw(st.integers(0, 99))), jnp.float32)
        implementation = draw(st.sampled_from(self.IMPLEMENTATIONS))
        assert_close(call.interpreted(implementation), call.expected())

    @pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
    @pytest.mark.parametrize(
        "build",
        [
            attention(3, 5, 8, 2, 32, 96, page=16),
            attention(2, 3, 4, 2, 64, 1024, page=32, starts=(1000, 130)),
            attention(2, 4, 4, 2, 64, 480, page=32, window=40, sinks=True, starts=(2, 300)),
            attention(2, 40, 4, 2, 64, 480, page=48, tree=True, starts=(440, 7)),
            attention(2, 7, 4, 2, 64, 480, page=32, tree=True, window=40, starts=(0, 301)),
            attention(2, 200, 2, 1, 64, 512, page=256, starts=(0, 312)),
            attention(2, 2, 4, 2, 64, 320, page=16, cache_dtype=jnp.float8_e4m3fn),
        ],
        ids=["small", "long", "window", "tree", "tree-window", "prefill", "float8"],
    )
    def test_a_loop_over_pages_equals_the_reference(self, build, dtype):
        call = build(np.random.default_rng(5), dtype)
        got = jax.jit(lambda arrays: call.bound("xla_cpu")(**arrays))(dict(call.arrays))
        assert_close(got, call.expected())

    @pytest.mark.parametrize("rows", [2, 40])
    def test_what_is_no_number_stays_in_its_sequence(self, rows):
        build = attention(3, rows, 4, 2, 64, 480, page=32, starts=(300, 150, 10))
        call = build(np.random.default_rng(5), jnp.float32)
        run = jax.jit(lambda arrays: call.bound("xla_cpu")(**arrays))
        want = np.asarray(call.expected())
        for bad in range(3):
            arrays = dict(call.arrays)
            arrays["q"] = arrays["q"].at[bad].set(jnp.nan)
            got = np.asarray(run(arrays))
            assert np.isnan(got[bad]).all()
            others = np.arange(3) != bad
            np.testing.assert_allclose(got[others], want[others], 1e-5, 1e-5)

    def test_heuristic_blocks_equal_the_reference(self, implementation):
        call = attention(1, 4, 4, 2, 128, 128)(np.random.default_rng(0), jnp.float32)
        call = Call(call.function, call.arrays, call.clean)
        assert_close(call.interpreted(implementation), call.expected())


def small(
    dim: int = 64, dtype: Any = jnp.float32, rows: int = 2, capacity: int = 128
) -> dict[str, Any]:
    return {
        "q": jnp.zeros((1, rows, 2, dim), dtype),
        "keys": jnp.zeros((1, 1, capacity, dim), dtype),
        "values": jnp.zeros((1, 1, capacity, dim), dtype),
        "start": jnp.zeros((1,), jnp.int32),
    }


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (small(dim=32), "supports head_dim 64 and 128, found 32"),
        (small(rows=65), "supports rows 1 to 64, found 65"),
        (small(dtype=jnp.float16), "supports dtype bfloat16 and float32, found float16"),
        (small(capacity=72), "multiples of 128 for a float32 cache of head_dim 64, found 72"),
    ],
)
def test_what_a_kernel_does_not_cover_is_refused(arrays, message):
    with (
        compile_for(Target("tpu", interpret=True)),
        pytest.raises(NotImplementedError, match=message),
    ):
        verify_attention(**arrays, implementation="pallas_tpu")


def test_what_a_kernel_does_not_cover_falls_to_the_reference_where_nothing_is_said():
    with compile_for(Target("tpu", interpret=True)):
        out = verify_attention(**small(dim=32))
    assert out.shape == (1, 2, 2, 32)


@pytest.mark.parametrize("start", [-1, 127])
def test_lengths_beyond_the_cache_are_refused(start):
    arrays = small() | {"start": jnp.asarray([start], jnp.int32)}
    with pytest.raises(ValueError, match=r"the cache holds 0 \.\. 127"):
        verify_attention(**arrays)


@pytest.mark.parametrize("window", [0, -3])
def test_a_window_that_shows_nothing_is_refused(window):
    with pytest.raises(ValueError, match=rf"window: found {window}, expected 1 or more"):
        verify_attention(**small(), window=window)


def test_lengths_beyond_the_page_table_are_refused():
    arrays = small()
    with pytest.raises(ValueError, match=r"the cache holds 0 \.\. 255"):
        verify_attention_paged(
            arrays["q"],
            arrays["keys"],
            arrays["values"],
            jnp.zeros((1, 2), jnp.int32),
            jnp.asarray([255], jnp.int32),
        )


def test_a_tree_that_is_a_chain_is_causal():
    call = attention(2, 6, 4, 2, 64, 48, window=9)(np.random.default_rng(3), jnp.float32)
    arrays = {**call.arrays, **call.clean}
    chain = jnp.broadcast_to(jnp.tril(jnp.ones((6, 6), bool)), (2, 6, 6))
    # Nine positions cover the whole chain, so that its mask alone cuts nothing off.
    want = reference.verify_attention(**arrays, window=9)
    assert_close(reference.verify_attention(**arrays, window=9, tree=chain), want)
