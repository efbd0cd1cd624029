"""EAGLE-3 and P-EAGLE drafters (arXiv 2503.01840, arXiv 2602.01469): one network.

A row at position p pairs the embedding of the *next* token x_{p+1} with the
target's feature f_p of this position and predicts x_{p+2}. A parallel drafter
(P-EAGLE) also takes mask rows: the mask token with one learned feature for all.
How rows are laid out in a draft step is decided in decoding/speculate.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from peagle_jax.config import BlockConfig, DrafterConfig
from peagle_jax.models import kernel_forms
from peagle_jax.models.attention import Attend, Attention, cached_attends
from peagle_jax.models.block import Block, Rope
from peagle_jax.models.cache import KVCache
from peagle_jax.models.kernel_forms import Quantised
from peagle_jax.models.layers import (
    Embed,
    GatedMLP,
    Linear,
    RMSNorm,
    argmax_out_in,
    declare,
    matmul_out_in,
    normal_init,
    rope_tables,
)
from peagle_jax.models.paged_cache import Cache


class FirstBlock(nn.Module):
    """Layer 0: attends over `[norm(embedding), norm(feature)]`, twice the width.

    Its residual is the feature, before the norm or (`norm_before_residual`) after it.
    """

    config: BlockConfig
    norm_before_residual: bool
    dtype: Any

    def setup(self) -> None:
        c = self.config
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps, self.dtype)
        self.hidden_norm = RMSNorm(c.hidden_size, c.rms_norm_eps, self.dtype)
        self.self_attn = Attention(c, 2 * c.hidden_size, self.dtype)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps, self.dtype)
        self.mlp = GatedMLP(c.hidden_size, c.intermediate_size, c.mlp_bias, c.gate, self.dtype)

    def __call__(
        self,
        embeddings: Float[Array, "batch rows hidden"],
        features: Float[Array, "batch rows hidden"],
        rope: Rope,
        attend: Attend,
    ) -> tuple[Float[Array, "batch rows hidden"], Any]:
        normed = self.hidden_norm(features)
        residual = normed if self.norm_before_residual else features
        pair = jnp.concatenate([self.input_layernorm(embeddings), normed], axis=-1)
        out, carried = self.self_attn(pair, rope, attend)
        x = residual + out
        return x + self.mlp(self.post_attention_layernorm(x)), carried


class Drafter(nn.Module):
    """A drafter, used as `Drafter(config, dtype).apply({"params": p}, ..., method=...)`.

    Where the checkpoint has no embedding or head of its own the target's array is
    passed in (`lent`): parameters stay plain, nothing is copied.
    """

    config: DrafterConfig
    dtype: Any = jnp.float32

    def setup(self) -> None:
        c = self.config
        block = c.block
        size, eps = block.hidden_size, block.rms_norm_eps
        if c.own_embedding:
            self.embed_tokens = Embed(c.vocab_size, size, self.dtype)
        if c.norm_before_fc:
            self.input_norm = RMSNorm(c.feature_size, eps, self.dtype)
        if c.fc_norm:
            self.fc_norm = [
                RMSNorm(c.target_hidden_size, eps, self.dtype) for _ in range(c.num_chunks)
            ]
        if c.has_fc:
            self.fc = Linear(size, c.feature_size, ("embed", None), False, self.dtype)
        if c.parallel:
            self.mask_hidden = declare(
                self, "mask_hidden", (c.feature_size,), (None,), normal_init, self.dtype
            )
        first = FirstBlock(block, c.norm_before_residual, self.dtype)
        rest = [Block(block, self.dtype) for _ in range(1, block.num_layers)]
        layers: list[Any] = [first, *rest]
        self.layers = layers
        self.norm = RMSNorm(size, eps, self.dtype)
        if c.own_head:
            self.lm_head = Linear(c.draft_vocab_size, size, ("vocab", "embed"), False, self.dtype)
        if c.draft_vocab_size < c.vocab_size:
            self.draft_to_target = declare(
                self, "draft_to_target", (c.draft_vocab_size,), (None,), _first_ids, jnp.int32
            )

    def project(self, features: Float[Array, "*rows raw"]) -> Float[Array, "*rows hidden"]:
        """Raw target features to the drafter's width: norms and `fc`."""
        c = self.config
        if c.norm_before_fc:
            features = self.input_norm(features)
        if c.fc_norm:
            chunks = jnp.split(features, c.num_chunks, axis=-1)
            normed = [norm(chunk) for norm, chunk in zip(self.fc_norm, chunks, strict=True)]
            features = jnp.concatenate(normed, axis=-1)
        return self.fc(features) if c.has_fc else features

    def mask_feature(self) -> Float[Array, "hidden"]:
        """The feature of every mask row: the learned `mask_hidden`, projected."""
        return self.project(self.mask_hidden[None])[0]

    def embed(
        self,
        tokens: Int[Array, "*rows"],
        lent: Float[Array, "vocab hidden"] | None = None,
    ) -> Float[Array, "*rows hidden"]:
        """Token vectors from the drafter's own table, else from the target's."""
        if self.config.own_embedding:
            return self.embed_tokens(tokens)
        assert lent is not None
        return lent[tokens].astype(self.dtype)

    def __call__(
        self,
        embeddings: Float[Array, "batch rows hidden"],
        features: Float[Array, "batch rows hidden"],
        start: Int[Array, "batch"],
        cache: Cache,
        counts: Int[Array, "batch"] | None = None,
    ) -> tuple[Float[Array, "batch rows hidden"], Cache]:
        """Rows at positions `start[b] ..`, `features` already projected; `counts` as in
        `CachedAttend`.

        Returns the residual stream before the final norm, and the cache.
        """
        positions = start[:, None] + jnp.arange(embeddings.shape[1])
        attends = cached_attends(self.config.block, cache, start, counts)
        stream, written = self.run_layers(embeddings, features, positions, attends)
        return stream, cache.with_layers(written)

    def run_layers(
        self,
        embeddings: Float[Array, "batch rows hidden"],
        features: Float[Array, "batch rows hidden"],
        positions: Int[Array, "batch rows"],
        attends: Sequence[Attend],
    ) -> tuple[Float[Array, "batch rows hidden"], list[Any]]:
        """The layers alone, an Attend for each: the seam that training uses."""
        block = self.config.block
        rope = rope_tables(block.rope, block.head_dim, positions)
        with jax.named_scope("draft_layer_0"):
            x, first = self.layers[0](embeddings, features, rope, attends[0])
        carried = [first]
        for index, layer in enumerate(self.layers[1:], start=1):
            with jax.named_scope(f"draft_layer_{index}"):
                x, layer_carried = layer(x, rope, attends[index])
            carried.append(layer_carried)
        return x, carried

    def next_feature(self, stream: Float[Array, "*rows hidden"]) -> Float[Array, "*rows hidden"]:
        """What an autoregressive drafter feeds back as the next row's feature."""
        return self.norm(stream) if self.config.norm_output else stream

    def logits(
        self,
        stream: Float[Array, "*rows hidden"],
        lent: Float[Array, "vocab hidden"] | Quantised | None = None,
    ) -> Float[Array, "*rows draft_vocab"]:
        """Float32 logits over the draft vocabulary of a residual stream."""
        return matmul_out_in(self.norm(stream), self._head(lent)) * self.config.logit_scale

    def best(
        self,
        stream: Float[Array, "*rows hidden"],
        lent: Float[Array, "vocab hidden"] | Quantised | None = None,
    ) -> Int[Array, "*rows"]:
        """The argmax of `logits`: draft-vocabulary ids."""
        return argmax_out_in(self.norm(stream), self._head(lent), self.config.logit_scale)

    def _head(
        self, lent: Float[Array, "vocab hidden"] | Quantised | None
    ) -> Float[Array, "draft_vocab hidden"] | Quantised:
        if self.config.own_head:
            return self.lm_head.kernel
        assert lent is not None
        if self.config.draft_vocab_size < self.config.vocab_size:
            lent = kernel_forms.take(lent, self.draft_to_target)
        return lent if isinstance(lent, Quantised) else lent.astype(self.dtype)

    def target_ids(self, draft_ids: Int[Array, "*rows"]) -> Int[Array, "*rows"]:
        """The target's token ids of draft-vocabulary ids."""
        if self.config.draft_vocab_size == self.config.vocab_size:
            return draft_ids
        return self.draft_to_target[draft_ids]


