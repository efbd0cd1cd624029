"""Devices in a mesh, and which of its axes each dimension of an array is split over.

Models name a logical axis per dimension of a weight (`models.decoder.logical_axes`); a table
of rules maps those names to mesh axes. Another way to split a model is another table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from peagle_jax.errors import InputError

DATA, FSDP = "data", "fsdp"
# Axes that split single layers: each expert over `model`, a layer's experts over `expert`.
MODEL, EXPERT = "model", "expert"
# The rows of a batch are split over both axes.
BATCH = PartitionSpec((DATA, FSDP))

Rules = Mapping[str, str | None]

# Fully sharded data parallelism (ZeRO, arXiv 1910.02054): every matrix is cut along its model
# width, which all of them have; vectors are whole on each device.
FSDP_RULES: Rules = {
    "embed": FSDP,
    "vocab": None,
    "heads": None,
    "kv_heads": None,
    "mlp": None,
    "experts": None,
}


def make_mesh(data: int | None = None, fsdp: int = 1, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh of `data` x `fsdp` devices.

    Args:
        data: groups that each hold a whole copy of the weights; None = as many as the
            devices give.
        fsdp: devices that share one copy.
        devices: None = all of `jax.devices()`; the first data * fsdp are taken.

    Raises InputError where there are too few devices.
    """
    found = list(jax.devices() if devices is None else devices)
    if data is None:
        data = max(1, len(found) // fsdp)
    if data * fsdp > len(found):
        raise InputError(
            f"mesh: found data = {data} by fsdp = {fsdp}, expected a product of at most "
            f"{len(found)}, the number of devices"
        )
    grid = np.array(found[: data * fsdp]).reshape(data, fsdp)
    return Mesh(grid, (DATA, FSDP), axis_types=(AxisType.Auto, AxisType.Auto))


def partition_spec(axes: Any, rules: Rules = FSDP_RULES) -> PartitionSpec:
    """Logical axis names of one weight, a `PartitionSpec` over them, as one over mesh axes."""
    return PartitionSpec(*(None if name is None else rules[name] for name in axes))


def partition_specs(axes: Any, abstract: Any, mesh: Mesh, rules: Rules = FSDP_RULES) -> Any:
    """The tree of mesh `PartitionSpec`s of a parameter tree.

    Args:
        axes: the tree of logical axes, as the models' `logical_axes` gives it.
        abstract: a tree of the same paths, or of some of them, of anything with a shape. A
            path that `axes` lacks is not split.

    Raises InputError where a dimension does not divide among its devices.
    """
    is_spec = lambda leaf: isinstance(leaf, PartitionSpec)  # noqa: E731
    known = {
        jax.tree_util.keystr(path): spec
        for path, spec in jax.tree_util.tree_flatten_with_path(axes, is_leaf=is_spec)[0]
    }

    def place(path: Any, leaf: Any) -> PartitionSpec:
        name = jax.tree_util.keystr(path)
        spec = partition_spec(known.get(name, PartitionSpec()), rules)
        for size, axis in zip(leaf.shape, spec, strict=False):
            if axis is not None and size % mesh.shape[axis]:
                raise InputError(
                    f"mesh: {axis}: found {mesh.shape[axis]}, expected a divisor of {size}, "
                    f"a dimension of {'.'.join(str(key.key) for key in path)}"
                )
        return spec

    return jax.tree_util.tree_map_with_path(place, abstract)


def named(mesh: Mesh, specs: Any) -> Any:
    """A tree of `PartitionSpec`s as shardings on `mesh`."""
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        specs,
        is_leaf=lambda leaf: isinstance(leaf, PartitionSpec),
    )
