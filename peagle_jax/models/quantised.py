"""Kernels of linear layers that stay quantised: what they hold, and their product.

In the parameters a quantised kernel is a dict of arrays in the place of one array; which form
it has is read from its keys. All of a network that touches kernels goes through here, so that
no layer knows of forms.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, Int8, UInt8

from pallas_kernels.mxfp4_matmul import BLOCK, dequantise
from peagle_jax.config import WeightForm

_INT8_MOST = 127


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


Quantised = Int8Kernel | Mxfp4Kernel
_FORMS: tuple[type[Quantised], ...] = (Int8Kernel, Mxfp4Kernel)


def _out_rows(kernel: Array, x: Array, inner_axis: int) -> Array:
    contracted = ((inner_axis,), (1,))
    return jax.lax.dot_general(
        kernel, x, (contracted, ((), ())), preferred_element_type=jnp.float32
    )


def of_parameter(value: Any) -> Any:
    """A kernel as the parameters have it: an array, or a dict as the form that its keys name."""
    form = _form(value)
    return value if form is None else form(**value)


def _form(value: Any) -> type[Quantised] | None:
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
