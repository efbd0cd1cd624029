"""The target: ONE decoder for every family; what differs is config data."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from peagle_jax.config import ModelConfig
from peagle_jax.models.attention import Attend, cached_attends
from peagle_jax.models.block import Block, run_block
from peagle_jax.models.cache import KVCache
from peagle_jax.models.kernel_forms import Quantised
from peagle_jax.models.layers import (
    Embed,
    Linear,
    RMSNorm,
    argmax_out_in,
    matmul_out_in,
    rope_tables,
)
from peagle_jax.models.paged_cache import Cache


@struct.dataclass
class DecoderOutput:
    """What a pass over some rows gives.

    hidden: after the final norm, ready for `logits`.
    features: the residual stream at the asked depths, concatenated; the final
        hidden state where none was asked.
    cache: with the rows written.
    """

    hidden: Float[Array, "batch rows hidden"]
    features: Float[Array, "batch rows features"]
    cache: Cache


class Decoder(nn.Module):
    """A decoder-only transformer, used as `Decoder(config, dtype).apply({"params": p}, ...)`."""

    config: ModelConfig
    dtype: Any = jnp.float32

    def setup(self) -> None:
        c = self.config
        block = c.block
        self.embed_tokens = Embed(c.vocab_size, block.hidden_size, self.dtype)
        self.layers = [Block(block, self.dtype, block.experts(i)) for i in range(block.num_layers)]
        self.norm = RMSNorm(block.hidden_size, block.rms_norm_eps, self.dtype)
        if not c.tie_embeddings:
            self.lm_head = Linear(
                c.vocab_size, block.hidden_size, ("vocab", "embed"), False, self.dtype
            )

    def __call__(
        self,
        tokens: Int[Array, "batch rows"],
        start: Int[Array, "batch"],
        cache: Cache,
        aux_layer_ids: tuple[int, ...] = (),
        counts: Int[Array, "batch"] | None = None,
        tree: Bool[Array, "batch rows rows"] | None = None,
    ) -> DecoderOutput:
        """Rows of sequence b stand at positions `start[b], start[b] + 1, ...`; the first
        `counts[b]` are real (None = all), the rest padding. With a `tree` rows are branches:
        a row stands as many positions past `start[b]` as it sees others of them, and row j's
        keys are in the cache at position `start[b] + j` all the same (see `LayerCache.moved`).

        `aux_layer_ids`: the depths handed to a drafter; id l is the residual
        stream after l layers (0 = the embeddings).
        """
        past = jnp.arange(tokens.shape[1]) if tree is None else jnp.sum(tree, axis=-1) - 1
        positions = start[:, None] + past
        attends = cached_attends(self.config.block, cache, start, counts, tree)
        hidden, features, written = self.run_layers(tokens, positions, attends, aux_layer_ids)
        return DecoderOutput(hidden, features, cache.with_layers(written))

    def run_layers(
        self,
        tokens: Int[Array, "batch rows"],
        positions: Int[Array, "batch rows"],
        attends: Sequence[Attend],
        aux_layer_ids: tuple[int, ...] = (),
    ) -> tuple[Float[Array, "batch rows hidden"], Float[Array, "batch rows features"], list[Any]]:
        """A pass with an Attend for each layer: the seam that training uses.

        Returns `hidden` and `features` as in DecoderOutput, and what the Attends carry.
        """
        block = self.config.block
        rope = rope_tables(block.rope, block.head_dim, positions)
        x = self.embed_tokens(tokens)
        streams, carried = [x], []
        for index, (layer, attend) in enumerate(zip(self.layers, attends, strict=True)):
            with jax.named_scope(f"layer_{index}"):
                x, layer_carried = run_block(layer, x, rope, attend)
            streams.append(x)
            carried.append(layer_carried)
        hidden = self.norm(x)
        chunks = [streams[i] for i in aux_layer_ids] or [hidden]
        return hidden, jnp.concatenate(chunks, axis=-1), carried

    def logits(self, hidden: Float[Array, "*rows hidden"]) -> Float[Array, "*rows vocab"]:
        """Next-token logits in float32 of normalised hidden states."""
        return matmul_out_in(hidden, self._head())

    def best(self, hidden: Float[Array, "*rows hidden"]) -> Int[Array, "*rows"]:
        """The argmax of `logits`."""
        return argmax_out_in(hidden, self._head())

    def _head(self) -> Float[Array, "vocab hidden"] | Quantised:
        return self.embed_tokens.embedding if self.config.tie_embeddings else self.lm_head.kernel


def init(config: ModelConfig, key: Array, dtype: Any = jnp.float32) -> dict[str, Any]:
    """Random parameters, a nested dict of plain arrays."""
    return nn.unbox(_init_boxed(config, key, dtype))


def abstract_params(config: ModelConfig, dtype: Any = jnp.float32) -> dict[str, Any]:
    """The parameters' shapes and dtypes: the same tree of `jax.ShapeDtypeStruct`.

    Of each kind of layer one is traced: every loading of a checkpoint waits for this.
    """
    return _of_all_layers(config, lambda few: init(few, jax.random.key(0), dtype))


def logical_axes(config: ModelConfig) -> dict[str, Any]:
    """The same tree of `PartitionSpec`s over logical axis names."""
    boxed = _of_all_layers(config, lambda few: _init_boxed(few, jax.random.key(0), jnp.float32))
    return nn.get_partition_spec(boxed)


def _of_all_layers(config: ModelConfig, init: Callable[[ModelConfig], Any]) -> dict[str, Any]:
    """The abstract result of `init(config)`, traced for one layer of each kind.

    Where layers differ in anything that has a shape, it is in their experts.
    """
    block = config.block
    kinds = [block.experts(i) for i in range(block.num_layers)]
    each = list(dict.fromkeys(kinds))
    few = dataclasses.replace(
        block,
        num_layers=len(each),
        windows=(),
        dense_layers=(each.index(None),) if block.moe and None in each else (),
    )
    params = jax.eval_shape(lambda: init(dataclasses.replace(config, block=few)))
    layers = [params.pop(f"layers_{i}") for i in range(len(each))]
    copies = (jax.tree.map(lambda x: x, layers[each.index(kind)]) for kind in kinds)
    return params | {f"layers_{i}": layer for i, layer in enumerate(copies)}


def _init_boxed(config: ModelConfig, key: Array, dtype: Any) -> dict[str, Any]:
    def touch_all(module: Decoder) -> Array:
        cache = KVCache.init(config.block, 1, 1, dtype)
        zero = jnp.zeros((1,), jnp.int32)
        return module.logits(module(zero[:, None], zero, cache).hidden)

    return Decoder(config, dtype).init(key, method=touch_all)["params"]
