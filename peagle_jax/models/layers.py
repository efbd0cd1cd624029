"""The small parts: linear, norm, embedding, rotary embedding, gated MLP.

One declaration a weight (`declare`) gives its shape, dtype, logical axes and
initialiser; abstract shapes, shardings and random init all come from it.
Activations and weights share one dtype; norms, softmax and logits work in float32.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels.target import current_target
from peagle_jax.config import GateConfig, RopeConfig
from peagle_jax.models import kernel_forms
from peagle_jax.models.kernel_forms import KernelForm, Quantised, TwoWayKernel

INIT_STDDEV = 0.02
# Rows that a matrix product handles at once at no extra cost.
ROW_TILE = 8
_FEW_ROWS = 128  # up to so many, `kernel @ x.T` is faster than `x @ kernel.T` on CPU
normal_init = nn.initializers.normal(INIT_STDDEV)
ones_init = nn.initializers.ones
zeros_init = nn.initializers.zeros


def declare(
    module: nn.Module,
    name: str,
    shape: tuple[int, ...],
    axes: tuple[str | None, ...],
    init: Any,
    dtype: Any,
) -> Any:
    """The one declaration of a weight: `axes` names a logical axis per dimension.

    A kernel that is more than one array comes as what it is, see kernel_forms.py.
    """
    if module.has_variable("params", name):
        value = module.get_variable("params", name)
        if isinstance(value, Mapping):
            return kernel_forms.of_parameter(value)
    return module.param(name, nn.with_logical_partitioning(init, axes), shape, dtype)


class Linear(nn.Module):
    """y = W x + b with W stored `[out, in]`.

    That is PyTorch's layout, so conversion never transposes, and the faster one
    on CPU: `W @ x.T` keeps 2 to 4 rows near the cost of one (docs/design.md).
    """

    out_features: int
    in_features: int
    axes: tuple[str | None, str | None]
    use_bias: bool
    dtype: Any

    def setup(self) -> None:
        shape = (self.out_features, self.in_features)
        self.kernel = declare(self, "kernel", shape, self.axes, normal_init, self.dtype)
        if self.use_bias:
            self.bias = declare(self, "bias", shape[:1], self.axes[:1], zeros_init, self.dtype)

    def __call__(self, x: Float[Array, "*rows in"]) -> Float[Array, "*rows out"]:
        return self.biased(_narrow(x, self.kernel, jnp.dtype(self.dtype)))

    def biased(self, y: Float[Array, "*rows out"]) -> Float[Array, "*rows out"]:
        """A product with the kernel, and the bias where there is one."""
        return y + self.bias if self.use_bias else y


def beside(
    module: nn.Module, linears: Sequence[Linear], x: Float[Array, "*rows in"]
) -> list[Float[Array, "*rows out"]]:
    """What each of `module`'s linear layers `linears` makes of the same input.

    Of few rows in one product, where the module's parameters hold the layers' kernels joined
    (see `kernel_forms.two_way`): each product's start and end cost a CPU time beside its rows.
    """
    flat = x.reshape(-1, x.shape[-1])
    joined = kernel_forms.joined_name([linear.name or "" for linear in linears])
    if not (module.has_variable("params", joined) and kernel_forms.is_few(flat.shape[0])):
        return [linear(x) for linear in linears]
    with jax.named_scope(joined):
        y = kernel_forms.few_rows(flat, module.get_variable("params", joined))
    ends = np.cumsum([linear.out_features for linear in linears])
    parts = jnp.split(y.astype(linears[0].dtype), ends[:-1], axis=-1)
    return [
        linear.biased(part.reshape(*x.shape[:-1], -1))
        for linear, part in zip(linears, parts, strict=True)
    ]


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _narrow(x: Array, kernel: Any, dtype: Any) -> Array:
    """`matmul_out_in` in `dtype`, as its gradient's products are too: plainly differentiated
    they would have one wide side, which holds nothing more and which few machines multiply."""
    return matmul_out_in(x, kernel).astype(dtype)


def _narrow_forward(x: Array, kernel: Any, dtype: Any) -> tuple[Array, tuple[Array, Any]]:
    return _narrow(x, kernel, dtype), (x, kernel)


def _narrow_backward(dtype: Any, kept: tuple[Array, Any], gradient: Array) -> tuple[Array, Any]:
    del dtype
    x, kernel = kept
    rows, inner = gradient.reshape(-1, gradient.shape[-1]), x.reshape(-1, x.shape[-1])
    along_x = _multiply(rows, kernel, (1, 0))
    along_kernel = _multiply(rows, inner, (0, 0))
    return along_x.astype(x.dtype).reshape(x.shape), along_kernel.astype(kernel.dtype)


_narrow.defvjp(_narrow_forward, _narrow_backward)


def matmul_out_in(
    x: Float[Array, "*rows in"], kernel: Float[Array, "out in"] | KernelForm
) -> Float[Array, "*rows out"]:
    """`x @ kernel.T`, accumulated in float32; of few rows computed as `(kernel @ x.T).T`.

    That order is what keeps a verification near the cost of one row on CPU (docs/design.md):
    XLA would turn it around there, so it is told not to. Of many rows it would only be a copy.
    """
    flat = x.reshape(-1, x.shape[-1])
    rows = flat.shape[0]
    if isinstance(kernel, TwoWayKernel):
        if kernel_forms.is_few(rows):
            return kernel_forms.few_rows(flat, kernel.in_out).reshape(
                *x.shape[:-1], kernel.shape[0]
            )
        kernel = kernel.out_in
    if rows > _FEW_ROWS and not isinstance(kernel, Quantised):
        product = _multiply(flat, kernel, (1, 1))
        return product.reshape(*x.shape[:-1], kernel.shape[0])
    product = _product(x, kernel)
    if 1 < rows <= _FEW_ROWS:
        keep = jax.lax.optimization_barrier
        product = jax.lax.platform_dependent(product, cpu=keep, default=lambda y: y)
    return product.T.reshape(*x.shape[:-1], kernel.shape[0])


def _multiply(a: Array, b: Array, contracted: tuple[int, int]) -> Array:
    axes = ((contracted[0],), (contracted[1],))
    return jax.lax.dot_general(a, b, (axes, ((), ())), preferred_element_type=jnp.float32)


def argmax_out_in(
    x: Float[Array, "*rows in"], kernel: Float[Array, "out in"] | Quantised, scale: float = 1.0
) -> Int[Array, "*rows"]:
    """The int32 argmax of `matmul_out_in(x, kernel) * scale`, without turning the product
    to rows first: over a vocabulary that copy is slow (docs/design.md)."""
    scores = _product(x, kernel) * scale
    best = jax.lax.platform_dependent(
        scores, cpu=_argmax_in_two, default=lambda y: jnp.argmax(y, axis=0)
    )
    return best.astype(jnp.int32).reshape(x.shape[:-1])


def _argmax_in_two(scores: Float[Array, "out rows"]) -> Int[Array, "rows"]:
    """The argmax of every row: its maximum, then where that is first. XLA on CPU vectorises each
    of the two, but not one reduction of values and places together."""
    places = jax.lax.broadcasted_iota(jnp.int32, scores.shape, 0)
    last = scores.shape[0] - 1
    return jnp.min(jnp.where(scores == jnp.max(scores, axis=0), places, last), axis=0)


def _product(x: Float[Array, "*rows in"], kernel: Float[Array, "out in"] | Quantised) -> Array:
    """`kernel @ x.T` as float32 `[out, number of rows]`.

    5 to 31 rows are padded to whole tiles: on CPU these are faster, and other platforms pad to
    a tile anyway. One row is on TPU: alone it is multiplied by the vector units, for which the
    compiler estimates three times as long as for a tile by the matrix units.
    """
    flat = x.reshape(-1, x.shape[-1])
    rows = flat.shape[0]
    if ROW_TILE // 2 < rows < 4 * ROW_TILE or (rows == 1 and _for_tpu()):
        flat = jnp.pad(flat, ((0, -rows % ROW_TILE), (0, 0)))
    return kernel_forms.product(kernel, flat)[:, :rows]


def _for_tpu() -> bool:
    return current_target().platform == "tpu"


class RMSNorm(nn.Module):
    """x / rms(x) * scale (arXiv 1910.07467), the statistics in float32."""

    size: int
    eps: float
    dtype: Any

    @nn.compact
    def __call__(self, x: Float[Array, "*rows size"]) -> Float[Array, "*rows size"]:
        scale = declare(self, "scale", (self.size,), (None,), ones_init, self.dtype)
        wide = x.astype(jnp.float32)
        variance = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
        return (wide * jax.lax.rsqrt(variance + self.eps)).astype(self.dtype) * scale


class Embed(nn.Module):
    """A table of token vectors, `[vocab, hidden]`."""

    vocab_size: int
    hidden_size: int
    dtype: Any

    def setup(self) -> None:
        shape = (self.vocab_size, self.hidden_size)
        self.embedding = declare(
            self, "embedding", shape, ("vocab", "embed"), normal_init, self.dtype
        )

    def __call__(self, tokens: Int[Array, "*rows"]) -> Float[Array, "*rows hidden"]:
        return self.embedding[tokens]


def gated(
    gate: Float[Array, "*rows wide"], up: Float[Array, "*rows wide"], config: GateConfig
) -> Float[Array, "*rows wide"]:
    """g * sigmoid(alpha * g) * (u + offset), bounded first where the config says so."""
    if config.limit is not None:
        gate = jnp.minimum(gate, config.limit)
        up = jnp.clip(up, -config.limit, config.limit)
    if config.up_offset:
        up = up + config.up_offset
    return gate * nn.sigmoid(config.alpha * gate) * up


class GatedMLP(nn.Module):
    """down(gated(gate(x), up(x))), the feed-forward of Llama and its kin."""

    hidden_size: int
    intermediate_size: int
    use_bias: bool
    gate: GateConfig
    dtype: Any

    @nn.compact
    def __call__(self, x: Float[Array, "*rows hidden"]) -> Float[Array, "*rows hidden"]:
        def linear(out: int, inner: int, axes: tuple[str, str], name: str) -> Linear:
            return Linear(out, inner, axes, self.use_bias, self.dtype, name=name)

        wide, narrow = self.intermediate_size, self.hidden_size
        names = ("gate_proj", "up_proj")
        gate, up = beside(self, [linear(wide, narrow, ("mlp", "embed"), name) for name in names], x)
        activation = gated(gate, up, self.gate)
        if math.prod(x.shape[:-1]) <= _FEW_ROWS and _for_tpu():
            # XLA would fuse up_proj into down_proj where few rows fill whole tiles, which by its
            # own estimate takes a third longer than one after the other.
            activation = jax.lax.optimization_barrier(activation)
        return linear(narrow, wide, ("embed", "mlp"), "down_proj")(activation)


def rope_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Inverse frequencies in radians a position, float32 `[head_dim / 2]`.

    `linear` divides all of them by `factor`. `llama3` and `yarn` divide the slow ones, keep
    the fast ones and blend between: by how often a dimension turns over the original
    context in Llama 3.1's rule, by its index in YaRN's (arXiv 2309.00071).
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    inverse = (np.float32(1.0) / np.power(np.float32(rope.theta), exponents)).astype(np.float32)
    if rope.kind == "default":
        return inverse
    if rope.kind == "llama3":
        rotations = rope.original_max_positions * inverse / (2 * math.pi)
        span = rope.high_freq_factor - rope.low_freq_factor
        keep = np.clip((rotations - rope.low_freq_factor) / span, 0.0, 1.0)
    elif rope.kind == "yarn":
        first, last = _yarn_bounds(rope, head_dim)
        keep = 1 - np.clip((np.arange(head_dim // 2) - first) / (last - first), 0.0, 1.0)
    else:
        keep = np.zeros_like(inverse)
    return (keep * inverse + (1 - keep) * inverse / rope.factor).astype(np.float32)


def _yarn_bounds(rope: RopeConfig, head_dim: int) -> tuple[float, float]:
    """The dimensions that turn `beta_fast` and `beta_slow` times over the original context."""

    def dimension(rotations: float) -> float:
        base = rope.original_max_positions / (rotations * 2 * math.pi)
        return head_dim * math.log(base) / (2 * math.log(rope.theta))

    first, last = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0.0), min(last, head_dim - 1.0)
    return float(first), float(last + 0.001 if first == last else last)


def rope_tables(
    rope: RopeConfig, head_dim: int, positions: Int[Array, "*rows"]
) -> tuple[Float[Array, "*rows half"], Float[Array, "*rows half"]]:
    """cos and sin of every position's angles, float32 `[.., head_dim / 2]`.

    Computed from the positions themselves, so they go on past any table's end.
    """
    angles = positions[..., None].astype(jnp.float32) * rope_frequencies(rope, head_dim)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    if rope.attention_factor != 1.0:
        cos, sin = cos * rope.attention_factor, sin * rope.attention_factor
    return cos, sin


def rotate(
    x: Float[Array, "batch rows heads dim"],
    cos: Float[Array, "batch rows half"],
    sin: Float[Array, "batch rows half"],
) -> Float[Array, "batch rows heads dim"]:
    """Rotary embedding on the two halves of each head (Hugging Face's pairing)."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)
