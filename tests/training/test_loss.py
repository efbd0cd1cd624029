"""Losses against dense formulas and hand-made values; what lives at once; what is skipped."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from peagle_jax.errors import InputError
from peagle_jax.training.loss import DepthSums, LossConfig, blocked_loss

ELEMENTS, POSITIONS, HIDDEN, WIDE, VOCAB, DEPTHS = 29, 11, 8, 12, 40, 3


def make_inputs(seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    return {
        "head": normal(VOCAB, HIDDEN),
        "target_head": normal(VOCAB, WIDE),
        "stream": normal(ELEMENTS, HIDDEN),
        "target_hidden": normal(POSITIONS, WIDE),
        "target_row": jnp.asarray(rng.integers(0, POSITIONS, ELEMENTS), jnp.int32),
        "labels": jnp.asarray(rng.integers(-1, VOCAB, ELEMENTS), jnp.int32),
        "weight": jnp.asarray(rng.integers(0, 3, ELEMENTS) * 0.5, jnp.float32),
        "depth": jnp.asarray(rng.integers(0, DEPTHS, ELEMENTS), jnp.int32),
    }


ARRAYS = ("stream", "target_hidden", "target_row", "labels", "weight", "depth")


def run(given: dict[str, Any], config: LossConfig) -> tuple[jax.Array, DepthSums]:
    return blocked_loss(
        lambda rows, head: rows @ head.T,
        given["head"],
        lambda rows: rows @ given["target_head"].T,
        num_depths=DEPTHS,
        config=config,
        **{name: given[name] for name in ARRAYS},
    )


def dense(given: dict[str, Any], config: LossConfig) -> jax.Array:
    """The definition, all logits at once."""
    q = jax.nn.softmax(given["stream"] @ given["head"].T)
    p = jax.nn.softmax((given["target_hidden"] @ given["target_head"].T)[given["target_row"]])
    kl = jnp.sum(p * jnp.log(p / q), axis=1)
    inside = given["labels"] >= 0
    ce = -jnp.log(q[jnp.arange(ELEMENTS), jnp.where(inside, given["labels"], 0)]) * inside
    tv = jnp.sum(jnp.maximum(p - q, 0), axis=1)
    each = config.kl * kl + config.ce * ce + config.tv * tv
    depth_weights = jnp.asarray(config.depth_weights or (1.0,) * DEPTHS)
    return jnp.sum(each * given["weight"] * depth_weights[given["depth"]])


@pytest.mark.parametrize("block_size", [1, 7, 29, 512])
@pytest.mark.parametrize(
    "terms",
    [{}, {"kl": 0.0, "ce": 1.0}, {"kl": 0.0, "tv": 1.0}, {"kl": 0.7, "ce": 0.2, "tv": 1.5}],
)
def test_values_and_gradients_are_those_of_the_dense_formula(terms, block_size):
    config = LossConfig(**terms, depth_weights=(1.0, 0.5, 2.0), block_size=block_size)
    given = make_inputs()
    trained = {name: given[name] for name in ("stream", "head", "target_hidden", "target_head")}

    def blocked(part: dict[str, Any]) -> jax.Array:
        return run({**given, **part}, config)[0]

    value, grads = jax.jit(jax.value_and_grad(blocked))(trained)
    expected, expected_grads = jax.value_and_grad(lambda part: dense({**given, **part}, config))(
        trained
    )
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    for name in ("stream", "head"):
        np.testing.assert_allclose(grads[name], expected_grads[name], atol=1e-5, err_msg=name)
    for name in ("target_hidden", "target_head"):
        assert not np.any(grads[name]), name


def test_known_values():
    """Uniform drafts of 4 tokens against a target that is (1/2, 1/4, 1/8, 1/8)."""
    p = np.array([0.5, 0.25, 0.125, 0.125])
    for terms, expected in (
        ({"kl": 1.0}, np.sum(p * np.log(p * 4))),  # log 4 minus 1.75 bits
        ({"kl": 0.0, "ce": 1.0}, math.log(4)),
        ({"kl": 0.0, "tv": 1.0}, 0.25),
    ):
        total, sums = blocked_loss(
            lambda rows, _: jnp.zeros((rows.shape[0], 4)),
            {},
            lambda rows: jnp.log(jnp.asarray(p, jnp.float32)) + rows,
            jnp.zeros((2, 3)),
            jnp.full((1, 1), 7.0),  # a constant added to all logits changes nothing
            jnp.zeros(2, jnp.int32),
            jnp.array([2, -1], jnp.int32),
            jnp.array([2.0, 0.0]),
            jnp.array([1, 1], jnp.int32),
            2,
            LossConfig(**terms),
        )
        np.testing.assert_allclose(total, 2 * expected, rtol=1e-6)
        np.testing.assert_allclose(sums.loss, [0, 2 * expected], rtol=1e-6)
        np.testing.assert_array_equal(sums.weight, [0, 2])
        np.testing.assert_array_equal(sums.count, [0, 1])
        np.testing.assert_array_equal(sums.correct, [0, 1])  # the first of equals


def test_a_label_outside_the_draft_vocabulary_has_no_cross_entropy_but_counts():
    given = make_inputs()
    given["labels"] = jnp.full((ELEMENTS,), -1, jnp.int32)
    total, sums = run(given, LossConfig(kl=0.0, ce=1.0))
    assert total == 0
    assert sums.count.sum() == np.count_nonzero(given["weight"])
    kl, _ = run(given, LossConfig())
    both, _ = run(given, LossConfig(ce=1.0))
    np.testing.assert_allclose(both, kl, rtol=1e-6)


def test_sums_by_depth():
    given = make_inputs(1)
    config = LossConfig(depth_weights=(1.0, 0.0, 3.0), block_size=4)
    total, sums = run(given, config)
    draft = np.asarray(given["stream"] @ given["head"].T)
    wanted = np.asarray(given["target_hidden"] @ given["target_head"].T)[given["target_row"]]
    right = draft.argmax(1) == wanted.argmax(1)
    for depth in range(DEPTHS):
        here = np.asarray(given["depth"]) == depth
        weight = np.asarray(given["weight"]) * here
        assert sums.correct[depth] == np.sum(right & (weight > 0))
        assert sums.count[depth] == np.sum(weight > 0)
        np.testing.assert_allclose(sums.weight[depth], weight.sum(), rtol=1e-6)
        alone = dense({**given, "weight": jnp.asarray(weight)}, LossConfig())
        np.testing.assert_allclose(sums.loss[depth], alone, rtol=1e-5)
    assert 0 < sums.correct.sum() + 1 < sums.count.sum()
    np.testing.assert_allclose(total, sums.loss[0] + 3 * sums.loss[2], rtol=1e-6)
    doubled = DepthSums.zeros(DEPTHS) + sums + sums
    np.testing.assert_allclose(doubled.loss, 2 * sums.loss)


def test_what_uncounted_elements_hold_does_not_matter():
    """Not even a NaN, and not a target row that does not exist."""
    config = LossConfig(ce=0.5, tv=0.5, block_size=4)
    given = make_inputs()
    counted = np.asarray(given["weight"]) > 0
    cut = {
        name: value[counted] if value.shape[0] == ELEMENTS else value
        for name, value in given.items()
    }
    spoiled = {
        **given,
        "stream": jnp.where(counted[:, None], given["stream"], 1e6),
        "target_row": jnp.where(counted, given["target_row"], 10_000),
        "labels": jnp.where(counted, given["labels"], 5),
    }
    expected, expected_sums = run(cut, config)
    total, sums = run(spoiled, config)
    np.testing.assert_allclose(total, expected, rtol=1e-6)
    for mine, theirs in zip(jax.tree.leaves(sums), jax.tree.leaves(expected_sums), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-6)
    grad = jax.grad(lambda s: run({**spoiled, "stream": s}, config)[0])(spoiled["stream"])
    assert np.all(np.isfinite(grad))
    assert not np.any(np.asarray(grad)[~counted])


def test_blocks_without_weight_are_skipped():
    calls = []

    def draft(rows: jax.Array, head: jax.Array) -> jax.Array:
        jax.debug.callback(lambda: calls.append(1))
        return rows @ head.T

    given = make_inputs()
    given["weight"] = jnp.zeros(ELEMENTS).at[jnp.array([3, 17, 28])].set(1.0)
    blocked_loss(
        draft,
        given["head"],
        lambda rows: rows @ given["target_head"].T,
        num_depths=DEPTHS,
        config=LossConfig(block_size=4),
        **{name: given[name] for name in ARRAYS},
    )
    jax.effects_barrier()
    assert len(calls) == 1  # scattered over three blocks' worth of rows, brought into one


def largest_array(jaxpr: Any) -> int:
    """Elements of the largest intermediate, in every nested program."""
    sizes = [0]
    for equation in jaxpr.eqns:
        sizes += [math.prod(v.aval.shape) for v in equation.outvars if hasattr(v.aval, "shape")]
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=is_program):
            if is_program(value):
                sizes.append(largest_array(getattr(value, "jaxpr", value)))
    return max(sizes)


def is_program(value: Any) -> bool:
    return hasattr(value, "eqns") or hasattr(value, "jaxpr")


def test_logits_of_one_block_live_at_once():
    elements, hidden, vocab, block = 4096, 8, 2048, 32
    head = jnp.ones((vocab, hidden))
    given = {
        "stream": jnp.ones((elements, hidden)),
        "rows": jnp.zeros(elements, jnp.int32),
        "weight": jnp.ones(elements),
    }

    def loss(stream: jax.Array, head: jax.Array) -> jax.Array:
        return blocked_loss(
            lambda rows, head: rows @ head.T,
            head,
            lambda rows: rows @ jnp.ones((vocab, hidden)).T,
            stream,
            jnp.ones((1, hidden)),
            given["rows"],
            given["rows"],
            given["weight"],
            given["rows"],
            1,
            LossConfig(ce=1.0, tv=1.0, block_size=block),
        )[0]

    gradient = jax.grad(loss, argnums=(0, 1))
    jaxpr = jax.make_jaxpr(gradient)(given["stream"], head)
    assert largest_array(jaxpr.jaxpr) == block * vocab  # 1/128 of all logits
    compiled = jax.jit(gradient).lower(given["stream"], head).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * elements * vocab / 8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kl": -1.0}, "loss: kl: found -1.0, expected a weight of 0 or more"),
        ({"kl": 0.0}, "loss: found kl, ce and tv all 0, expected one above 0"),
        ({"tv": float("nan")}, "loss: tv: found nan, expected a weight of 0 or more"),
        ({"block_size": 0}, "loss: block_size: found 0, expected 1 or more"),
        (
            {"depth_weights": (1.0, -2.0)},
            "loss: depth_weights: found [1.0, -2.0], expected weights of 0 or more",
        ),
    ],
)
def test_bad_configurations_are_refused(changes, message):
    with pytest.raises(InputError) as error:
        LossConfig(**changes)
    assert str(error.value) == message


def test_a_wrong_number_of_depth_weights_is_refused():
    with pytest.raises(InputError, match="found 2 weights, expected 3, one a depth"):
        run(make_inputs(), LossConfig(depth_weights=(1.0, 1.0)))
