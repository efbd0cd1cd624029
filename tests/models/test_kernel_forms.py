"""Kernels that are more than one array: products, places on a mesh, and networks with them."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from pallas_kernels.target import Target, compile_for
from peagle_jax.config import ModelConfig, MoEConfig
from peagle_jax.errors import InputError
from peagle_jax.models import decoder, drafter, kernel_forms, moe
from peagle_jax.models.cache import KVCache
from peagle_jax.models.kernel_forms import Int8Kernel, Mxfp4Kernel, TwoWayKernel
from peagle_jax.models.layers import argmax_out_in, matmul_out_in
from peagle_jax.models.moe import ExpertLinear, ExpertParams
from peagle_jax.sharding import TENSOR_RULES, partition_specs
from tests import quantised as made
from tests.decoding import tiny
from tests.decoding.test_families import FAMILIES, GPT_OSS
from tests.models.test_moe import CHOSEN, EXPERTS, GATES

MOE = replace(
    GPT_OSS, hidden_size=32, moe=replace(GPT_OSS.moe or MoEConfig(1, 1, 1), intermediate_size=64)
)
WIDE, NARROW = 64, 32


def experts(form: str) -> tuple[ExpertParams, ExpertParams]:
    """Quantised experts, and the full ones that they stand for."""
    rng = np.random.default_rng(0)

    def linear(out: int, inner: int) -> tuple[ExpertLinear, ExpertLinear]:
        kernel = rng.normal(size=(EXPERTS, out, inner)).astype(np.float32) / np.sqrt(inner)
        tree = {"experts": {"kernel": kernel}}
        parts = made.in_form(tree, form)["experts"]["kernel"]  # type: ignore[arg-type]
        bias = jnp.asarray(rng.normal(size=(EXPERTS, out)), jnp.float32)
        own = kernel_forms.of_parameter(jax.tree.map(jnp.asarray, parts))
        return ExpertLinear(own, bias), ExpertLinear(jnp.asarray(made.full(parts)), bias)

    pairs = [linear(WIDE, NARROW), linear(WIDE, NARROW), linear(NARROW, WIDE)]
    return ExpertParams(*(a for a, _ in pairs)), ExpertParams(*(b for _, b in pairs))


def choices(tokens: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    rng = np.random.default_rng(tokens)
    x = jnp.asarray(rng.normal(size=(tokens, NARROW)), jnp.float32)
    chosen = np.argsort(rng.normal(size=(tokens, EXPERTS)), axis=1)[:, :CHOSEN].astype(np.int32)
    return x, jnp.asarray(chosen), jnp.asarray(rng.uniform(size=chosen.shape), jnp.float32)


@pytest.mark.parametrize("form", ["mxfp4", "int8"])
@pytest.mark.parametrize("tokens", [1, 5, moe.TILE + 9])
def test_experts(form, tokens) -> None:
    own, full = experts(form)
    mix = jax.jit(moe.mix, static_argnames="gate")
    found, expected = (mix(*choices(tokens), e, gate=GATES[1]) for e in (own, full))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)
    half = [a.astype(jnp.bfloat16) if a.dtype == jnp.float32 else a for a in choices(tokens)]
    found = np.asarray(mix(*half, own, gate=GATES[1]), np.float64)
    assert abs(found - expected).max() < 0.03 * abs(np.asarray(expected)).max()


@pytest.mark.parametrize("platform", ["tpu", "gpu"])
def test_packed_experts_take_the_devices_own_kernel(platform) -> None:
    own, full = experts("mxfp4")
    arguments = choices(7)
    expected = moe.mix(*arguments, full, GATES[1])
    with compile_for(Target(platform, interpret=True)):
        program = jax.jit(moe.mix, static_argnames="gate").trace(*arguments, own, gate=GATES[1])
        assert str(program.jaxpr).count("name=mxfp4_matmul") == 3
        found = program.lower().compile()(*arguments, own)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


def test_int8_rounds_to_the_nearest() -> None:
    rng = np.random.default_rng(0)
    kernel = (rng.normal(size=(5, 40)) * 10.0 ** np.arange(-2, 3)[:, None]).astype(np.float32)
    kernel[1] = 0
    values, scales = kernel_forms.quantise_int8(kernel)
    assert (values.dtype, scales.dtype) == (np.int8, np.float32)
    assert abs(values).max(axis=1).tolist() == [127, 0, 127, 127, 127]
    error = abs(values * scales[:, None] - kernel).max(axis=1)
    assert (error <= 0.501 * abs(kernel).max(axis=1) / 127).all()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_int8_products(dtype) -> None:
    rng = np.random.default_rng(0)
    values, scales = kernel_forms.quantise_int8(rng.normal(size=(24, 40)).astype(np.float32))
    own = Int8Kernel(jnp.asarray(values), jnp.asarray(scales))
    x = jnp.asarray(rng.normal(size=(2, 3, 40)), dtype)
    expected = np.asarray(x, np.float64) @ (values * scales[:, None].astype(np.float64)).T
    np.testing.assert_allclose(matmul_out_in(x, own), expected, rtol=0, atol=1e-5)
    assert np.array_equal(argmax_out_in(x, own), expected.argmax(-1))
    some = kernel_forms.take(own, jnp.asarray([5, 2]))
    np.testing.assert_allclose(matmul_out_in(x, some), expected[..., [5, 2]], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("block", "weights"), [(MOE, "mxfp4"), (MOE, "int8"), (FAMILIES["qwen3"], "int8")]
)
def test_a_network(block, weights) -> None:
    """Equal to the full network of the same values, to the last rounding."""
    config = tiny.target_config(block=block)
    own = made.in_form(tiny.target_params(config), weights)
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype), own)
    assert shapes == jax.tree.map(
        lambda x: (x.shape, x.dtype),
        kernel_forms.abstract(decoder.abstract_params(config), weights),
    )
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 23, (2, 9)))
    start = jnp.zeros(2, jnp.int32)

    @jax.jit
    def logits(params: Any) -> Any:
        network, cache = decoder.Decoder(config), KVCache.init(block, 2, 16, jnp.float32)
        hidden = network.apply({"params": params}, tokens, start, cache).hidden
        return network.apply({"params": params}, hidden, method="logits")

    np.testing.assert_allclose(logits(own), logits(made.full(own)), rtol=0, atol=1e-4)


def test_a_drafter_is_lent_a_quantised_head() -> None:
    target = tiny.target_config()
    config = tiny.drafter_config(target, parallel=True, draft_vocab_size=9, own_head=False)
    params = drafter.init(config, jax.random.key(0))
    params["draft_to_target"] = jnp.asarray([3, 1, 22, 4, 8, 11, 0, 2, 5], jnp.int32)
    kernel = np.random.default_rng(0).normal(size=(23, 16)).astype(np.float32)
    values, scales = kernel_forms.quantise_int8(kernel)
    own = Int8Kernel(jnp.asarray(values), jnp.asarray(scales))
    full = jnp.asarray(values * scales[:, None])
    stream = jnp.asarray(np.random.default_rng(1).normal(size=(2, 16)), jnp.float32)
    network = drafter.Drafter(config)
    found, expected = (
        network.apply({"params": params}, stream, lent, method="logits") for lent in (own, full)
    )
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


def mesh(expert: int, model: int) -> AbstractMesh:
    return AbstractMesh((1, expert, model), ("data", "expert", "model"))


def specs(config: ModelConfig, abstract: Any, mesh: AbstractMesh) -> Any:
    axes = kernel_forms.axes_like(decoder.logical_axes(config), abstract)
    return partition_specs(axes, abstract, mesh, TENSOR_RULES)


@pytest.mark.parametrize(
    ("weights", "leaf", "gate", "down"),
    [
        ("mxfp4", "packed", P("expert", None, "model"), P("expert", "model", None)),
        ("mxfp4", "scales", P("expert", None, "model"), P("expert", "model", None)),
        ("int8", "values", P("expert", "model", None), P("expert", None, "model")),
        ("int8", "scales", P("expert", "model"), P("expert", None)),
    ],
)
def test_arrays_lie_where_their_kernel_would(weights, leaf, gate, down) -> None:
    config = tiny.target_config(block=replace(MOE, num_kv_heads=2), vocab_size=24)
    abstract = kernel_forms.abstract(decoder.abstract_params(config), weights)
    found = specs(config, abstract, mesh(3, 2))
    mlp = found["layers_1"]["mlp"]["experts"]
    assert mlp["gate_proj"]["kernel"][leaf] == gate
    assert mlp["down_proj"]["kernel"][leaf] == down
    assert mlp["down_proj"]["bias"] == P("expert", None)
    head = found["lm_head"]["kernel"]
    if weights == "int8":
        assert (head["values"], head["scales"]) == (P("model", None), P("model"))
    else:
        assert head == P("model", None)


def test_blocks_that_do_not_divide_are_refused() -> None:
    """Two blocks of 32 inputs for four devices."""
    config = tiny.target_config(block=replace(MOE, num_heads=4, num_kv_heads=4), vocab_size=24)
    abstract = kernel_forms.abstract(decoder.abstract_params(config), "mxfp4")
    specs(config, decoder.abstract_params(config), mesh(1, 4))
    with pytest.raises(InputError, match=r"mesh: model: found 4, expected a divisor of 2"):
        specs(config, abstract, mesh(1, 4))


def test_packed_kernels_know_their_shape() -> None:
    own, _ = experts("mxfp4")
    assert isinstance(own.gate.kernel, Mxfp4Kernel)
    assert own.gate.kernel.shape == (EXPERTS, WIDE, NARROW)


@pytest.mark.parametrize(("rows", "few"), [(1, False), (2, True), (31, True), (32, False)])
def test_the_layout_goes_by_the_rows(rows, few) -> None:
    rng = np.random.default_rng(0)
    kernel = rng.normal(size=(24, 40)).astype(np.float32)
    nothing = np.full_like(kernel, np.nan)
    own = TwoWayKernel(
        jnp.asarray(nothing if few else kernel), jnp.asarray((kernel if few else nothing).T)
    )
    x = rng.normal(size=(rows, 40)).astype(np.float32)
    expected = x.astype(np.float64) @ kernel.T
    found = jax.jit(matmul_out_in)(jnp.asarray(x)[None], own)
    assert found.shape == (1, rows, 24)
    np.testing.assert_allclose(found[0], expected, rtol=0, atol=1e-5)
    assert own.shape == (24, 40)


@pytest.mark.parametrize("rows", [3, 16, 17])
@pytest.mark.parametrize("biases", [False, True])
def test_a_network_in_both_layouts(rows, biases) -> None:
    block = dataclasses.replace(FAMILIES["qwen3"], qkv_bias=biases, mlp_bias=biases)
    config = tiny.target_config(block=block)
    # Biases begin as zeros.
    full = jax.tree.map(
        lambda x: x + 0.01 * jnp.arange(x.size).reshape(x.shape) / x.size,
        tiny.target_params(config),
    )
    own = kernel_forms.two_way(full)
    attention, plain = own["layers_1"]["self_attn"], full["layers_1"]["self_attn"]
    kernel = attention["o_proj"]["kernel"]
    assert kernel["out_in"] is plain["o_proj"]["kernel"]
    np.testing.assert_array_equal(kernel["in_out"], kernel["out_in"].T)
    # What reads the same input is joined, and stays as it was for one row.
    names = ["q_proj", "k_proj", "v_proj"]
    assert all(attention[name] is plain[name] for name in names)
    np.testing.assert_array_equal(
        attention["q_proj+k_proj+v_proj"], np.concatenate([plain[n]["kernel"] for n in names]).T
    )
    assert set(own["layers_1"]["mlp"]) == {*full["layers_1"]["mlp"], "gate_proj+up_proj"}
    assert own["lm_head"] == full["lm_head"]
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 23, (1, rows)))

    @jax.jit
    def hidden(params: Any) -> Any:
        network = decoder.Decoder(config)
        cache = KVCache.init(config.block, 1, 24, jnp.float32)
        start = jnp.zeros(1, jnp.int32)
        return network.apply({"params": params}, tokens, start, cache).hidden

    np.testing.assert_allclose(hidden(own), hidden(full), rtol=0, atol=1e-5)


def test_what_is_not_held_twice(monkeypatch) -> None:
    params = tiny.target_params(tiny.target_config(block=MOE))
    layer = kernel_forms.two_way(params)["layers_1"]
    assert set(layer["self_attn"]["o_proj"]["kernel"]) == {"out_in", "in_out"}
    assert layer["mlp"] == params["layers_1"]["mlp"]  # router and experts
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    assert kernel_forms.two_way(half) == half
    monkeypatch.setattr(kernel_forms, "MOST_TWO_WAY_BYTES", 100)
    assert kernel_forms.two_way(params) is params
    monkeypatch.undo()
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert kernel_forms.two_way(params) is params
