"""Counters of a generation and what is computed from them."""

from __future__ import annotations

import numpy as np

from peagle_jax.metrics import GenerationStats

STATS = GenerationStats(
    tokens=20,
    num_drafts=8,
    num_draft_tokens=24,
    accepted_per_position=(6, 4, 1),
    seconds=4.0,
    compile_seconds=1.5,
)
PLAIN = GenerationStats(5, 0, 0, (), 0.0, 0.0)


def test_derived_numbers() -> None:
    assert STATS.num_accepted == 11
    assert STATS.acceptance_length == 1 + 11 / 8
    assert STATS.tokens_per_second == 5.0
    np.testing.assert_allclose(STATS.acceptance_rates, [0.75, 0.5, 0.125])


def test_nothing_drafted_and_no_time() -> None:
    assert PLAIN.num_accepted == 0
    assert PLAIN.acceptance_length == 1.0
    assert PLAIN.tokens_per_second == 0.0
    assert PLAIN.acceptance_rates.shape == (0,)


def test_total_adds_counters_and_takes_the_time_once() -> None:
    """Of requests with different K, one of them plain."""
    deeper = GenerationStats(7, 2, 10, (2, 2, 1, 1, 1), 4.0, 1.5)
    total = GenerationStats.total([STATS, PLAIN, deeper], seconds=4.0, compile_seconds=1.5)
    assert total == GenerationStats(32, 10, 34, (8, 6, 2, 1, 1), 4.0, 1.5)
    assert total.tokens_per_second == 8.0
    assert GenerationStats.total([], 0.0, 0.0) == GenerationStats(0, 0, 0, (), 0.0, 0.0)


def test_line() -> None:
    assert STATS.line() == (
        "20 tokens in 4.00 s, 5.0 tokens/s, acceptance length 2.38 (8 drafts; accepted by "
        "position 0.75 0.50 0.12), compiled in 1.5 s"
    )
    assert PLAIN.line() == "5 tokens in 0.00 s, 0.0 tokens/s, compiled in 0.0 s"
