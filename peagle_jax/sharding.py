"""Devices in a mesh, and which of its axes each dimension of an array is split over.

Models name a logical axis per dimension of a weight (`models.decoder.logical_axes`); a table
of rules maps those names to mesh axes. Another way to split a model is another table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format, Layout
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from peagle_jax.config import BlockConfig
from peagle_jax.errors import InputError
from peagle_jax.mesh_shape import MeshShape

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

# Tensor parallelism (Megatron-LM, arXiv 1909.08053): attention by heads, a feed-forward by its
# width, so that one sum over `model` ends each of them; embedding and head by tokens. The
# experts of a layer lie apart over `expert`, each of them over `model` too.
TENSOR_RULES: Rules = {
    "embed": None,
    "vocab": MODEL,
    "heads": MODEL,
    "kv_heads": MODEL,
    "mlp": MODEL,
    "experts": EXPERT,
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


def make_inference_mesh(shape: MeshShape, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh with the axes data, expert and model, neighbours along `model`.

    devices: None = all of `jax.devices()`. Raises InputError unless they are as many as `shape`
    asks for.
    """
    found = list(jax.devices() if devices is None else devices)
    shape.check_devices(len(found))
    sizes = {DATA: shape.data, EXPERT: shape.expert, MODEL: shape.model}
    return jax.make_mesh(
        tuple(sizes.values()), tuple(sizes), (AxisType.Auto,) * len(sizes), devices=found
    )


def partition_spec(axes: Any, rules: Rules = FSDP_RULES, name: str = "weight") -> PartitionSpec:
    """Logical axis names of one weight, a `PartitionSpec` over them, as one over mesh axes.

    Raises InputError, which calls the weight `name`, where the rules do not know a logical axis,
    or would split two dimensions over one mesh axis.
    """
    for logical in axes:
        if logical is not None and logical not in rules:
            raise InputError(
                f"rules: found none for {logical!r}, an axis of {name}, expected a mesh axis "
                "or None"
            )
    found = [None if logical is None else rules[logical] for logical in axes]
    for axis in found:
        if axis is not None and found.count(axis) > 1:
            raise InputError(
                f"rules: found {axis!r} for two dimensions of {name}, {tuple(axes)}, expected "
                "it for one"
            )
    return PartitionSpec(*found)


def partition_specs(
    axes: Any, abstract: Any, mesh: Mesh | AbstractMesh, rules: Rules = FSDP_RULES
) -> Any:
    """The tree of mesh `PartitionSpec`s of a parameter tree.

    Args:
        axes: the tree of logical axes, as the models' `logical_axes` gives it.
        abstract: a tree of the same paths, or of some of them, of anything with a shape. A
            path that `axes` lacks is not split.

    Raises InputError where a dimension does not divide among its devices, the mesh lacks an
    axis that the rules name, or as `partition_spec` does.
    """
    is_spec = lambda leaf: isinstance(leaf, PartitionSpec)  # noqa: E731
    known = {
        jax.tree_util.keystr(path): spec
        for path, spec in jax.tree_util.tree_flatten_with_path(axes, is_leaf=is_spec)[0]
    }

    def place(path: Any, leaf: Any) -> PartitionSpec:
        name = ".".join(str(key.key) for key in path)
        spec = partition_spec(known.get(jax.tree_util.keystr(path), PartitionSpec()), rules, name)
        for size, axis in zip(leaf.shape, spec, strict=False):
            if axis is not None and axis not in mesh.shape:
                raise InputError(
                    f"rules: found the axis {axis!r} for {name}, expected one of the mesh's, "
                    f"{', '.join(mesh.axis_names)}"
                )
            if axis is not None and size % mesh.shape[axis]:
                raise InputError(
                    f"mesh: {axis}: found {mesh.shape[axis]}, expected a divisor of {size}, "
                    f"a dimension of {name}"
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


def check_heads(block: BlockConfig, mesh: Mesh | AbstractMesh, rules: Rules) -> None:
    """Raises InputError where a device would have a part of a head.

    A weight's dimension of heads may divide where the heads do not, as it is theirs times
    their width.
    """
    for logical, count, text in (
        ("kv_heads", block.num_kv_heads, "key-value heads"),
        ("heads", block.num_heads, "query heads"),
    ):
        axis = rules[logical]
        parts = mesh.shape.get(axis, 1)
        if count % parts:
            raise InputError(
                f"mesh: {axis}: found {parts}, expected a divisor of {count}, the model's {text}"
            )


def by_rows(ndim: int, place: Any) -> Any:
    """The place of an array that is read by rows: on a TPU its sharding with a layout too.

    Left to itself a TPU lays an array out along whichever dimension wastes the least padding, and
    XLA copies it where an operation wants another (docs/design.md).
    """
    devices: Any = place.device_set
    if all(device.platform != "tpu" for device in devices):
        return place
    return Format(Layout(tuple(range(ndim))), place)


def per_device(function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """`function` of each device's own part of its arrays; without a mesh, as it is.

    XLA can split what it compiles itself, but no kernel that it is given. So these are called
    through here; the specs are over the axes that nothing was split over by hand yet.
    """
    mesh = jax.sharding.get_abstract_mesh()
    free = {
        name
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind == AxisType.Auto
    }
    if not free:
        return function
    return jax.shard_map(
        function, in_specs=in_specs, out_specs=out_specs, axis_names=free, check_vma=False
    )


def spans_processes(mesh: Mesh | None) -> bool:
    """Whether a mesh has devices of several processes, which then must take the same steps."""
    return mesh is not None and len({device.process_index for device in mesh.devices.flat}) > 1


def from_first(value: np.ndarray, mesh: Mesh) -> np.ndarray:
    """The array that the process of the mesh's first device has, in every process of the mesh.

    All have one of that shape and dtype. It is a sum over devices, of which only the first
    brings anything.
    """
    if not spans_processes(mesh):
        return value
    row = Mesh(mesh.devices.reshape(-1), ("all",))
    parts = [
        jax.device_put((value if device == row.devices[0] else np.zeros_like(value))[None], device)
        for device in row.local_devices
    ]
    spread = jax.make_array_from_single_device_arrays(
        (row.size, *value.shape), NamedSharding(row, PartitionSpec("all")), parts
    )
    total = jax.jit(
        lambda array: jnp.sum(array, axis=0, dtype=array.dtype),
        out_shardings=NamedSharding(row, PartitionSpec()),
    )
    return np.asarray(total(spread))
