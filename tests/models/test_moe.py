"""Experts against a loop over tokens: routing, both ways of computing, and split over devices."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from peagle_jax.config import GateConfig, MoEConfig
from peagle_jax.models import moe
from peagle_jax.models.moe import ExpertLinear, ExpertParams

HIDDEN, WIDE, EXPERTS, CHOSEN = 8, 12, 6, 3
GATES = [GateConfig(), GateConfig(alpha=1.702, limit=1.0, up_offset=1.0)]
ROOT = Path(__file__).resolve().parents[2]


def random_experts(bias: bool, seed: int = 0) -> ExpertParams:
    rng = np.random.default_rng(seed)

    def linear(out: int, inner: int) -> ExpertLinear:
        kernel = rng.normal(size=(EXPERTS, out, inner)) / np.sqrt(inner)
        added = rng.normal(size=(EXPERTS, out))
        return ExpertLinear(
            jnp.asarray(kernel, jnp.float32), jnp.asarray(added, jnp.float32) if bias else None
        )

    return ExpertParams(linear(WIDE, HIDDEN), linear(WIDE, HIDDEN), linear(HIDDEN, WIDE))


def one_expert(x: np.ndarray, experts: ExpertParams, e: int, gate: GateConfig) -> np.ndarray:
    def each(linear: ExpertLinear, x: np.ndarray) -> np.ndarray:
        assert isinstance(linear.kernel, jax.Array)
        y = np.asarray(linear.kernel[e], np.float64) @ x
        return y if linear.bias is None else y + np.asarray(linear.bias[e], np.float64)

    g, u = each(experts.gate, x), each(experts.up, x)
    if gate.limit is not None:
        g, u = np.minimum(g, gate.limit), np.clip(u, -gate.limit, gate.limit)
    return each(experts.down, g / (1 + np.exp(-gate.alpha * g)) * (u + gate.up_offset))


def by_loop(x, chosen, weights, experts, gate) -> np.ndarray:
    out = np.zeros(x.shape)
    for token in range(len(x)):
        for e, weight in zip(chosen[token], weights[token], strict=True):
            if e < EXPERTS:
                out[token] += weight * one_expert(x[token].astype(np.float64), experts, e, gate)
    return out


def choices(tokens: int, kind: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(tokens)
    x = rng.normal(size=(tokens, HIDDEN)).astype(np.float32)
    chosen = np.argsort(rng.normal(size=(tokens, EXPERTS)), axis=1)[:, :CHOSEN]
    if kind == "one expert has every token":
        chosen = np.where((chosen == 4).any(1)[:, None], chosen, [[4, 1, 0]])
        assert (chosen == 4).any(1).all()
    elif kind == "some are elsewhere":
        chosen = np.where(chosen < 2, EXPERTS + chosen, chosen)
    return x, chosen.astype(np.int32), rng.uniform(size=chosen.shape).astype(np.float32)


@pytest.mark.parametrize(("bias", "gate"), [(False, GATES[0]), (True, GATES[1])])
@pytest.mark.parametrize(
    ("tokens", "kind"),
    [
        (1, "any"),
        (5, "any"),
        (5, "one expert has every token"),
        (5, "some are elsewhere"),
        (moe.TILE + 9, "one expert has every token"),
    ],
)
def test_no_token_misses_an_expert(tokens, kind, bias, gate) -> None:
    x, chosen, weights = choices(tokens, kind)
    experts = random_experts(bias)
    found = jax.jit(moe.mix, static_argnames="gate")(x, chosen, weights, experts, gate=gate)
    expected = by_loop(x, chosen, weights, experts, gate)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("sizes", [[4, 0, 7, 1, 0, 8], [0, 0, 0, 20, 0, 0], [0, 3, 0, 0, 0, 0]])
def test_tiles_equal_the_grouped_product(sizes, bias) -> None:
    """Groups of none, of less than a tile and of several; rows of no group may be anything."""
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(20, HIDDEN)).astype(np.float32)
    of_row = np.repeat(np.arange(EXPERTS), sizes)
    used = len(of_row)
    experts = random_experts(bias)
    sorted_rows, counts = (jnp.asarray(a) for a in (rows, np.int32(sizes)))
    tiles = moe.in_tiles(sorted_rows, counts, experts, gate=GATES[1], tile=8)
    grouped = moe.grouped(sorted_rows, counts, experts, gate=GATES[1])
    expected = [
        one_expert(r.astype(np.float64), experts, int(e), GATES[1])
        for r, e in zip(rows[:used], of_row, strict=True)
    ]
    np.testing.assert_allclose(tiles[:used], expected, rtol=0, atol=1e-5)
    np.testing.assert_allclose(grouped[:used], expected, rtol=0, atol=1e-5)
    assert np.isfinite(tiles).all()


@pytest.mark.parametrize("pairs", [1, 36, 512, 513])
def test_the_order_by_expert_is_stable(pairs) -> None:
    of_pair = np.random.default_rng(pairs).integers(0, EXPERTS, pairs)
    order, place = moe.by_expert(jnp.asarray(of_pair, jnp.int32))
    expected = np.argsort(of_pair, kind="stable")
    np.testing.assert_array_equal(order, expected)
    np.testing.assert_array_equal(place[expected], np.arange(pairs))


@pytest.mark.parametrize(
    ("scores", "normalize", "bias"),
    [
        ("softmax_top_k", False, False),
        ("softmax_top_k", True, False),
        ("top_k_softmax", False, True),
    ],
)
def test_router(scores, normalize, bias) -> None:
    config = MoEConfig(EXPERTS, CHOSEN, WIDE, scores=scores, normalize=normalize, router_bias=bias)
    rng = np.random.default_rng(0)
    x = 0.3 * rng.normal(size=(2, 4, HIDDEN)).astype(np.float32)
    params = {"kernel": rng.normal(size=(EXPERTS, HIDDEN)).astype(np.float32)}
    logits = x.astype(np.float64) @ params["kernel"].T
    if bias:
        params["bias"] = 3 * rng.normal(size=EXPERTS).astype(np.float32)
        logits = logits + params["bias"]
    router = moe.Router(config, HIDDEN, jnp.float32)
    chosen, weights = router.apply({"params": jax.device_put(params)}, jnp.asarray(x))
    order = np.argsort(-logits, axis=-1)[..., :CHOSEN]
    np.testing.assert_array_equal(chosen, order)
    shares = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    expected = np.take_along_axis(shares, order, axis=-1)
    if normalize or scores == "top_k_softmax":
        expected = expected / expected.sum(-1, keepdims=True)
        np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-6)
    else:
        assert (weights.sum(-1) < 0.999).all()
    np.testing.assert_allclose(weights, expected, rtol=0, atol=1e-6)


ON_MESH = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from peagle_jax.errors import InputError
from peagle_jax.models import moe
from peagle_jax.sharding import partition_specs
from tests.models.test_moe import GATES, choices, random_experts

cases = [
    ({"data": 2, "expert": 3}, 5), ({"expert": 2, "model": 4}, 5), ({"expert": 2}, moe.TILE + 1)
]
for axes, tokens in cases:
    mesh = jax.make_mesh(
        tuple(axes.values()), tuple(axes), (AxisType.Auto,) * len(axes),
        devices=jax.devices()[: int(np.prod(list(axes.values())))],
    )
    expert, model = (axis if axis in axes else None for axis in ("expert", "model"))
    experts = random_experts(bias=True)
    specs = [P(expert, model, None), P(expert, model)] * 2 + [P(expert, None, model), P(expert)]
    leaves, tree = jax.tree.flatten(experts)
    placed = jax.tree.unflatten(
        tree, [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(leaves, specs)]
    )
    run = jax.jit(moe.mix_on_mesh, static_argnums=4)
    args = choices(tokens, "any")
    expected = run(*args, experts, GATES[1])
    with jax.set_mesh(mesh):
        found = run(*args, placed, GATES[1])
        text = run.lower(*args, placed, GATES[1]).compile().as_text()
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
    # One sum over the devices, and no weight on its way.
    assert text.count(" all-reduce(") == 1, axes
    assert "all-gather" not in text and "all-to-all" not in text, axes

# As many experts as do not divide among the devices: refused before any weight is placed.
rules = {"experts": "expert", "mlp": None, "embed": None}
mesh = jax.make_mesh((4,), ("expert",), (AxisType.Auto,), devices=jax.devices()[:4])
shape = jax.ShapeDtypeStruct((6, 12, 8), jnp.float32)
try:
    partition_specs({"kernel": P("experts", "mlp", "embed")}, {"kernel": shape}, mesh, rules)
except InputError as error:
    assert "mesh: expert: found 4, expected a divisor of 6" in str(error), error
    print("same")
"""


def test_experts_split_over_devices() -> None:
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "PYTHONPATH": str(ROOT),
    }
    result = subprocess.run(
        [sys.executable, "-c", ON_MESH], env=environment, capture_output=True, text=True, cwd=ROOT
    )
    assert result.stdout.strip().endswith("same"), result.stderr[-3000:]
