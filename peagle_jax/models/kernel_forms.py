"""Kernels of linear layers that are more than one array: what they hold, and their products.

Quantised ones, and full ones that are held twice. In the parameters such a kernel is a dict of
arrays in the place of one array; which form it has is read from its keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, Int8, UInt8

from pallas_kernels.mxfp4_matmul import BLOCK, dequantise
from peagle_jax.config import WeightForm

_INT8_MOST = 127
# Up to so many rows Eigen's product is the faster one; scripts/few_rows.py times them.
_EIGEN_ROWS = 16
# All kernels of a network that are held twice; with more, memory is worth more than speed.
MOST_TWO_WAY_BYTES = 2 << 30
# Linear layers of one module that read the same input.
_BESIDE = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


@struct.dataclass
class Int8Kernel:
    """`values * scales`, one scale an output: symmetric int8, for weights alone.

    Attributes:
      values: -127 to 127.
      scales: float32.
    """

    values: Int8[Array, "*experts out in"]
    scales: Float[Array, "*experts out"]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the kernel that it stands for, `[.., out, in]`."""
        return self.values.shape

    def product(self, x: Float[Array, "rows in"]) -> Float[Array, "out rows"]:
        """`kernel @ x.T` in float32: int8 is exact in every dtype of x, scales come after."""
        y = _out_rows(self.values.astype(x.dtype), x, 1)
        return y * self.scales[:, None]

    @staticmethod
    def axes(*experts_out_in: Any) -> dict[str, PartitionSpec]:
        """Axes of its arrays from those of the kernel."""
        return {
            "values": PartitionSpec(*experts_out_in),
            "scales": PartitionSpec(*experts_out_in[:-1]),
        }


@struct.dataclass
class Mxfp4Kernel:
    """Four bits an element and eight bits for each 32, as gpt-oss's experts are stored.

    Attributes:
      packed, scales: see `pallas_kernels.mxfp4_matmul`; outputs are their last axis.
    """

    packed: UInt8[Array, "*experts half out"]
    scales: UInt8[Array, "*experts blocks out"]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the kernel that it stands for, `[.., out, in]`."""
        *experts, half, out = self.packed.shape
        return (*experts, out, 2 * half)

    def product(self, x: Float[Array, "rows in"]) -> Float[Array, "out rows"]:
        """`kernel @ x.T` in float32, of one expert."""
        return _out_rows(dequantise(self.packed, self.scales, x.dtype), x, 0)

    @staticmethod
    def axes(*experts_out_in: Any) -> dict[str, PartitionSpec]:
        """Axes of its arrays from those of the kernel."""
        *experts, out, inner = experts_out_in
        return dict.fromkeys(("packed", "scales"), PartitionSpec(*experts, inner, out))


@struct.dataclass
class TwoWayKernel:
    """A full kernel in both layouts, for CPU: one is faster for one row, one for a few.

    Attributes:
      out_in: the kernel.
      in_out: its transpose.
    """

    out_in: Float[Array, "out in"]
    in_out: Float[Array, "in out"]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the kernel, `[out, in]`."""
        return self.out_in.shape

    @staticmethod
    def axes(*out_in: Any) -> dict[str, PartitionSpec]:
        """Axes of its arrays from those of the kernel."""
        return {"out_in": PartitionSpec(*out_in), "in_out": PartitionSpec(*reversed(out_in))}


def is_few(rows: int) -> bool:
    """Whether a product with so many rows takes a transpose, where there is one."""
    return 1 < rows < 2 * _EIGEN_ROWS


def few_rows(
    x: Float[Array, "rows in"], in_out: Float[Array, "in out"]
) -> Float[Array, "rows out"]:
    """`x @ in_out` in float32, of few rows on CPU.

    XLA hands products there to YNNPACK, which packs both sides anew at every call, but for one
    whose left side lies by its inputs: that goes to Eigen, which reads this layout at nearly
    the speed of one row.
    """
    inner = 1
    if x.shape[0] <= _EIGEN_ROWS:
        x, inner = jax.lax.optimization_barrier(x.T), 0
    return jax.lax.dot_general(
        x, in_out, (((inner,), (0,)), ((), ())), preferred_element_type=jnp.float32
    )


def joined_name(names: Sequence[str]) -> str:
    """What a module's parameters call the joined kernels of its linear layers."""
    return "+".join(names)


Quantised = Int8Kernel | Mxfp4Kernel
KernelForm = Quantised | TwoWayKernel
_FORMS: tuple[type[KernelForm], ...] = (Int8Kernel, Mxfp4Kernel, TwoWayKernel)


def _out_rows(kernel: Array, x: Array, inner_axis: int) -> Array:
    contracted = ((inner_axis,), (1,))
    return jax.lax.dot_general(
        kernel, x, (contracted, ((), ())), preferred_element_type=jnp.float32
    )


def of_parameter(value: Any) -> Any:
    """A kernel as the parameters have it: an array, or a dict as the form that its keys name."""
    form = _form(value)
    return value if form is None else form(**value)


