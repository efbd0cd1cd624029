"""Mixtures of experts: a token's feed-forward is a weighted sum of a few of many.

A verification sends K+1 tokens a sequence through the router. Tokens are sorted by expert and
every one reaches each expert it chose, whatever the batch: there is no capacity to overflow.

Few tokens are worked off in tiles: one expert's tokens a turn, so that the weights of the
experts that were chosen are read, once, and no others. On TPU many tokens go through a grouped
matrix product (`jax.lax.ragged_dot_general`); where XLA makes products over all experts of
that, they go through tiles too. Experts that are packed (kernel_forms.py) go through a kernel that
unpacks them as it multiplies, where the device has one.

Under a mesh (`jax.set_mesh`) with the axes `expert` or `model` each device works on its own
experts, or its own part of them, for all tokens, and one sum over the devices ends the layer.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from pallas_kernels.mxfp4_matmul import mxfp4_matmul, own_kernel, running_sum
from peagle_jax.config import GateConfig, MoEConfig
from peagle_jax.models.kernel_forms import Mxfp4Kernel, Quantised
from peagle_jax.models.layers import (
    ROW_TILE,
    declare,
    gated,
    matmul_out_in,
    normal_init,
    zeros_init,
)
from peagle_jax.sharding import EXPERT, MODEL

_FEW_PAIRS = 512  # up to so many tokens' choices are put in order without sorting
# Tokens of one expert that are worked off at a time: enough to hide the reading of its weights.
TILE = 128

_OUT_IN = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2,)), ((), ())),
    lhs_ragged_dimensions=[0],
    rhs_group_dimensions=[0],
)


class ExpertLinear(NamedTuple):
    """One linear layer of every expert: `y = kernel[e] x + bias[e]`."""

    kernel: Float[Array, "experts out in"] | Quantised
    bias: Float[Array, "experts out"] | None


class ExpertParams(NamedTuple):
    """Every expert's gated feed-forward."""

    gate: ExpertLinear
    up: ExpertLinear
    down: ExpertLinear


class Router(nn.Module):
    """Which experts a token takes, best first, and their weights in float32."""

    config: MoEConfig
    hidden_size: int
    dtype: Any

    @nn.compact
    def __call__(
        self, x: Float[Array, "*rows hidden"]
    ) -> tuple[Int[Array, "*rows chosen"], Float[Array, "*rows chosen"]]:
        c = self.config
        shape = (c.num_experts, self.hidden_size)
        kernel = declare(self, "kernel", shape, (None, "embed"), normal_init, self.dtype)
        scores = matmul_out_in(x, kernel)
        if c.router_bias:
            scores += declare(self, "bias", shape[:1], (None,), zeros_init, self.dtype)
        if c.scores == "softmax_top_k":
            weights, chosen = jax.lax.top_k(jax.nn.softmax(scores, axis=-1), c.experts_per_token)
            if c.normalize:
                weights /= jnp.sum(weights, axis=-1, keepdims=True)
            return chosen, weights
        best, chosen = jax.lax.top_k(scores, c.experts_per_token)
        return chosen, jax.nn.softmax(best, axis=-1)


class Linears(nn.Module):
    """Declares an ExpertLinear."""

    shape: tuple[int, int, int]
    axes: tuple[str, str, str]
    use_bias: bool
    dtype: Any

    @nn.compact
    def __call__(self) -> ExpertLinear:
        bias = None
        kernel = declare(self, "kernel", self.shape, self.axes, normal_init, self.dtype)
        if self.use_bias:
            bias = declare(self, "bias", self.shape[:2], self.axes[:2], zeros_init, self.dtype)
        return ExpertLinear(kernel, bias)


class Experts(nn.Module):
    """The weighted sum of each token's chosen experts."""

    config: MoEConfig
    hidden_size: int
    gate: GateConfig
    dtype: Any

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "*rows hidden"],
        chosen: Int[Array, "*rows chosen"],
        weights: Float[Array, "*rows chosen"],
    ) -> Float[Array, "*rows hidden"]:
        c = self.config

        def linears(out: int, inner: int, axes: tuple[str, str], name: str) -> ExpertLinear:
            shape = (c.num_experts, out, inner)
            return Linears(shape, ("experts", *axes), c.expert_bias, self.dtype, name=name)()

        wide, narrow = c.intermediate_size, self.hidden_size
        experts = ExpertParams(
            gate=linears(wide, narrow, ("mlp", "embed"), "gate_proj"),
            up=linears(wide, narrow, ("mlp", "embed"), "up_proj"),
            down=linears(narrow, wide, ("embed", "mlp"), "down_proj"),
        )
        tokens, choices, shares = (a.reshape(-1, a.shape[-1]) for a in (x, chosen, weights))
        mixed = mix_on_mesh(tokens, choices, shares, experts, self.gate)
        return mixed.reshape(x.shape).astype(self.dtype)


