"""Pages and block tables: nothing lost, nothing shared, under any order of calls."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle_jax.serving.pages import NULL_PAGE, BlockTables, PagePool


def test_a_pool_hands_out_each_page_once() -> None:
    pool = PagePool(5)
    assert (pool.capacity, pool.num_free) == (4, 4)
    assert pool.allocate(3) == [1, 2, 3]
    with pytest.raises(ValueError, match="2 pages wanted, 1 free"):
        pool.allocate(2)
    assert pool.num_free == 1
    pool.free([2, 1])
    assert sorted([*pool.allocate(2), *pool.allocate(1)]) == [1, 2, 4]
    assert pool.num_free == 0


@pytest.mark.parametrize("page", [0, 1, 4, -1])
def test_a_page_that_nobody_holds_is_not_freed(page: int) -> None:
    pool = PagePool(4)
    pool.free(pool.allocate(1))
    with pytest.raises(ValueError, match=f"page {page} is freed"):
        pool.free([page])


def test_a_pool_needs_a_page() -> None:
    with pytest.raises(ValueError, match="none besides the null page"):
        PagePool(1)


def test_rows_grow_and_shrink_by_positions() -> None:
    tables = BlockTables(num_slots=2, pages_a_slot=4, num_pages=6, page_size=3)
    assert tables.reserve(0, 4)
    assert tables.row(0).tolist() == [1, 2, NULL_PAGE, NULL_PAGE]
    assert tables.reserve(1, 3)
    assert tables.reserve(0, 7)  # a third page; the first two stay where they are
    assert tables.row(0).tolist() == [1, 2, 4, NULL_PAGE]
    assert not tables.reserve(1, 10)  # three more, one is free
    assert (tables.count(1), tables.pool.num_free) == (1, 1)
    tables.trim(0, 6)
    assert tables.row(0).tolist() == [1, 2, NULL_PAGE, NULL_PAGE]
    tables.trim(0, 9)  # never grows
    assert tables.count(0) == 2
    tables.release(0)
    assert tables.rows().tolist() == [[0, 0, 0, 0], [3, 0, 0, 0]]
    with pytest.raises(ValueError, match="13 positions in a row of 4 pages"):
        tables.reserve(1, 13)


def test_rows_are_copies() -> None:
    tables = BlockTables(num_slots=1, pages_a_slot=2, num_pages=3, page_size=1)
    rows, row = tables.rows(), tables.row(0)
    tables.reserve(0, 2)
    assert not rows.any()
    assert not row.any()
    assert tables.rows().dtype == np.int32


@settings(max_examples=60, deadline=None)
@given(
    page_size=st.integers(1, 4),
    num_pages=st.integers(2, 9),
    calls=st.lists(
        st.tuples(
            st.sampled_from(["reserve", "trim", "release"]), st.integers(0, 2), st.integers(0, 12)
        ),
        max_size=40,
    ),
)
def test_pages_are_never_lost_or_shared(page_size, num_pages, calls) -> None:
    tables = BlockTables(3, 12, num_pages, page_size)
    held = [0, 0, 0]  # pages
    for verb, slot, positions in calls:
        wanted = -(-positions // page_size)
        before = tables.row(slot)
        if verb == "reserve":
            fits = wanted - held[slot] <= num_pages - 1 - sum(held)
            assert tables.reserve(slot, positions) is fits
            held[slot] = max(held[slot], wanted) if fits else held[slot]
        elif verb == "trim":
            tables.trim(slot, positions)
            held[slot] = min(held[slot], wanted)
        else:
            tables.release(slot)
            held[slot] = 0
        tables.check()
        assert [tables.count(one) for one in range(3)] == held
        kept = min(held[slot], int((before != NULL_PAGE).sum()))
        assert (tables.row(slot)[:kept] == before[:kept]).all()
    assert tables.pool.num_free == num_pages - 1 - sum(held)


def test_the_check_itself() -> None:
    tables = BlockTables(2, 2, 4, 1)
    tables.reserve(0, 2)
    tables._rows[1, 0] = 1
    tables._counts[1] = 1
    with pytest.raises(AssertionError, match="pages"):
        tables.check()
