"""Losses between the drafter's and the target's next-token distributions, in blocks of rows.

Both distributions are over the draft vocabulary, the target's renormalised over it. Logits of
one block of rows exist at a time: a vocabulary of 200,000 times thousands of elements would not
fit otherwise. A block's gradient is taken while its logits are there, so that no product with
a head is done twice: where heads are frozen, two for the drafter and one for the target.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from peagle_jax.errors import InputError

# ([rows, hidden], parameters) -> [rows, draft_vocab]
DraftLogits = Callable[[Array, Any], Array]
TargetLogits = Callable[[Array], Array]  # [rows, target_hidden] -> [rows, draft_vocab]


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """What one element costs: `kl * KL(target || draft) + ce * CE + tv * TV`, in nats.

    CE is the cross-entropy of the text's real next token; an element whose token is outside
    the draft vocabulary has none. TV is the total variation distance, half the L1 distance:
    the probability that a draft sampled from the drafter is rejected.

    depth_weights[d] multiplies the losses of depth d; None = 1 everywhere.
    block_size: rows whose logits exist at once.
    """

    kl: float = 1.0
    ce: float = 0.0
    tv: float = 0.0
    depth_weights: tuple[float, ...] | None = None
    block_size: int = 512

    def __post_init__(self) -> None:
        terms = {"kl": self.kl, "ce": self.ce, "tv": self.tv}
        for name, value in terms.items():
            if not 0 <= value < float("inf"):
                raise InputError(f"loss: {name}: found {value}, expected a weight of 0 or more")
        if not any(terms.values()):
            raise InputError("loss: found kl, ce and tv all 0, expected one above 0")
        if self.depth_weights is not None and not all(
            0 <= w < float("inf") for w in self.depth_weights
        ):
            raise InputError(
                f"loss: depth_weights: found {list(self.depth_weights)}, "
                "expected weights of 0 or more"
            )
        if self.block_size < 1:
            raise InputError(f"loss: block_size: found {self.block_size}, expected 1 or more")

    def check_depths(self, num_depths: int) -> None:
        """Raises InputError unless there is one depth weight a depth."""
        if self.depth_weights is not None and len(self.depth_weights) != num_depths:
            raise InputError(
                f"loss: depth_weights: found {len(self.depth_weights)} weights, "
                f"expected {num_depths}, one a depth"
            )


@struct.dataclass
class DepthSums:
    """Sums over the elements of each depth, float32: add them across segments and devices.

    loss: of weight * loss, before depth weights. correct: elements whose most probable token,
    among the draft vocabulary, is the target's. count: elements with a weight. weight: of these.
    """

    loss: Float[Array, "depths"]
    correct: Float[Array, "depths"]
    count: Float[Array, "depths"]
    weight: Float[Array, "depths"]

    @classmethod
    def zeros(cls, num_depths: int) -> DepthSums:
        """Where adding begins."""
        return cls(*(jnp.zeros((num_depths,), jnp.float32) for _ in range(4)))

    def __add__(self, other: DepthSums) -> DepthSums:
        return jax.tree.map(jnp.add, self, other)


def blocked_loss(
    draft_logits: DraftLogits,
    draft_params: Any,
    target_logits: TargetLogits,
    stream: Float[Array, "elements hidden"],
    target_hidden: Float[Array, "positions target_hidden"],
    target_row: Int[Array, "elements"],
    labels: Int[Array, "elements"],
    weight: Float[Array, "elements"],
    depth: Int[Array, "elements"],
    num_depths: int,
    config: LossConfig,
) -> tuple[Float[Array, ""], DepthSums]:
    """The weighted sum of all elements' losses, and its parts by depth.

    Differentiable, once, in `stream` and `draft_params`, and in nothing else. Elements without
    weight cost nothing: those that count are brought together first, and the blocks that then
    hold none are skipped.

    Args:
      draft_logits: rows of `stream` to logits over the draft vocabulary. What it closes over
        gets no gradient: a frozen head belongs there.
      draft_params: what is trained of its parameters.
      target_logits: rows of `target_hidden` to the target's logits over the same tokens.
      target_row: which row of `target_hidden` each element is compared with. Rows out of
        range are allowed where the weight is 0.
      labels: draft id of the text's real next token, -1 where it has none.
      weight: of each element's loss; 0 = it does not count.
      depth: 0 .. num_depths - 1 of each element.

    Raises:
      InputError: the number of depth weights is not `num_depths`.
    """
    config.check_depths(num_depths)
    elements = stream.shape[0]
    size = min(config.block_size, elements)
    pad = -elements % size
    weight = weight.astype(jnp.float32)
    depth_weights = jnp.asarray(config.depth_weights or (1.0,) * num_depths, jnp.float32)
    parameters = jax.lax.stop_gradient(draft_params)

    # Stable, so that neighbours stay together.
    order = jnp.argsort(weight <= 0, stable=True)
    in_order = jax.tree.map(
        lambda x: jnp.pad(x[order], ((0, pad), *[(0, 0)] * (x.ndim - 1))).reshape(
            -1, size, *x.shape[1:]
        ),
        jax.lax.stop_gradient((stream, target_row, labels, weight, depth_weights[depth])),
    )

    def block(total_gradient: Any, inputs: tuple[Array, ...]) -> tuple[Any, tuple[Array, ...]]:
        rows, target, label, counts, depth_weight = inputs

        def compute() -> tuple[Any, tuple[Array, ...]]:
            wanted = target_logits(target_hidden.at[target].get(mode="clip"))

            def loss_of(parameters: Any, rows: Array) -> tuple[Array, tuple[Array, Array]]:
                losses, correct = _row_losses(
                    draft_logits(rows, parameters).astype(jnp.float32),
                    jax.lax.stop_gradient(wanted).astype(jnp.float32),
                    label,
                    config,
                )
                # `where`, not a product: what an uncounted row holds must not matter.
                losses = jnp.where(counts > 0, counts * losses, 0)
                correct = jnp.where(counts > 0, correct, 0)
                return jnp.sum(depth_weight * losses), (losses, correct)

            (gradient, along_rows), (losses, correct) = jax.grad(
                loss_of, argnums=(0, 1), has_aux=True
            )(parameters, rows)
            added = jax.tree.map(lambda a, b: a + b.astype(a.dtype), total_gradient, gradient)
            return added, (losses, correct, along_rows)

        def skip() -> tuple[Any, tuple[Array, ...]]:
            nothing = jnp.zeros((size,), jnp.float32)
            return total_gradient, (nothing, nothing, jnp.zeros_like(rows))

        return jax.lax.cond(jnp.any(counts > 0), compute, skip)

    nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), parameters)
    gradient, outputs = jax.lax.scan(block, nothing, in_order)
    losses, correct, along_rows = (
        jnp.zeros((elements, *x.shape[2:]), x.dtype)
        .at[order]
        .set(x.reshape(-1, *x.shape[2:])[:elements], unique_indices=True)
        for x in outputs
    )

    def by_depth(values: Float[Array, "elements"]) -> Float[Array, "depths"]:
        return jax.ops.segment_sum(values, depth, num_segments=num_depths)

    sums = DepthSums(
        loss=by_depth(losses),
        correct=by_depth(correct),
        count=by_depth((weight > 0).astype(jnp.float32)),
        weight=by_depth(weight),
    )
    sums = jax.lax.stop_gradient(sums)
    total = jnp.sum(depth_weights * sums.loss)
    return _with_gradient(total, (draft_params, stream), (gradient, along_rows)), sums


@jax.custom_vjp
def _with_gradient(value: Float[Array, ""], inputs: Any, gradient: Any) -> Float[Array, ""]:
    """`value`, whose gradient in `inputs` is `gradient`."""
    del inputs, gradient
    return value


def _with_gradient_forward(value: Array, inputs: Any, gradient: Any) -> tuple[Array, Any]:
    # The gradient comes back in the dtype of what it belongs to.
    like = jax.tree.map(lambda x: jnp.zeros((), x.dtype), inputs)
    return value, (gradient, like)


def _with_gradient_backward(kept: Any, cotangent: Array) -> tuple[Array, Any, Any]:
    gradient, like = kept
    scaled = jax.tree.map(lambda g, x: (cotangent * g).astype(x.dtype), gradient, like)
    return jnp.zeros_like(cotangent), scaled, jax.tree.map(jnp.zeros_like, gradient)


_with_gradient.defvjp(_with_gradient_forward, _with_gradient_backward)


def _row_losses(
    draft: Float[Array, "rows vocab"],
    target: Float[Array, "rows vocab"],
    labels: Int[Array, "rows"],
    config: LossConfig,
) -> tuple[Float[Array, "rows"], Float[Array, "rows"]]:
    """Each row's loss, and 1 where both have the same most probable token."""
    log_q = jax.nn.log_softmax(draft, axis=-1)
    log_p = jax.nn.log_softmax(target, axis=-1)
    p = jnp.exp(log_p)
    loss = jnp.zeros(draft.shape[:1], jnp.float32)
    if config.kl:
        loss += config.kl * jnp.sum(p * (log_p - log_q), axis=-1)
    if config.ce:
        at_label = jnp.take_along_axis(log_q, jnp.maximum(labels, 0)[:, None], axis=-1)[:, 0]
        loss += config.ce * jnp.where(labels >= 0, -at_label, 0)
    if config.tv:
        loss += config.tv * 0.5 * jnp.sum(jnp.abs(p - jnp.exp(log_q)), axis=-1)
    # Where both are largest; an argmax of each is several times slower on CPU.
    best = [x >= jnp.max(x, axis=-1, keepdims=True) for x in (draft, target)]
    return loss, jnp.any(best[0] & best[1], axis=-1).astype(jnp.float32)