def _first_ids(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    del key
    return jnp.arange(shape[0], dtype=dtype)


def init(config: DrafterConfig, key: Array, dtype: Any = jnp.float32) -> dict[str, Any]:
    """Random parameters, a nested dict of plain arrays (`draft_to_target` is the first ids)."""
    return nn.unbox(_init_boxed(config, key, dtype))


def abstract_params(config: DrafterConfig, dtype: Any = jnp.float32) -> dict[str, Any]:
    """The parameters' shapes and dtypes: the same tree of `jax.ShapeDtypeStruct`."""
    return jax.eval_shape(lambda: init(config, jax.random.key(0), dtype))


def logical_axes(config: DrafterConfig) -> dict[str, Any]:
    """The same tree of `PartitionSpec`s over logical axis names."""
    boxed = jax.eval_shape(lambda: _init_boxed(config, jax.random.key(0), jnp.float32))
    return nn.get_partition_spec(boxed)


def _init_boxed(config: DrafterConfig, key: Array, dtype: Any) -> dict[str, Any]:
    def touch_all(module: Drafter) -> Array:
        block = config.block
        cache = KVCache.init(block, 1, 1, dtype)
        zero = jnp.zeros((1,), jnp.int32)
        table = jnp.zeros((config.vocab_size, block.hidden_size), dtype)
        features = module.project(jnp.zeros((1, 1, config.feature_size), dtype))
        if config.parallel:
            features = features + module.mask_feature()
        embeddings = module.embed(zero[:, None], table)
        stream, _ = module(embeddings, features, zero, cache)
        logits = module.logits(stream, table)
        return module.target_ids(jnp.argmax(logits, axis=-1))

    return Drafter(config, dtype).init(key, method=touch_all)["params"]
