"""Cache writes: the rows land where they belong, and nothing else changes."""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cache_write import reference, write_cache, write_cache_paged
from pallas_kernels.target import Target, compile_for
from tests.kernels.contract import Call, Case, KernelContract


def write(
    batch: int,
    rows: int,
    kv_heads: int,
    dim: int,
    capacity: int,
    *,
    starts: tuple[int, ...] | None = None,
    ring: bool = False,
    page: int | None = None,
) -> Any:
    """A builder of calls."""

    def build(rng: np.random.Generator, dtype: Any) -> Call:
        def normal(*shape: int) -> jax.Array:
            return jnp.asarray(rng.normal(size=shape), dtype)

        start = starts if starts else rng.integers(0, capacity - rows + 1, batch)
        arrays = {
            "new_keys": normal(batch, rows, kv_heads, dim),
            "new_values": normal(batch, rows, kv_heads, dim),
            "start": jnp.asarray(start, jnp.int32),
        }
        if page is None:
            for name in ("keys", "values"):
                arrays[name] = normal(batch, kv_heads, capacity, dim)
            return Call(write_cache, arrays, static={"ring": True} if ring else {})
        count = batch * capacity // page
        for name in ("key_pages", "value_pages"):
            arrays[name] = normal(count, kv_heads, page, dim)
        order = rng.permutation(count).reshape(batch, -1).astype(np.int32)
        arrays["page_table"] = jnp.asarray(order)
        return Call(write_cache_paged, arrays)

    return build


F32 = (jnp.float32,)
BF16 = (jnp.bfloat16,)


class TestWriteCache(KernelContract):
    CASES: ClassVar = [
        Case("contiguous", write(3, 5, 2, 128, 64, starts=(0, 59, 13)), races=True),
        Case("slots-along-lanes", write(3, 5, 2, 64, 256, starts=(0, 126, 251)), BF16),
        Case("one-row", write(2, 1, 2, 128, 32), BF16),
        Case("many-rows", write(2, 40, 1, 128, 96), BF16),
        Case("ring", write(3, 5, 2, 128, 48, starts=(3, 45, 142), ring=True), F32),
        Case("paged", write(3, 5, 2, 128, 64, page=16, starts=(0, 59, 13)), BF16, races=True),
        Case("paged-along-lanes", write(2, 9, 2, 64, 256, page=128, starts=(124, 3)), F32),
    ]

    def test_only_the_rows_change(self):
        call = write(2, 3, 1, 128, 32, starts=(4, 29))(np.random.default_rng(1), jnp.float32)
        keys, _ = call.interpreted("pallas_tpu")
        changed = np.any(np.asarray(keys != call.arrays["keys"]), axis=(1, 3))
        want = np.zeros((2, 32), bool)
        want[0, 4:7] = want[1, 29:32] = True
        np.testing.assert_array_equal(changed, want)

    def test_not_a_number_stays_in_its_row(self):
        call = write(1, 3, 1, 128, 32, starts=(6,))(np.random.default_rng(1), jnp.bfloat16)
        arrays = dict(call.arrays)
        arrays["new_keys"] = arrays["new_keys"].at[0, 1].set(jnp.nan)
        keys, _ = Call(call.function, arrays).interpreted("pallas_tpu")
        rows = np.any(np.isnan(np.asarray(keys, np.float32)), axis=(0, 1, 3))
        assert rows.tolist() == [slot == 7 for slot in range(32)]


def test_rows_past_the_end_are_refused():
    call = write(1, 3, 1, 64, 128, starts=(126,))(np.random.default_rng(1), jnp.float32)
    with pytest.raises(ValueError, match=r"126 \.\. 128, the cache holds 0 \.\. 127"):
        call.expected()


def test_what_a_kernel_does_not_cover_is_refused():
    call = write(1, 3, 1, 64, 64, starts=(6,))(np.random.default_rng(1), jnp.float32)
    with (
        compile_for(Target("tpu", interpret=True)),
        pytest.raises(NotImplementedError, match="multiples of 128"),
    ):
        call.function(**call.arrays, implementation="pallas_tpu")


@pytest.mark.parametrize("start", [0, 3, 6, 7])
@pytest.mark.parametrize("rows", [1, 2])
def test_one_sequence_in_plain_jax(rows, start):
    rng = np.random.default_rng(start)
    start = min(start, 8 - rows)
    keys, values = rng.normal(size=(2, 1, 3, 8, 4)).astype(np.float32)
    new_keys, new_values = rng.normal(size=(2, 1, rows, 3, 4)).astype(np.float32)
    found = jax.jit(reference.write_cache)(keys, values, new_keys, new_values, jnp.array([start]))
    for before, new, after in zip((keys, values), (new_keys, new_values), found, strict=True):
        expected = before.copy()
        expected[0, :, start : start + rows] = new[0].swapaxes(0, 1)
        np.testing.assert_array_equal(after, expected)
