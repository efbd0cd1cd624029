"""The packing plan: every document once, rows not overfull, little padding."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle_jax.training.packing import plan_packing


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 20), max_size=60),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_plan_holds_every_document_once_and_fills_rows(lengths: list[int], seed: int) -> None:
    sizes = np.array(lengths, np.int64)
    plan = plan_packing(sizes, 20, seed)
    assert sorted(plan.documents.tolist()) == list(range(len(lengths)))
    used = [int(sizes[plan.row(row)].sum()) for row in range(plan.num_rows)]
    assert all(1 <= one <= 20 for one in used)
    # A document opens a row only where it has no room in another: no two rows are half empty.
    assert sum(one <= 10 for one in used) <= 1
    assert plan.num_rows == plan_packing(sizes, 20, seed).num_rows


def test_a_plan_takes_the_tightest_row() -> None:
    """Whatever the order: 9 + 1 and 8 + 2 fill two rows of 10 in every best fit that does not
    begin with both small ones."""
    rows = {plan_packing(np.array([9, 8, 2, 1]), 10, seed).num_rows for seed in range(40)}
    assert rows == {2, 3}
    full = [plan_packing(np.array([9, 8, 2, 1]), 10, seed).num_rows for seed in range(40)]
    assert full.count(2) > 20


def test_a_plan_refuses_what_cannot_be_packed() -> None:
    for bad in ([0], [5, 11]):
        with pytest.raises(ValueError, match="document lengths"):
            plan_packing(np.array(bad), 10, 0)


def test_little_is_padding() -> None:
    rng = np.random.default_rng(0)
    for mean, least in ((300, 0.97), (400, 0.96)):
        lengths = np.clip(rng.lognormal(np.log(mean), 0.6, 5000), 4, 1024).astype(np.int64)
        plan = plan_packing(lengths, 1024, 0)
        assert lengths.sum() / (plan.num_rows * 1024) > least


def test_rows_do_not_sort_documents_by_length() -> None:
    """Rows hold short and long documents alike: their mean lengths vary as those of random draws
    do, not as far as the lengths themselves."""
    lengths = np.random.default_rng(1).integers(10, 200, 4000)
    plan = plan_packing(lengths, 2048, 0)
    means = [lengths[plan.row(row)].mean() for row in range(plan.num_rows)]
    assert np.std(means) < 0.5 * lengths.std()
