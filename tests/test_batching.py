"""Requests in buckets, and the arrays that a batch becomes."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from peagle_jax import batching
from peagle_jax.batching import Batch, Request
from peagle_jax.config import BlockConfig, ModelConfig, SamplingParams
from peagle_jax.decoding.generate import PREFILL_CHUNK
from peagle_jax.errors import InputError

MODEL = ModelConfig(BlockConfig(8, 8, 1, 1, 1, 8), vocab_size=30, max_positions=100)


def request(index: int, length: int, **params: Any) -> Request:
    return Request(index, tuple(range(length)), SamplingParams(**params))


@pytest.mark.parametrize(
    ("length", "size"),
    [(1, 64), (64, 64), (65, 128), (512, 512), (513, 1024), (1025, 2048), (5000, 8192)],
)
def test_prompt_buckets(length: int, size: int) -> None:
    assert batching.prompt_bucket(length) == size


@pytest.mark.parametrize(
    ("length", "size"),
    [(1, 32), (33, 64), (65, 96), (130, 160), (257, 320), (512, 512), (513, 640)],
)
def test_fine_buckets(length: int, size: int) -> None:
    assert batching.fine_bucket(length) == size


@pytest.mark.parametrize("length", [1, 63, 400, 513, 1500, 4097])
def test_prompt_buckets_are_whole_chunks(length: int) -> None:
    size = batching.prompt_bucket(length)
    assert length <= size < 2 * max(length, 64)
    assert size <= PREFILL_CHUNK or size % PREFILL_CHUNK == 0


@pytest.mark.parametrize(("count", "size"), [(1, 32), (32, 32), (33, 64), (128, 128), (129, 256)])
def test_new_token_buckets(count: int, size: int) -> None:
    assert batching.new_tokens_bucket(count) == size


def test_batches_group_like_sizes() -> None:
    lengths = [70, 3, 500, 64, 65, 2, 90]
    requests = [request(i, n, max_new_tokens=20 + 10 * i) for i, n in enumerate(lengths)]
    batches = batching.make_batches(requests, 3)
    assert [[r.index for r in b.requests] for b in batches] == [[5, 1, 3], [4, 0, 6], [2]]
    assert [b.prompt_size for b in batches] == [64, 128, 512]
    # The largest limit of each batch: 70, 80 and 40.
    assert [b.max_new_tokens for b in batches] == [128, 128, 64]
    # The last batch is as wide as the others: no program of its own for its rest.
    assert [b.rows for b in batches] == [3, 3, 3]


@pytest.mark.parametrize(("count", "rows"), [(1, 1), (2, 2), (3, 4), (5, 6), (6, 6), (13, 6)])
def test_few_requests_make_a_narrow_batch(count: int, rows: int) -> None:
    batches = batching.make_batches([request(i, 5) for i in range(count)], 6)
    assert {b.rows for b in batches} == {rows}
    assert sum(len(b.requests) for b in batches) == count


def test_no_requests_no_batches() -> None:
    assert batching.make_batches([], 4) == []


def test_arrays() -> None:
    params = SamplingParams(
        max_new_tokens=9,
        temperature=0.5,
        top_k=3,
        top_p=0.75,
        min_p=0.125,
        seed=2**32 - 1,
        ignore_eos=True,
    )
    batch = Batch((Request(0, (7, 8, 9), params), request(1, 1, seed=4)), 3, 4, 32)
    prompts, lengths, table = batch.arrays()
    np.testing.assert_array_equal(prompts, [[7, 8, 9, 0], [0, 0, 0, 0], [0, 0, 0, 0]])
    np.testing.assert_array_equal(lengths, [3, 1, 1])
    assert prompts.dtype == lengths.dtype == np.int32
    expected = {
        "temperature": [0.5, 0, 0],
        "top_k": [3, 0, 0],
        "top_p": [0.75, 1, 1],
        "min_p": [0.125, 0, 0],
        "seed": [2**32 - 1, 4, 0],
        # A row without a request has nothing to generate: it is finished from the start.
        "max_new_tokens": [9, 128, 0],
        "ignore_eos": [True, False, False],
    }
    assert {f.name for f in dataclasses.fields(table)} == set(expected)
    for name, values in expected.items():
        np.testing.assert_array_equal(getattr(table, name), values, err_msg=name)
    assert table.greedy.tolist() == [False, True, True]
    assert table.filtered.tolist() == [True, False, False]


def test_requests_without_a_seed_draw_one_each() -> None:
    batch = Batch(tuple(request(i, 2) for i in range(8)), 8, 64, 32)
    seeds = [np.asarray(batch.arrays()[2].seed) for _ in range(2)]
    # 16 draws of 32 bits: equal ones are as good as impossible.
    assert len(set(np.concatenate(seeds).tolist())) == 16


def test_a_prompt_that_fits() -> None:
    assert batching.check_prompt([0, 29] * 49 + [3], MODEL, "prompt 0") == (0, 29) * 49 + (3,)


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([], ["no tokens"]),
        ([1, 30], ["30", "0 to 29"]),
        ([-1], ["-1", "0 to 29"]),
        ([1] * 100, ["100 tokens", "at most 99"]),
    ],
)
def test_a_prompt_that_does_not_fit(ids: list[int], words: list[str]) -> None:
    with pytest.raises(InputError) as error:
        batching.check_prompt(ids, MODEL, "prompt 3")
    message = str(error.value)
    assert message.startswith("prompt 3: ")
    assert "\n" not in message
    assert all(word in message for word in words)
