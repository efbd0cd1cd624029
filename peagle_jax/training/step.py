"""One training step: loss and gradient of a batch over a mesh, then the optimizer's update."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from peagle_jax import sharding
from peagle_jax.sharding import BATCH, DATA, FSDP
from peagle_jax.training.batch import PackedBatch
from peagle_jax.training.cod import bears_loss
from peagle_jax.training.loss import DepthSums
from peagle_jax.training.params import Params, cast_floats


@runtime_checkable
class Objective(Protocol):
    """What is minimised; hashable."""

    def value_and_grad(
        self,
        trained: Params,
        frozen: Params,
        target_params: Params,
        batch: PackedBatch,
        key: Array,
        denominator: Array,
    ) -> tuple[Float[Array, ""], DepthSums, Params]:
        """(sum of the batch's losses / denominator, sums by depth, gradient like `trained`).

        `key` has a key for each row of the batch: a row's draws are its own, on whichever
        device it is.
        """


@dataclasses.dataclass(frozen=True)
class Problem:
    """What is trained on what, wherever the arrays are now.

    axes, target_axes: logical axes of the drafter's and the target's parameters, as the
    models' `logical_axes` gives them.
    """

    objective: Objective
    trained: Params
    frozen: Params
    target_params: Params
    axes: Any
    target_axes: Any


@struct.dataclass
class TrainState:
    """What a step changes. params are float32, whatever the objective computes in."""

    params: Params
    opt_state: Any
    step: Int[Array, ""]


@struct.dataclass
class StepMetrics:
    """What a step tells, still on the device. grad_norm is the one before clipping."""

    loss: Float[Array, ""]
    sums: DepthSums
    grad_norm: Float[Array, ""]
    tokens: Int[Array, ""]
    answer_tokens: Int[Array, ""]


# (state, frozen, target_params, batch, key of the run, learning rate) -> ...
Step = Callable[
    [TrainState, Params, Params, PackedBatch, Array, Array], tuple[TrainState, StepMetrics]
]


def make_step(
    objective: Objective,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    specs: tuple[Any, Any, Any],
) -> Step:
    """One step as a function of arrays, to be compiled with its state donated.

    Args:
      specs: `PartitionSpec`s of trained, frozen and the target's parameters.
    """
    value_and_grad = _on_mesh(objective, mesh, specs)

    def step(
        state: TrainState,
        frozen: Params,
        target_params: Params,
        batch: PackedBatch,
        key: Array,
        learning_rate: Array,
    ) -> tuple[TrainState, StepMetrics]:
        key = jax.random.fold_in(key, state.step)
        rows = jnp.arange(batch.tokens.shape[0])
        keys = jax.vmap(lambda row: jax.random.fold_in(key, row))(rows)
        loss, sums, grads = value_and_grad(state.params, frozen, target_params, batch, keys)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        metrics = StepMetrics(
            loss,
            sums,
            optax.tree.norm(grads),
            jnp.sum(batch.documents > 0),
            jnp.sum(batch.answer),
        )
        params = jax.tree.map(lambda p, u: p - learning_rate * u, state.params, updates)
        return TrainState(params, opt_state, state.step + 1), metrics

    return step


class Stepper:
    """The compiled step of a problem on a mesh, and its constant arguments in place.

    Raises InputError where weights do not divide among the mesh's devices.
    """

    def __init__(
        self,
        problem: Problem,
        optimizer: optax.GradientTransformation,
        mesh: Mesh,
        seed: int,
    ) -> None:
        def specs(axes: Any, tree: Any) -> Any:
            return sharding.partition_specs(axes, tree, mesh)

        self.mesh = mesh
        self._specs = specs(problem.axes, problem.trained)
        frozen_specs = specs(problem.axes, problem.frozen)
        target_specs = specs(problem.target_axes, problem.target_params)
        self._frozen = jax.device_put(problem.frozen, sharding.named(mesh, frozen_specs))
        self._target = jax.device_put(problem.target_params, sharding.named(mesh, target_specs))
        self._optimizer = optimizer
        step = make_step(
            problem.objective, optimizer, mesh, (self._specs, frozen_specs, target_specs)
        )

        # Whatever differs from run to run is an argument, so that a compiled step serves all.
        self._key = jax.random.key(seed)
        self._step = jax.jit(step, donate_argnums=0)

    def __call__(
        self, state: TrainState, batch: PackedBatch, learning_rate: float
    ) -> tuple[TrainState, StepMetrics]:
        """One step. `state` is donated; nothing waits for the device."""
        rate = np.float32(learning_rate)
        return self._step(state, self._frozen, self._target, batch, self._key, rate)

    def init(self, trained: Params) -> TrainState:
        """The state before the first step: float32 copies of `trained`, spread over the mesh."""
        placed = jax.device_put(
            jax.tree.map(jnp.copy, cast_floats(trained, jnp.float32)),
            sharding.named(self.mesh, self._specs),
        )
        abstract = jax.eval_shape(self._optimizer.init, placed)
        init = jax.jit(
            self._optimizer.init, out_shardings=sharding.named(self.mesh, self._like(abstract))
        )
        whole = sharding.named(self.mesh, PartitionSpec())
        return TrainState(placed, init(placed), jax.device_put(jnp.int32(0), whole))

    def place(self, batch: PackedBatch) -> PackedBatch:
        """The batch's rows on the devices that train on them."""
        return jax.device_put(batch, sharding.named(self.mesh, BATCH))

    def _like(self, opt_state: Any) -> Any:
        """An optimizer's moments lie as the parameters do whose paths theirs end in."""
        is_spec = lambda leaf: isinstance(leaf, PartitionSpec)  # noqa: E731
        known = {
            _names(path): spec
            for path, spec in jax.tree_util.tree_flatten_with_path(self._specs, is_leaf=is_spec)[0]
        }
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: known.get(_names(path), PartitionSpec()), opt_state
        )


