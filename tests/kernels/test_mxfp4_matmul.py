"""The MXFP4 product: every byte under every scale, groups of every size, and what is refused."""

from __future__ import annotations

import functools
import inspect
from typing import Any, ClassVar

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from pallas_kernels.mxfp4_matmul import Blocks, dequantise, mxfp4_matmul, own_kernel, shapes
from pallas_kernels.mxfp4_matmul.visits import most_visits, visits
from pallas_kernels.target import NATIVE, Implementation, Target, compile_for
from peagle_jax.convert.mxfp4 import dequantize
from tests.kernels.contract import QUICK, Call, Case, KernelContract

SMALL: dict[Implementation, dict[str, Any]] = {
    "pallas_tpu": {"blocks": Blocks(16, 128)},
    "pallas_gpu": {"blocks": Blocks(16, 32)},
}
NORMAL = 2.0**-126  # the least number that is not subnormal


def weights(rng: np.random.Generator, experts: int, inner: int, out: int) -> tuple[Any, Any]:
    """Random bytes under scales that keep a product near 1."""
    packed = rng.integers(0, 256, (experts, inner // 2, out)).astype(np.uint8)
    scales = rng.integers(122, 126, (experts, inner // 32, out)).astype(np.uint8)
    return jnp.asarray(packed), jnp.asarray(scales)


def products(sizes: tuple[int, ...], rows: int, inner: int, out: int) -> Any:
    """A builder of calls; rows of no expert hold NaN, and so do the scales of idle experts."""

    def build(rng: np.random.Generator, dtype: Any) -> Call:
        packed, scales = weights(rng, len(sizes), inner, out)
        idle = (np.array(sizes) == 0)[:, None, None]
        x = rng.normal(size=(rows, inner)) / np.sqrt(inner)
        poisoned = np.where(np.arange(rows)[:, None] < sum(sizes), x, np.nan)
        arrays = {
            "x": jnp.asarray(poisoned, dtype),
            "sizes": jnp.asarray(sizes, jnp.int32),
            "packed": packed,
            "scales": jnp.where(idle, 255, scales).astype(jnp.uint8),
        }
        return Call(mxfp4_matmul, arrays, {"x": jnp.asarray(x, dtype), "scales": scales}, {}, SMALL)

    return build


class TestMxfp4Matmul(KernelContract):
    CASES: ClassVar = [
        Case("one-tile", products((3, 0, 1, 5), 9, 96, 72)),
        Case("several-tiles", products((20, 0, 13, 2), 37, 64, 160)),
        Case("some-elsewhere", products((2, 3), 40, 32, 40)),
        Case("all-elsewhere", products((0, 0, 0), 5, 64, 33)),
        Case("wide", products((1, 1), 2, 2080, 300), (jnp.bfloat16,)),
    ]

    @pytest.mark.parametrize("platform", ["tpu", "gpu"])
    def test_drawn_groups(self, platform):
        """One compiled call, however the rows are shared out."""
        experts, rows, inner, out = 5, 40, 64, 48
        implementation = NATIVE[platform]
        own = functools.partial(
            mxfp4_matmul, implementation=implementation, **SMALL[implementation]
        )
        wanted = jax.jit(functools.partial(mxfp4_matmul, implementation="reference"))
        rng = np.random.default_rng(0)
        x = jnp.asarray(rng.normal(size=(rows, inner)), jnp.float32)
        packed, scales = weights(rng, experts, inner, out)

        @settings(max_examples=25, deadline=None, derandomize=True)
        @given(st.lists(st.integers(0, rows), min_size=experts, max_size=experts))
        def check(cuts: list[int]) -> None:
            sizes = jnp.asarray(np.diff([0, *sorted(cuts)]), jnp.int32)
            found, expected = (call(x, sizes, packed, scales) for call in (run, wanted))
            np.testing.assert_allclose(found, expected, 1e-5, 1e-5)

        with compile_for(Target(platform, interpret=True)):
            run = jax.jit(own, compiler_options=QUICK)
            check()


CODES = np.tile(np.arange(256), 2)  # scales of the outputs of `every_case`


def every_case() -> tuple[np.ndarray, np.ndarray]:
    """[1, 128, 512] bytes: all of them, down the inputs, under each scale, along the outputs; the
    second half of the outputs has the other half of the bytes."""
    byte = np.arange(256).reshape(2, 128)
    packed = np.repeat(byte.T, 256, axis=1).astype(np.uint8)[None]
    scales = np.tile(CODES, (8, 1)).astype(np.uint8)[None]
    return packed, scales


def loaded(packed: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """What conversion makes of the same bytes, `[experts, in, out]`."""
    codes = np.ascontiguousarray(scales.swapaxes(1, 2))
    pairs = np.ascontiguousarray(packed.swapaxes(1, 2)).reshape(*codes.shape, 16)
    return dequantize(pairs, codes).swapaxes(1, 2)


def assert_same_values(found: Any, expected: np.ndarray) -> None:
    """Of `every_case`; where subnormals take part there may be 0."""
    found, expected = (np.asarray(a).astype(np.float64) for a in (found, expected))
    nan = np.isnan(expected)
    assert nan.any()
    np.testing.assert_array_equal(np.isnan(found), nan)
    tiny = (abs(expected) < NORMAL) | (CODES == 0)
    assert (abs(found[tiny]) < 4 * NORMAL).all()
    np.testing.assert_array_equal(found[~nan & ~tiny], expected[~nan & ~tiny])
    assert np.isinf(expected).any()


def test_every_byte_under_every_scale():
    packed, scales = every_case()
    expected = loaded(packed, scales)
    found = dequantise(jnp.asarray(packed), jnp.asarray(scales), jnp.bfloat16)
    assert_same_values(found, expected)


@pytest.mark.parametrize("platform", ["tpu", "gpu"])
def test_the_kernels_unpack_every_byte_under_every_scale(platform):
    """One input at a time, all others of its block NaN where the scale is: a product with the
    identity is the weights themselves."""
    packed, scales = every_case()
    expected = loaded(packed, scales)[0].astype(np.float64)
    with compile_for(Target(platform, interpret=True)):
        run = jax.jit(
            functools.partial(
                mxfp4_matmul,
                implementation=NATIVE[platform],
                blocks=Blocks(256 if platform == "tpu" else 64, 512),
            )
        )
        sizes = jnp.asarray([256], jnp.int32)
        found = run(
            jnp.eye(256, dtype=jnp.float32), sizes, jnp.asarray(packed), jnp.asarray(scales)
        )
    # 0 times Inf or NaN is NaN: only columns of finite values are the weights.
    finite = np.isfinite(expected).all(axis=0)
    assert finite.sum() == 2 * 253
    found, expected = np.asarray(found, np.float64)[:, finite], expected[:, finite]
    tiny = (abs(expected) < NORMAL) | (CODES[finite] == 0)
    np.testing.assert_array_equal(found[~tiny], expected[~tiny])
    assert (abs(found[tiny]) < 4 * NORMAL).all()


@pytest.mark.parametrize("sizes", [(3, 0, 20, 1), (0, 0, 0, 0), (40, 0, 0, 0), (8, 8, 8, 8)])
def test_every_row_is_visited_once(sizes):
    rows, tile = 40, 8
    table = visits(jnp.asarray(sizes), rows, tile)
    assert len(table.expert) == most_visits(len(sizes), rows, tile)
    owners = np.full(rows, -1)
    for expert, at, first, end in zip(*map(np.asarray, table), strict=True):
        for row in range(max(first, at * tile), min(end, (at + 1) * tile)):
            assert owners[row] == -1
            owners[row] = expert
    expected = np.repeat(np.arange(len(sizes)), sizes)
    assert owners.tolist() == expected.tolist() + [-1] * (rows - len(expected))
    assert (np.diff(table.tile) >= 0).all(), "a tile that is left is not come back to"


def test_blocks_of_a_released_model():
    problem = shapes.Problem(256, 32, 2880, 2880, "bfloat16")
    found = shapes.blocks(problem, Target("tpu", "TPU v6 lite"))
    assert found == Blocks(shapes.FEW, 1024)
    assert problem.key == "mxfp4_matmul/few/bfloat16"
    assert shapes.Problem(8192, 32, 2880, 2880, "bfloat16").phase == "many"


def test_shapes_that_do_not_belong_together():
    packed, scales = weights(np.random.default_rng(0), 2, 64, 8)
    with pytest.raises(ValueError, match=r"found \(3, 32\), \(2, 32, 8\), \(2, 2, 8\)"):
        mxfp4_matmul(jnp.zeros((3, 32)), jnp.asarray([1, 2]), packed, scales)
    unchecked = inspect.unwrap(mxfp4_matmul)  # as outside the tests: shapes not checked by types
    with pytest.raises(ValueError, match=r"found \(1,\), uint8, uint8, expected \(2,\)"):
        unchecked(jnp.zeros((3, 64)), jnp.asarray([3]), packed, scales)
    with pytest.raises(ValueError, match=r"found \(2,\), int32, uint8"):
        unchecked(jnp.zeros((3, 64)), jnp.asarray([1, 2]), packed.astype(jnp.int32), scales)


def test_what_a_device_has():
    assert not own_kernel("bfloat16")
    with compile_for(Target("tpu")):
        assert own_kernel("bfloat16")
        assert not own_kernel("float16")