def _form(value: Any) -> type[KernelForm] | None:
    if not isinstance(value, Mapping):
        return None
    names = set(value)
    return next((form for form in _FORMS if names == set(form.__dataclass_fields__)), None)


def product(kernel: Any, x: Float[Array, "rows in"]) -> Float[Array, "out rows"]:
    """`kernel @ x.T` in float32, whatever form the kernel has."""
    if isinstance(kernel, Quantised):
        return kernel.product(x)
    return _out_rows(kernel, x, 1)


def take(kernel: Any, rows: Int[Array, "chosen"]) -> Any:
    """Some outputs of an array or an Int8Kernel, whose first axis they are."""
    return jax.tree.map(lambda leaf: leaf[rows], kernel)


def quantise_int8(kernel: Any) -> tuple[Any, Any]:
    """Values and scales of a float kernel `[.., out, in]`, with its own module's (NumPy's or
    JAX's) arrays in and out: the nearest multiple of the largest magnitude / 127."""
    wide = kernel.astype("float32")
    scales = abs(wide).max(axis=-1) / _INT8_MOST
    scales = scales + (scales == 0)  # rows of zeros
    return (wide / scales[..., None]).round().astype("int8"), scales.astype("float32")


def two_way(params: Any) -> Any:
    """Parameters with the float32 kernels of linear layers held twice, but for those of experts,
    routers and heads; the same ones where that is too much memory, or elsewhere than on CPU,
    whose products alone want it.

    A kernel becomes a `TwoWayKernel`. Where layers of a module read the same input, theirs stay
    as they were, and the module has the transposes of them all in one array, `joined_name`.
    """
    if jax.default_backend() != "cpu":
        return params
    flat = jax.tree_util.tree_flatten_with_path(params)[0]
    chosen = {
        path: array
        for path, array in flat
        if path[-1].key == "kernel"
        and array.ndim == 2
        and array.dtype == jnp.float32
        and not {"experts", "router", "lm_head"} & {key.key for key in path}
    }
    if sum(array.nbytes for array in chosen.values()) > MOST_TWO_WAY_BYTES:
        return params
    return _held_twice(params, {id(array) for array in chosen.values()})


def _held_twice(params: Any, chosen: set[int]) -> Any:
    """Layers that read the same input have their transposes joined, beside them; the others'
    are in their kernels."""

    def kernel(name: str) -> Any:
        layer = params.get(name)
        found = layer.get("kernel") if isinstance(layer, Mapping) else None
        return found if id(found) in chosen else None

    groups = [group for group in _BESIDE if all(kernel(name) is not None for name in group)]
    joined = {name for group in groups for name in group}
    held = {}
    for name, value in params.items():
        if isinstance(value, Mapping):
            held[name] = value if name in joined else _held_twice(value, chosen)
        elif id(value) in chosen:
            held[name] = {"out_in": value, "in_out": _turned([value])}
        else:
            held[name] = value
    for group in groups:
        held[joined_name(group)] = _turned([kernel(name) for name in group])
    return held


@jax.jit
def _turned(kernels: list[Array]) -> Array:
    return jnp.concatenate([kernel.T for kernel in kernels], axis=1)


def form_of(path: tuple[str, ...], weights: WeightForm) -> type[Quantised] | None:
    """The form that a parameter has with `--weights`; None = the array that it was.

    int8: the kernels of linear layers, and of experts, but for routers, which are small and
    choose. mxfp4: those of experts.
    """
    if path[-1] != "kernel" or "router" in path:
        return None
    if weights == "mxfp4":
        return Mxfp4Kernel if "experts" in path else None
    return Int8Kernel if weights == "int8" else None


def abstract(params: Any, weights: WeightForm) -> Any:
    """Shapes and dtypes of the parameters with `--weights`, from those of full ones."""

    def leaf(path: Any, array: jax.ShapeDtypeStruct) -> Any:
        form = form_of(tuple(key.key for key in path), weights)
        *experts, out, inner = (1, 1, *array.shape)[-max(2, array.ndim) :]
        if form is Int8Kernel:
            return {
                "values": jax.ShapeDtypeStruct(array.shape, jnp.int8),
                "scales": jax.ShapeDtypeStruct(array.shape[:-1], jnp.float32),
            }
        if form is Mxfp4Kernel:
            return {
                "packed": jax.ShapeDtypeStruct((*experts, inner // 2, out), jnp.uint8),
                "scales": jax.ShapeDtypeStruct((*experts, inner // BLOCK, out), jnp.uint8),
            }
        return array

    return jax.tree_util.tree_map_with_path(leaf, params)


def axes_like(axes: Any, params: Any) -> Any:
    """Logical axes of parameters of which some are quantised, from those of full ones.

    Args:
      axes: a nested dict of `PartitionSpec`s.
      params: a nested dict of the same paths, or of some of them, of anything; quantised
        kernels are dicts.
    """
    if not isinstance(axes, Mapping):
        form = _form(params)
        return axes if form is None else form.axes(*axes)
    return {name: axes_like(axes[name], params[name]) for name in params if name in axes}