class MoE(nn.Module):
    """The feed-forward of a sparse layer."""

    config: MoEConfig
    hidden_size: int
    gate: GateConfig
    dtype: Any

    def setup(self) -> None:
        self.router = Router(self.config, self.hidden_size, self.dtype)
        self.experts = Experts(self.config, self.hidden_size, self.gate, self.dtype)

    def __call__(self, x: Float[Array, "*rows hidden"]) -> Float[Array, "*rows hidden"]:
        return self.experts(x, *self.router(x))


def mix_on_mesh(
    x: Float[Array, "tokens hidden"],
    chosen: Int[Array, "tokens chosen"],
    weights: Float[Array, "tokens chosen"],
    experts: ExpertParams,
    gate: GateConfig,
) -> Float[Array, "tokens hidden"]:
    """`mix`, the experts split over the mesh's axis `expert`, each of them over `model`."""
    sizes = jax.sharding.get_abstract_mesh().shape
    # By hand over axes of one device too: a kernel is refused wherever the compiler might split.
    expert, model = (axis if axis in sizes else None for axis in (EXPERT, MODEL))
    axes = {axis for axis in (expert, model) if axis is not None}
    if not axes:
        return mix(x, chosen, weights, experts, gate)

    def of_device(x: Array, chosen: Array, weights: Array, own: ExpertParams) -> Array:
        count = own.gate.kernel.shape[0]
        if expert:
            chosen = chosen - jax.lax.axis_index(expert) * count
            chosen = jnp.where((chosen >= 0) & (chosen < count), chosen, count)
        if model and own.down.bias is not None:  # once, not from every part of an expert
            bias = own.down.bias * (jax.lax.axis_index(model) == 0)
            own = own._replace(down=own.down._replace(bias=bias))
        return jax.lax.psum(mix(x, chosen, weights, own, gate), tuple(sorted(axes)))

    def split(linear: ExpertLinear, *axes: str | None) -> ExpertLinear:
        kernel: Any = PartitionSpec(expert, *axes)
        bias: Any = PartitionSpec(expert, axes[0])
        if isinstance(linear.kernel, Quantised):
            form: Any = type(linear.kernel)
            kernel = form(**form.axes(*kernel))
        return ExpertLinear(kernel, None if linear.bias is None else bias)

    specs = ExpertParams(
        gate=split(experts.gate, model, None),
        up=split(experts.up, model, None),
        down=split(experts.down, None, model),
    )
    whole = PartitionSpec()
    run = jax.shard_map(
        of_device,
        in_specs=(whole, whole, whole, specs),
        out_specs=whole,
        axis_names=axes,
        check_vma=False,
    )
    return run(x, chosen, weights, experts)


