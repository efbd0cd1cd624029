"""The drafter and the target's head as an objective uses them: parameters bound, lent parts in.

One place knows where embeddings and heads come from while a drafter is trained.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from peagle_jax.config import DrafterConfig, ModelConfig
from peagle_jax.models.attention import Attend
from peagle_jax.models.drafter import Drafter
from peagle_jax.models.layers import matmul_out_in
from peagle_jax.training.params import MASK_EMBEDDING, Params, cast_floats, merge
from peagle_jax.training.target import target_head


class Networks:
    """A drafter in training beside its target; made anew inside every traced function.

    Args:
      drafter: as `Split.config` has it.
      trained, frozen: as `Split` has them; master copies may be wider than `dtype`, in
        which everything is computed. Gradients flow through the cast.
    """

    def __init__(
        self,
        target: ModelConfig,
        drafter: DrafterConfig,
        trained: Params,
        frozen: Params,
        target_params: Params,
        dtype: Any,
    ) -> None:
        params = cast_floats(merge(trained, frozen), dtype)
        self.config = drafter
        self._dtype = dtype
        self._mask_embedding = params.pop(MASK_EMBEDDING, None)
        self._lent_embedding = target_params["embed_tokens"]["embedding"]
        self._ids = params.get("draft_to_target")
        self._target_head = target_head(target, target_params, self._ids).astype(dtype)
        if not drafter.own_head:
            # Rows of the draft vocabulary are gathered here, once, not in each block of rows.
            params["lm_head"] = {"kernel": self._target_head}
        self._params = params
        self.head_params = {name: params[name] for name in ("norm", "lm_head") if name in trained}
        self._network = Drafter(dataclasses.replace(drafter, own_head=True), dtype)

    def _apply(self, *args: Any, method: str) -> Any:
        return self._network.apply({"params": self._params}, *args, method=method)

    def embed(self, tokens: Int[Array, "*rows"]) -> Float[Array, "*rows hidden"]:
        """Token vectors; the mask token's is the trained one."""
        vectors = self._apply(tokens, self._lent_embedding, method="embed")
        mask_id = self.config.mask_token_id
        if self._mask_embedding is None or mask_id is None:
            return vectors
        is_mask = jnp.equal(tokens, mask_id)[..., None]
        return jnp.where(is_mask, self._mask_embedding, vectors)

    def project(self, features: Float[Array, "*rows raw"]) -> Float[Array, "*rows hidden"]:
        """Raw target features to the drafter's width."""
        return self._apply(features.astype(self._dtype), method="project")

    def mask_feature(self) -> Float[Array, "hidden"]:
        """The feature of every mask row."""
        return self._apply(method="mask_feature")

    def run_layers(
        self,
        embeddings: Float[Array, "batch rows hidden"],
        features: Float[Array, "batch rows hidden"],
        positions: Int[Array, "batch rows"],
        attends: list[Attend],
    ) -> tuple[Float[Array, "batch rows hidden"], list[Any]]:
        """The residual stream after the layers, and what each Attend carries."""
        return self._apply(embeddings, features, positions, attends, method="run_layers")

    def next_feature(self, stream: Float[Array, "*rows hidden"]) -> Float[Array, "*rows hidden"]:
        """What an autoregressive drafter feeds back."""
        return self._apply(stream, method="next_feature")

    def draft_logits(
        self, stream: Float[Array, "*rows hidden"], head_params: Params | None = None
    ) -> Float[Array, "*rows vocab"]:
        """The drafter's float32 logits over the draft vocabulary.

        `head_params` takes the place of the attribute of that name: what is trained of the
        parameters that make logits of a stream, as an argument to differentiate by.
        """
        params = self._params if head_params is None else {**self._params, **head_params}
        return self._network.apply({"params": params}, stream, method="logits")

    def target_logits(self, hidden: Float[Array, "*rows hidden"]) -> Float[Array, "*rows vocab"]:
        """The target's float32 logits over the draft vocabulary alone."""
        return matmul_out_in(hidden.astype(self._dtype), self._target_head)

    def draft_ids(self, tokens: Int[Array, "*rows"]) -> Int[Array, "*rows"]:
        """Draft-vocabulary ids of target ids, -1 where a token is outside."""
        if self._ids is None:
            return tokens
        size = self._ids.shape[0]
        inverse = jnp.full((self.config.vocab_size,), -1, jnp.int32)
        return inverse.at[self._ids].set(jnp.arange(size, dtype=jnp.int32))[tokens]
