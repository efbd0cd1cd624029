"""Attention under the chain mask against a square mask, forward and backward."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cod_attention import cod_attention, visible
from peagle_jax.training.masks import (
    BaseKeys,
    SegmentRows,
    chain_attention,
    read_rows,
    write_rows,
)
from tests.kernels.contract import unchecked
from tests.training.dense_reference import chains_of, sees

# Index 0..4 is one document, 5..8 another, 9 padding.
DOCUMENTS = np.array([[1, 1, 1, 1, 1, 2, 2, 2, 2, 0]], np.int32)
CHAINS = {(1, 1), (1, 2), (1, 3), (0, 1), (2, 1), (2, 2), (6, 1)}


def elements() -> list[tuple[int, int]]:
    return [(a, 0) for a in range(10)] + sorted(CHAINS)


@pytest.mark.parametrize("window", [None, 1, 2, 3])
def test_who_sees_whom(window: int | None) -> None:
    anchor, depth = np.array(elements()).T
    document = DOCUMENTS[0, anchor]
    found = visible(
        anchor[:, None],
        depth[:, None],
        anchor,
        depth,
        document[:, None] == document,
        window,
    )
    expected = [[sees(q, k, DOCUMENTS[0], window) for k in elements()] for q in elements()]
    np.testing.assert_array_equal(found, expected)


def test_who_sees_whom_in_words() -> None:
    """The second mask row of anchor 2 stands at position 4 and, with a window of 4, sees the real
    rows 1 and 2 and its chain; not the real rows 3 and 4, nor another chain's row."""
    seen = {
        key
        for key in elements()
        if visible(2, 2, key[0], key[1], DOCUMENTS[0, key[0]] == DOCUMENTS[0, 2], 4)
    }
    assert seen == {(1, 0), (2, 0), (2, 1), (2, 2)}


def rows_and_arrays(seed: int = 0) -> tuple[SegmentRows, Any, Any, Any, list[tuple[int, int]]]:
    """All elements as one call's rows, random q, k, v, and which element each row is."""
    chains = chains_of([CHAINS])
    rows = SegmentRows(jnp.asarray(DOCUMENTS), 0, 10, chains.segment(0))
    assert bool(rows.valid.all())
    listed = list(zip(np.asarray(rows.anchor)[0].tolist(), rows.depth.tolist(), strict=True))
    assert set(listed) == set(elements())
    rng = np.random.default_rng(seed)
    heads = (4, 2, 2)
    q, k, v = (jnp.asarray(rng.standard_normal((1, len(listed), n, 6)), jnp.float32) for n in heads)
    return rows, 2 * q, k, v, listed


def dense_attention(q: Any, k: Any, v: Any, mask: Any) -> Any:
    k, v = (jnp.repeat(x, 2, axis=2) for x in (k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
    weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), axis=-1)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


@pytest.mark.parametrize("window", [None, 2])
def test_chain_attention_equals_a_square_mask(window: int | None) -> None:
    rows, q, k, v, listed = rows_and_arrays()
    mask = np.array([[sees(a, b, DOCUMENTS[0], window) for b in listed] for a in listed])
    probe = jnp.asarray(np.random.default_rng(1).standard_normal(q.shape), jnp.float32)

    def found(q: Any, k: Any, v: Any) -> Any:
        base = BaseKeys(*(jnp.swapaxes(x[:, : rows.size], 1, 2) for x in (k, v)))
        return jnp.sum(probe * chain_attention(q, k, v, base, rows, window=window))

    def expected(q: Any, k: Any, v: Any) -> Any:
        return jnp.sum(probe * dense_attention(q, k, v, mask))

    one, other = (jax.jit(jax.value_and_grad(f, (0, 1, 2)))(q, k, v) for f in (found, expected))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), one, other)


@pytest.mark.parametrize("query_block", [1, 4, 17, None])
def test_blocks_of_any_size_give_the_same(query_block: int | None) -> None:
    """17 rows in blocks of 4 leave a rest. Scores of the rows' own take part in the softmax."""
    rows, q, k, v, listed = rows_and_arrays()
    keys, values = (jnp.swapaxes(x[:, :10], 1, 2) for x in (k, v))
    own = jnp.asarray(np.random.default_rng(2).standard_normal((1, 17, 2, 2, 3)), jnp.float32)
    assert len(listed) == 17
    out, weights = cod_attention(
        q, keys, values, rows.anchor, rows.depth, rows.documents, own, query_block=query_block
    )
    for i, (a, _) in enumerate(listed):
        seen = [b for b in range(a + 1) if DOCUMENTS[0, b] == DOCUMENTS[0, a]]
        for head in range(4):
            scores = np.asarray(k)[0, seen, head // 2] @ np.asarray(q)[0, i, head] / np.sqrt(6)
            exps = np.exp(np.concatenate([scores, own[0, i, head // 2, head % 2]]))
            share = exps / exps.sum()
            expected = share[: len(seen)] @ np.asarray(v)[0, seen, head // 2]
            np.testing.assert_allclose(out[0, i, head], expected, atol=1e-5)
            np.testing.assert_allclose(
                weights[0, i, head // 2, head % 2], share[len(seen) :], atol=1e-5
            )


def test_many_blocks_add_up_in_float32() -> None:
    """In bfloat16 the sum of 512 blocks' gradients would be six times as far off."""
    length = 512
    rng = np.random.default_rng(3)
    arrays = [rng.standard_normal((1, length, heads, 6)) + 0.3 for heads in (4, 4, 2, 2)]
    at = jnp.arange(length)[None]

    def gradient(dtype: Any, query_block: int) -> Any:
        q, probe, k, v = (jnp.asarray(jnp.asarray(x, jnp.bfloat16), dtype) for x in arrays)

        def loss(k: Any, v: Any) -> Any:
            none = jnp.zeros((1, length, 2, 2, 0))
            depth, documents = np.zeros(length, np.int32), jnp.ones((1, length), jnp.int32)
            keys, values = (jnp.swapaxes(x, 1, 2) for x in (k, v))
            out, _ = cod_attention(
                q, keys, values, at, depth, documents, none, query_block=query_block
            )
            return jnp.sum(out.astype(jnp.float32) * probe.astype(jnp.float32))

        return jax.jit(jax.grad(loss, (0, 1)))(k, v)

    for found, expected in zip(gradient(jnp.bfloat16, 1), gradient(jnp.float32, 64), strict=True):
        off = jnp.linalg.norm(found.astype(jnp.float32) - expected)
        assert float(off / jnp.linalg.norm(expected)) < 0.004


def test_rows_are_written_and_read_at_their_indices() -> None:
    kept = jnp.zeros((2, 3, 8, 1))
    own = jnp.arange(12.0).reshape(2, 3, 2, 1)
    written = write_rows(kept, own, jnp.int32(4))
    np.testing.assert_array_equal(read_rows(written, 4, 2), own)
    np.testing.assert_array_equal(written[:, :, 4:6], own)
    assert float(jnp.sum(written)) == float(jnp.sum(own))


def test_an_implementation_that_is_not_there_is_refused() -> None:
    rows, q, k, v, _ = rows_and_arrays()
    base = BaseKeys(*(jnp.swapaxes(x[:, :10], 1, 2) for x in (k, v)))
    chain_attention(q, k, v, base, rows, implementation="reference")
    unknown: Any = "pallas_metal"
    with unchecked(), pytest.raises(NotImplementedError, match="'pallas_metal' is not available"):
        chain_attention(q, k, v, base, rows, implementation=unknown)
