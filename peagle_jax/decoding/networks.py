"""Target and drafter, applied: what the drafter is lent comes from the target's parameters."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from peagle_jax.config import DrafterConfig, ModelConfig
from peagle_jax.decoding.state import Params
from peagle_jax.models import kernel_forms
from peagle_jax.models.decoder import Decoder
from peagle_jax.models.drafter import Drafter


@dataclasses.dataclass(frozen=True)
class Networks:
    """Both networks with their parameters, inside a traced function."""

    target: ModelConfig
    drafter: DrafterConfig | None
    dtype: str
    params: Params

    def of_target(self, *args: Any, method: str = "__call__") -> Any:
        """Applies the target."""
        network = Decoder(self.target, jnp.dtype(self.dtype))
        return network.apply({"params": self.params["target"]}, *args, method=method)

    def of_drafter(self, *args: Any, method: str = "__call__") -> Any:
        """Applies the drafter."""
        assert self.drafter is not None
        network = Drafter(self.drafter, jnp.dtype(self.dtype))
        return network.apply({"params": self.params["drafter"]}, *args, method=method)

    def draft_embed(self, tokens: Int[Array, "*rows"]) -> Float[Array, "*rows hidden"]:
        """Token vectors for the drafter, from its own table or the target's."""
        lent = self.params["target"]["embed_tokens"]["embedding"]
        return self.of_drafter(tokens, lent, method="embed")

    def draft_head(self, stream: Float[Array, "*rows hidden"], method: str) -> Array:
        """The drafter's "logits" or "best" of a stream, by its own head or the target's."""
        target = self.params["target"]
        tied = self.target.tie_embeddings
        lent = target["embed_tokens"]["embedding"] if tied else target["lm_head"]["kernel"]
        return self.of_drafter(stream, kernel_forms.of_parameter(lent), method=method)
