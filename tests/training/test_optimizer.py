"""Schedules and update rules by the values they give."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from peagle_jax.training.optimizer import is_kernel, learning_rate, make_optimizer
from peagle_jax.training.train_config import OptimizerSection

PARAMS = {
    "embed_tokens": {"embedding": jnp.full((5, 4), 2.0)},
    "layers_0": {
        "mlp": {"up_proj": {"kernel": jnp.full((6, 4), 2.0), "bias": jnp.full((6,), 2.0)}},
        "input_layernorm": {"scale": jnp.full((4,), 2.0)},
    },
    "mask_hidden": jnp.full((12,), 2.0),
    "lm_head": {"kernel": jnp.full((5, 4), 2.0)},
}


def direction(config, grads):
    optimizer = make_optimizer(config)
    return jax.jit(lambda g: optimizer.update(g, optimizer.init(PARAMS), PARAMS)[0])(grads)


def test_the_rate_rises_then_falls_along_a_cosine():
    config = OptimizerSection(learning_rate=0.4, warmup_steps=4, final=0.1)
    rates = [learning_rate(config, step, 24) for step in range(30)]
    assert rates[:5] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4])
    assert rates[9] == pytest.approx(0.4 * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 5 / 19))))
    assert rates[23:] == pytest.approx([0.04] * 7)
    # Half a cosine: steps equally far from its ends make up the sum of the ends.
    assert rates[8] + rates[19] == pytest.approx(0.44)


def test_a_constant_rate_stays_after_its_warm_up():
    config = OptimizerSection(learning_rate=0.4, warmup_steps=2, schedule="constant")
    assert [learning_rate(config, s, 10) for s in (0, 1, 2, 9)] == pytest.approx([0.2] + [0.4] * 3)


def test_no_warm_up_begins_at_the_peak():
    config = OptimizerSection(learning_rate=0.4, warmup_steps=0)
    assert learning_rate(config, 0, 3) == pytest.approx(0.4)


def test_only_kernels_decay():
    assert jax.tree.map(bool, is_kernel(PARAMS)) == {
        "embed_tokens": {"embedding": False},
        "layers_0": {
            "mlp": {"up_proj": {"kernel": True, "bias": False}},
            "input_layernorm": {"scale": False},
        },
        "mask_hidden": False,
        "lm_head": {"kernel": True},
    }
    config = OptimizerSection(weight_decay=0.5)
    updates = direction(config, jax.tree.map(jnp.zeros_like, PARAMS))
    np.testing.assert_allclose(updates["lm_head"]["kernel"], 0.5 * 2.0, rtol=1e-6)
    assert not updates["embed_tokens"]["embedding"].any()
    assert not updates["layers_0"]["input_layernorm"]["scale"].any()


def test_gradients_are_clipped_by_their_norm_over_all_parameters():
    optimizer = make_optimizer(OptimizerSection(weight_decay=0.0, clip_norm=1.0))
    grads = jax.tree.map(jnp.ones_like, PARAMS)
    large = jax.tree.map(lambda g: 50 * g, grads)
    _, state = jax.jit(optimizer.update)(large, optimizer.init(PARAMS), PARAMS)
    (adam,) = [s for s in jax.tree.leaves(state, is_leaf=_is_adam) if _is_adam(s)]
    norm = float(optax.tree.norm(grads))
    np.testing.assert_allclose(adam.mu["mask_hidden"], 0.1 / norm, rtol=1e-5)


def _is_adam(state):
    return isinstance(state, optax.ScaleByAdamState)


def test_muon_makes_updates_of_inner_kernels_orthogonal_and_no_others():
    key = jax.random.key(0)
    stretch = 10.0 ** jnp.arange(4)
    grads = jax.tree.map(
        lambda p: jax.random.normal(key, p.shape) * (stretch if p.shape[-1] == 4 else 1), PARAMS
    )
    config = OptimizerSection(name="muon", weight_decay=0.0, clip_norm=1e9)
    updates = direction(config, grads)
    inner = np.asarray(updates["layers_0"]["mlp"]["up_proj"]["kernel"])
    values = np.linalg.svd(inner, compute_uv=False)
    # Newton-Schulz brings every singular value near 1, times 0.2 * sqrt(larger side).
    scale = 0.2 * math.sqrt(6)
    raw = np.linalg.svd(np.asarray(grads["layers_0"]["mlp"]["up_proj"]["kernel"]))[1]
    assert raw[0] / raw[1] > 5
    assert 0.6 * scale < values[1] <= values[0] < 1.3 * scale
    # Adam's first step is the sign of the gradient.
    head = np.asarray(grads["lm_head"]["kernel"])
    np.testing.assert_allclose(updates["lm_head"]["kernel"], np.sign(head), rtol=1e-3)
