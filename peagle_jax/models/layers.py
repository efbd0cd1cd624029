"""The small parts: linear, norm, embedding, rotary embedding, gated MLP.

One declaration a weight (`declare`) gives its shape, dtype, logical axes and
initialiser; abstract shapes, shardings and random init all come from it.
Activations and weights share one dtype; norms, softmax and logits work in float32.
"""

from __future__ import annotations

import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from peagle_jax.config import RopeConfig

INIT_STDDEV = 0.02
# Rows that a matrix product handles at once at no extra cost.
ROW_TILE = 8
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
) -> Array:
    """The one declaration of a weight: `axes` names a logical axis per dimension."""
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
        y = matmul_out_in(x, self.kernel).astype(self.dtype)
        return y + self.bias if self.use_bias else y


def matmul_out_in(
    x: Float[Array, "*rows in"], kernel: Float[Array, "out in"]
) -> Float[Array, "*rows out"]:
    """`x @ kernel.T`, computed as `(kernel @ x.T).T`, accumulated in float32.

    2 to 15 rows are padded to a multiple of ROW_TILE: on CPU whole tiles are what keeps
    a verification near the cost of one row (docs/design.md), and other platforms pad to
    a tile anyway.
    """
    return _product(x, kernel).T.reshape(*x.shape[:-1], kernel.shape[0])


def argmax_out_in(
    x: Float[Array, "*rows in"], kernel: Float[Array, "out in"], scale: float = 1.0
) -> Int[Array, "*rows"]:
    """The int32 argmax of `matmul_out_in(x, kernel) * scale`, without turning the product
    to rows first: over a vocabulary that copy costs as much as reading the head's weights."""
    best = jnp.argmax(_product(x, kernel) * scale, axis=0)
    return best.astype(jnp.int32).reshape(x.shape[:-1])


def _product(x: Float[Array, "*rows in"], kernel: Float[Array, "out in"]) -> Array:
    """`kernel @ x.T` as float32 `[out, number of rows]`."""
    flat = x.reshape(-1, x.shape[-1])
    rows = flat.shape[0]
    if 1 < rows < 2 * ROW_TILE:
        flat = jnp.pad(flat, ((0, -rows % ROW_TILE), (0, 0)))
    y = jax.lax.dot_general(
        kernel, flat, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
    )
    return y[:, :rows]


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


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), the Llama feed-forward (arXiv 2002.05202)."""

    hidden_size: int
    intermediate_size: int
    use_bias: bool
    dtype: Any

    @nn.compact
    def __call__(self, x: Float[Array, "*rows hidden"]) -> Float[Array, "*rows hidden"]:
        def linear(out: int, inner: int, axes: tuple[str, str], name: str) -> Linear:
            return Linear(out, inner, axes, self.use_bias, self.dtype, name=name)

        wide, narrow = self.intermediate_size, self.hidden_size
        gate = linear(wide, narrow, ("mlp", "embed"), "gate_proj")(x)
        up = linear(wide, narrow, ("mlp", "embed"), "up_proj")(x)
        return linear(narrow, wide, ("embed", "mlp"), "down_proj")(nn.silu(gate) * up)


def rope_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Inverse frequencies in radians a position, float32 `[head_dim / 2]`.

    `llama3` keeps short wavelengths, divides long ones by `factor` and blends
    between (Llama 3.1's rule); `linear` divides all of them.
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    inverse = (np.float32(1.0) / np.power(np.float32(rope.theta), exponents)).astype(np.float32)
    if rope.kind == "linear":
        return inverse / np.float32(rope.factor)
    if rope.kind == "llama3":
        wavelength = 2 * math.pi / inverse
        rotations = rope.original_max_positions / wavelength
        span = rope.high_freq_factor - rope.low_freq_factor
        keep = np.clip((rotations - rope.low_freq_factor) / span, 0.0, 1.0)
        return (keep * inverse + (1 - keep) * inverse / rope.factor).astype(np.float32)
    return inverse


def rope_tables(
    rope: RopeConfig, head_dim: int, positions: Int[Array, "*rows"]
) -> tuple[Float[Array, "*rows half"], Float[Array, "*rows half"]]:
    """cos and sin of every position's angles, float32 `[.., head_dim / 2]`.

    Computed from the positions themselves, so they go on past any table's end.
    """
    angles = positions[..., None].astype(jnp.float32) * rope_frequencies(rope, head_dim)
    return jnp.cos(angles), jnp.sin(angles)


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
