"""Rings of layers with a window hold what caches of all positions hold, wherever it is seen."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from peagle_jax.config import BlockConfig
from peagle_jax.models.attention import CachedAttend
from peagle_jax.models.cache import KVCache

WINDOW, CAPACITY, K = 6, 128, 3
BLOCK = BlockConfig(8, 8, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=4)
BLOCK = dataclasses.replace(BLOCK, windows=(None, WINDOW, 500))
# (first positions of the sequences, rows, real rows or None for all)
Call = tuple[np.ndarray, int, np.ndarray | None]


def test_only_layers_with_a_small_window_are_rings() -> None:
    cache = KVCache.init(BLOCK, 2, CAPACITY, jnp.float32, span=K + 1)
    assert [layer.ring for layer in cache.layers] == [False, True, False]
    # window - 1 + span = 9, in whole tiles.
    assert [layer.capacity for layer in cache.layers] == [CAPACITY, 16, CAPACITY]
    assert cache.capacity == CAPACITY
    plain = KVCache.init(BLOCK, 2, CAPACITY, jnp.float32)
    assert [layer.capacity for layer in plain.layers] == [CAPACITY] * 3


def prefill(lengths: np.ndarray, chunk: int, size: int) -> Iterator[Call]:
    for begin in range(0, size, chunk):
        yield np.full_like(lengths, begin), chunk, np.clip(lengths - begin, 0, chunk)


def verifications(n: np.ndarray, rng: np.random.Generator) -> Iterator[Call]:
    """K+1 rows a step, of which 1 .. K+1 stay; the last sequence is finished and stands still."""
    n = n.copy()
    for _ in range(12):
        yield n.copy(), K + 1, None
        moved = rng.integers(1, K + 2, len(n))
        moved[-1] = 0
        n += moved


def parallel_drafts(n: np.ndarray, rng: np.random.Generator) -> Iterator[Call]:
    """m real rows and K-1 mask rows, padded to the larger or the smaller size of the step."""
    n = n.copy()
    for _ in range(12):
        m = rng.integers(1, rng.choice([3, K + 2]), len(n))
        n += m
        yield n - m, (2 if m.max() <= 2 else K + 1) + K - 1, None


def autoregressive_drafts(n: np.ndarray, rng: np.random.Generator) -> Iterator[Call]:
    """A pass over the pending rows, then one row a pass, which the next step rolls back."""
    n = n.copy()
    for _ in range(8):
        m = rng.integers(1, K + 2, len(n))
        n += m
        yield n - m, K + 1, None
        for j in range(1, K):
            yield n + j - 1, 1, None


@partial(jax.jit, static_argnames="window")
def attend_both(caches, start, counts, q, k, v, sinks, window):
    outs, written = zip(
        *(CachedAttend(cache, start, window, counts)(q, k, v, sinks) for cache in caches),
        strict=True,
    )
    return outs, written


def assert_same(calls: list[Call], batch: int, span: int) -> None:
    """Through a ring of 8 slots, all of them needed, and a cache of all positions. Keys of
    rejected rows differ from those that take their places."""
    rng, window = np.random.default_rng(0), 9 - span
    block = dataclasses.replace(BLOCK, num_layers=1, windows=(window,))
    caches = tuple(
        KVCache.init(block, batch, CAPACITY, jnp.float32, span).layers[0] for span in (span, None)
    )
    sinks = rng.normal(size=4).astype(np.float32)
    for start, rows, counts in calls:
        q, k, v = (
            rng.normal(size=(batch, rows, heads, 4)).astype(np.float32) for heads in (4, 2, 2)
        )
        real = None if counts is None else np.int32(counts)
        (found, expected), caches = attend_both(
            caches, np.int32(start), real, q, k, v, sinks, window=window
        )
        for b in range(batch):
            end = rows if counts is None else counts[b]
            np.testing.assert_allclose(found[b, :end], expected[b, :end], rtol=0, atol=1e-5)
    assert caches[0].ring
    assert caches[0].capacity == 8
    assert max((start + rows).max() for start, rows, _ in calls) > 32


@pytest.mark.parametrize(("lengths", "chunk"), [((21,), 40), ((9, 33, 1), 4)])
@pytest.mark.parametrize(
    ("steps", "span"),
    [(verifications, K + 1), (parallel_drafts, 2 * K), (autoregressive_drafts, 2 * K)],
)
def test_a_ring_is_seen_as_all_positions_are(steps, span, lengths, chunk) -> None:
    """Prefill in pieces, padded, then a method's calls with their roll-backs."""
    n = np.array(lengths)
    calls = [*prefill(n, chunk, 40), *steps(n, np.random.default_rng(1))]
    assert_same(calls, len(n), span)


def test_a_call_of_more_rows_than_the_ring_has_slots() -> None:
    """Without counts all rows are real, and attend to each other across many windows."""
    start = np.zeros(1, int)
    assert_same([(start, 50, None), (start + 50, 50, None), (start + 100, 1, None)], 1, 1)


def test_a_sink_takes_its_share() -> None:
    """One key, equal scores: half the value where the sink's score is the key's."""
    cache = KVCache.init(BLOCK, 1, CAPACITY, jnp.float32).layers[0]
    q, v = jnp.zeros((1, 1, 4, 4)), jnp.ones((1, 1, 2, 4))
    sinks = jnp.array([0.0, jnp.log(3.0), -1e9, 1e9])
    start = jnp.zeros(1, jnp.int32)
    out, _ = CachedAttend(cache, start, None)(q, jnp.ones((1, 1, 2, 4)), v, sinks)
    np.testing.assert_allclose(out[0, 0, :, 0], [0.5, 0.25, 1.0, 0.0], atol=1e-6)


@pytest.mark.parametrize("batch", [1, 3])
def test_a_ring_is_written_in_place(batch: int) -> None:
    """No copy of the ring in a loop that writes it."""
    ring = KVCache.init(BLOCK, batch, CAPACITY, jnp.float32, span=K + 1).layers[1]
    rows = jnp.ones((batch, K + 1, 2, 4))

    def loop(ring, start):
        def step(i, carry):
            return carry.write(start + i, rows * i, rows + i)

        return jax.lax.fori_loop(0, 9, step, ring)

    start = jnp.zeros(batch, jnp.int32)
    text = str(jax.jit(loop, donate_argnums=0).lower(ring, start).compile().as_text())
    shape = f"f32[{batch},2,{ring.capacity},4]"
    assert f"{shape}" in text
    body = text.split("ENTRY")[0]
    copies = [line for line in body.splitlines() if f"= {shape}" in line and " copy(" in line]
    assert copies == []