def mix(
    x: Float[Array, "tokens hidden"],
    chosen: Int[Array, "tokens chosen"],
    weights: Float[Array, "tokens chosen"],
    experts: ExpertParams,
    gate: GateConfig,
) -> Float[Array, "tokens hidden"]:
    """Each token's weighted sum over its chosen experts, in float32.

    `chosen` values past the last expert stand for experts that are elsewhere: they add 0.
    """
    tokens, per_token = chosen.shape
    count = experts.gate.kernel.shape[0]
    of_pair = chosen.reshape(-1)
    order, place = by_expert(of_pair)
    sizes = jnp.sum(of_pair[:, None] == jnp.arange(count), axis=0, dtype=jnp.int32)
    rows = x[order // per_token]
    tile = min(-(-tokens // ROW_TILE) * ROW_TILE, TILE)
    kernel = experts.gate.kernel
    if isinstance(kernel, Mxfp4Kernel) and own_kernel(x.dtype.name):
        out = grouped(rows, sizes, experts, gate=gate)
    elif tokens <= TILE or isinstance(kernel, Quantised):
        # Of a quantised kernel one expert at a time is ever dequantised.
        out = in_tiles(rows, sizes, experts, gate=gate, tile=tile)
    else:
        out = jax.lax.platform_dependent(
            rows,
            sizes,
            experts,
            tpu=functools.partial(grouped, gate=gate),
            default=functools.partial(in_tiles, gate=gate, tile=tile),
        )
    by_token = out[place].reshape(tokens, per_token, -1)
    by_token = jnp.where((chosen < count)[..., None], by_token, 0.0)
    return jnp.sum(by_token * weights[..., None], axis=1)


def by_expert(of_pair: Int[Array, "pairs"]) -> tuple[Int[Array, "pairs"], Int[Array, "pairs"]]:
    """A stable order by expert, and where in it each pair stands.

    Of few pairs by comparing all with all, which is one operation where sorting is many.
    """
    pairs = of_pair.shape[0]
    if pairs > _FEW_PAIRS:
        order = jnp.argsort(of_pair)
        return order, jnp.argsort(order)
    index = jnp.arange(pairs)
    mine, other = of_pair[:, None], of_pair[None, :]
    before = (other < mine) | ((other == mine) & (index[None, :] < index[:, None]))
    place = jnp.sum(before, axis=1, dtype=jnp.int32)
    order = jnp.sum(jnp.where(place[None, :] == index[:, None], index[None, :], 0), axis=1)
    return order, place


def in_tiles(
    rows: Float[Array, "pairs hidden"],
    sizes: Int[Array, "experts"],
    experts: ExpertParams,
    *,
    gate: GateConfig,
    tile: int,
) -> Float[Array, "pairs hidden"]:
    """Every row through its expert, `tile` rows of one expert at a time, in float32.

    Args:
      rows: sorted by expert; `sizes[e]` of them are expert e's. Rows past their sum come out
        as anything finite.
    """
    tiles = -(-sizes // tile)
    ends = jnp.cumsum(tiles)
    first_rows = jnp.cumsum(sizes) - sizes
    padded = jnp.pad(rows, ((0, tile), (0, 0)))

    def one(linear: ExpertLinear, expert: Array, x: Array) -> Array:
        own = jax.tree.map(
            lambda part: jax.lax.dynamic_index_in_dim(part, expert, keepdims=False), linear
        )
        y = matmul_out_in(x, own.kernel)
        return y if own.bias is None else y + own.bias

    def turn(index: Array, out: Array) -> Array:
        expert = jnp.sum(ends <= index)
        at = first_rows[expert] + (index - ends[expert] + tiles[expert]) * tile
        x = jax.lax.dynamic_slice_in_dim(padded, at, tile)
        wide = gated(one(experts.gate, expert, x), one(experts.up, expert, x), gate)
        y = one(experts.down, expert, wide.astype(x.dtype))
        # Rows of the next experts that this writes are written again in their own turn.
        return jax.lax.dynamic_update_slice_in_dim(out, y, at, axis=0)

    out = jnp.zeros(padded.shape, jnp.float32)
    return jax.lax.fori_loop(0, ends[-1], turn, out)[: rows.shape[0]]


def grouped(
    rows: Float[Array, "pairs hidden"],
    sizes: Int[Array, "experts"],
    experts: ExpertParams,
    *,
    gate: GateConfig,
) -> Float[Array, "pairs hidden"]:
    """`in_tiles` as grouped matrix products over all rows."""
    ends = running_sum(sizes)
    row = jnp.arange(rows.shape[0])[:, None]
    own = ((row >= ends - sizes) & (row < ends)).astype(jnp.float32)

    def biases(linear: ExpertLinear) -> Array | float:
        """Each row's: a product, exact as it is of ones, where a TPU looks rows up in turn."""
        if linear.bias is None:
            return 0.0
        wide = linear.bias.astype(jnp.float32)
        return jnp.dot(own, wide, precision=jax.lax.Precision.HIGHEST)

    def each(linear: ExpertLinear, x: Array) -> Array:
        kernel: Any = linear.kernel
        if isinstance(kernel, Mxfp4Kernel):
            y = mxfp4_matmul(x, sizes, kernel.packed, kernel.scales)
        else:
            y = jax.lax.ragged_dot_general(
                x, kernel, sizes, _OUT_IN, preferred_element_type=jnp.float32
            )
        return y + biases(linear)

    wide = gated(each(experts.gate, rows), each(experts.up, rows), gate)
    return each(experts.down, wide.astype(rows.dtype))
