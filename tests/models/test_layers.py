"""Products and their gradients; the choice of the largest."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.target import Platform, Target, compile_for
from peagle_jax.config import GateConfig
from peagle_jax.models.layers import GatedMLP, Linear, argmax_out_in, matmul_out_in


def _random(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("rows", [1, 3, 8, 24, 128, 129, 300])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_products_of_few_and_many_rows(rows, dtype) -> None:
    rng = np.random.default_rng(rows)
    x, kernel = (jnp.asarray(_random(rng, n, 48), dtype) for n in (rows, 40))
    expected = np.asarray(x, np.float64) @ np.asarray(kernel, np.float64).T
    found = jax.jit(matmul_out_in)(x[None], kernel)
    assert found.shape == (1, rows, 40)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found[0], expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.15)])
def test_gradients_of_a_linear_layer(dtype, tolerance) -> None:
    rng = np.random.default_rng(0)
    layer = Linear(40, 48, (None, None), True, jnp.dtype(dtype))
    x, along = jnp.asarray(_random(rng, 2, 5, 48), dtype), jnp.asarray(_random(rng, 2, 5, 40))
    params = {
        "kernel": jnp.asarray(_random(rng, 40, 48), dtype),
        "bias": jnp.asarray(_random(rng, 40), dtype),
    }

    def loss(params, x):
        return jnp.sum(layer.apply({"params": params}, x).astype(jnp.float32) * along)

    found, along_x = jax.jit(jax.grad(loss, argnums=(0, 1)))(params, x)
    wide_x, wide_along = np.asarray(x, np.float64), np.asarray(along, np.float64)
    expected = {
        "kernel": np.einsum("bro,bri->oi", wide_along, wide_x),
        "bias": wide_along.sum((0, 1)),
    }
    for name, value in expected.items():
        assert found[name].dtype == dtype
        np.testing.assert_allclose(np.asarray(found[name], np.float64), value, atol=tolerance)
    expected_x = wide_along @ np.asarray(params["kernel"], np.float64)
    np.testing.assert_allclose(np.asarray(along_x, np.float64), expected_x, atol=tolerance)


def test_no_product_of_a_gradient_has_a_wide_side() -> None:
    layer = Linear(40, 48, (None, None), False, jnp.bfloat16)
    x = jnp.ones((5, 48), jnp.bfloat16)
    params = {"kernel": jnp.ones((40, 48), jnp.bfloat16)}

    def loss(params, x):
        return jnp.sum(layer.apply({"params": params}, x).astype(jnp.float32) ** 2)

    text = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(params, x).as_text()
    products = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    assert len(products) == 3
    for line in products:
        sides = line.split(" : (")[1].split(" -> ")[0]
        assert sides.count("xbf16>") == 2, line


@pytest.mark.parametrize("rows", [1, 4, 9])
def test_the_first_of_the_largest_is_chosen(rows) -> None:
    kernel = np.zeros((50, 4), np.float32)
    kernel[[7, 20, 49], 0] = 3.0
    kernel[[11, 49], 1] = 2.0
    x = np.zeros((rows, 4), np.float32)
    x[::2, 0] = 1.0
    x[1::2, 1] = 1.0
    expected = [(7, 11)[i % 2] for i in range(rows)]
    found = jax.jit(argmax_out_in)(jnp.asarray(x), jnp.asarray(kernel))
    assert found.dtype == jnp.int32
    assert found.tolist() == expected
    scaled = jax.jit(lambda x, k: argmax_out_in(x, k, 0.5))(jnp.asarray(x), jnp.asarray(kernel))
    assert scaled.tolist() == expected


def test_scores_that_are_not_numbers_give_an_id_of_the_vocabulary() -> None:
    kernel = jnp.full((50, 4), jnp.nan)
    found = jax.jit(argmax_out_in)(jnp.ones((2, 4)), kernel)
    assert all(0 <= i < 50 for i in found.tolist())


def _lowered(function, platform: Platform, *arguments) -> str:
    with compile_for(Target(platform)):
        return jax.jit(function).lower(*arguments).as_text()


@pytest.mark.parametrize(("platform", "rows"), [("tpu", 8), ("cpu", 1), ("gpu", 1)])
def test_one_row_is_a_tile_of_them_on_tpu_alone(platform, rows) -> None:
    text = _lowered(matmul_out_in, platform, jnp.ones((1, 48)), jnp.ones((40, 48)))
    (product,) = [line for line in text.splitlines() if "dot_general" in line]
    assert product.rstrip().endswith(f"-> tensor<40x{rows}xf32>")


@pytest.mark.parametrize(
    ("platform", "rows", "apart"), [("tpu", 1, 1), ("tpu", 129, 0), ("gpu", 1, 0)]
)
def test_few_rows_are_gated_apart_from_what_follows_on_tpu_alone(platform, rows, apart) -> None:
    layer = GatedMLP(48, 40, False, GateConfig(), jnp.float32)
    x = jnp.ones((1, rows, 48))
    params = layer.init(jax.random.key(0), x)
    assert _lowered(layer.apply, platform, params, x).count("optimization_barrier") == apart