def _names(path: Any) -> tuple[str, ...]:
    """The dict keys that a path ends in."""
    names: list[str] = []
    for key in reversed(path):
        if not isinstance(key, jax.tree_util.DictKey):
            break
        names.append(key.key)
    return tuple(reversed(names))


def _on_mesh(
    objective: Objective, mesh: Mesh, specs: tuple[Any, Any, Any]
) -> Callable[..., tuple[Array, DepthSums, Params]]:
    """(trained, frozen, target_params, batch, keys) -> what the objective gives for the batch.

    Every device computes its own rows with whole weights, which it gathers first; of the
    summed gradient it keeps its part. The sums over devices are the only difference to one
    device.
    """

    def local(
        trained: Params, frozen: Params, target_params: Params, batch: PackedBatch, keys: Array
    ) -> tuple[Array, DepthSums, Params]:
        bearing = jnp.sum(bears_loss(batch), dtype=jnp.float32)
        denominator = jnp.maximum(_total(bearing, mesh), 1.0)
        loss, sums, grads = objective.value_and_grad(
            trained, frozen, target_params, batch, keys, denominator
        )
        return loss, sums, cast_floats(grads, jnp.float32)

    if mesh.size == 1:
        return local

    def on_device(
        trained: Params, frozen: Params, target_params: Params, batch: PackedBatch, keys: Array
    ) -> tuple[Array, DepthSums, Params]:
        whole = [
            _map_with_specs(_gather, tree, spec)
            for tree, spec in zip((trained, frozen, target_params), specs, strict=True)
        ]
        loss, sums, grads = local(whole[0], whole[1], whole[2], batch, keys)
        loss, sums = jax.tree.map(lambda x: jax.lax.psum(x, (DATA, FSDP)), (loss, sums))
        return loss, sums, _map_with_specs(_reduce, grads, specs[0])

    return jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(*specs, BATCH, BATCH),
        out_specs=(PartitionSpec(), PartitionSpec(), specs[0]),
        check_vma=False,
    )


def _total(value: Array, mesh: Mesh) -> Array:
    return value if mesh.size == 1 else jax.lax.psum(value, (DATA, FSDP))


def _map_with_specs(function: Callable[[Any, int | None], Any], tree: Any, specs: Any) -> Any:
    """`function(leaf, dimension that is split over FSDP or None)` of every leaf."""
    return jax.tree.map(
        lambda leaf, spec: function(leaf, tuple(spec).index(FSDP) if FSDP in spec else None),
        tree,
        specs,
    )


def _gather(leaf: Array, dimension: int | None) -> Array:
    if dimension is None:
        return leaf
    return jax.lax.all_gather(leaf, FSDP, axis=dimension, tiled=True)


def _reduce(leaf: Array, dimension: int | None) -> Array:
    if dimension is None:
        return jax.lax.psum(leaf, (DATA, FSDP))
    part = jax.lax.psum_scatter(leaf, FSDP, scatter_dimension=dimension, tiled=True)
    return jax.lax.psum(part, DATA)
