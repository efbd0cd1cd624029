"""AdamW or Muon under warm-up and cosine decay, gradients clipped by their global norm."""

from __future__ import annotations

import math
from typing import Any

import jax
import optax
from optax import contrib

from peagle_jax.training.train_config import OptimizerSection

# Makes the size of Muon's updates that of Adam's, so that both take the same learning rate
# (arXiv 2502.16982).
_MUON_RMS = 0.2


def learning_rate(config: OptimizerSection, step: int, steps: int) -> float:
    """The learning rate of a step, from 0, in a run of `steps`.

    Rises linearly over `warmup_steps`, already above 0 at the first step; then stays
    ("constant"), or falls along half a cosine to `final` of the peak at the last step.
    """
    warmup = config.warmup_steps
    rate = config.learning_rate * min(1.0, (step + 1) / max(warmup, 1))
    if config.schedule == "constant":
        return rate
    done = min(max(step - warmup, 0) / max(steps - 1 - warmup, 1), 1.0)
    return rate * (config.final + (1 - config.final) * 0.5 * (1 + math.cos(math.pi * done)))


def make_optimizer(config: OptimizerSection) -> optax.GradientTransformation:
    """Gradients, float32, to the direction that parameters move against.

    The learning rate is left to the caller: programs compiled for one rate serve another.
    Weight decay (arXiv 1711.05101) acts on the kernels of linear layers alone. Muon
    (arXiv 2502.16982) takes those between embedding and head, AdamW the rest.
    """
    rule = optax.chain(
        optax.scale_by_adam(config.b1, config.b2),
        optax.add_decayed_weights(config.weight_decay, is_kernel),
    )
    if config.name == "muon":
        muon = optax.chain(
            contrib.scale_by_muon(
                beta=config.momentum, weight_dimension_numbers=_kernel_dimensions
            ),
            optax.stateless(_adam_sized),
            optax.add_decayed_weights(config.weight_decay),
        )
        rule = optax.partition({"muon": muon, "adamw": rule}, _rules)
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), rule)


def is_kernel(params: Any) -> Any:
    """True for the kernels of linear layers; False for norms, biases, vectors, embeddings."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: path[-1].key == "kernel" and leaf.ndim == 2, params
    )


def _rules(params: Any) -> Any:
    """Which rule updates a parameter."""
    return jax.tree_util.tree_map_with_path(
        lambda path, kernel: "muon" if kernel and path[0].key != "lm_head" else "adamw",
        is_kernel(params),
    )


def _kernel_dimensions(params: Any) -> Any:
    """Kernels are `[out, in]`."""
    return jax.tree.map(
        lambda _: contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=0), params
    )


def _adam_sized(updates: Any, _: Any) -> Any:
    """Orthogonal updates, whose singular values are 1, with the root mean square of Adam's."""
    return jax.tree.map(lambda x: _MUON_RMS * max(x.shape) ** 0.5 * x, updates)
