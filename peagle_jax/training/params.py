"""What of a drafter is trained: its parameters split in two, and put together again.

During training a drafter has its own copy of a table that is trained. Of an embedding whose
mask row alone is trained, that row lives apart as one vector, `mask_embedding`: a gradient and
an optimizer state of `[hidden]` instead of `[vocab, hidden]`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array, Float

from peagle_jax.config import DrafterConfig, ModelConfig
from peagle_jax.errors import InputError
from peagle_jax.training.target import target_head

Params = dict[str, Any]
MASK_EMBEDDING = "mask_embedding"
_EMBEDDINGS = ("frozen", "mask_row", "all")
_HEADS = ("frozen", "all")


@dataclasses.dataclass(frozen=True)
class Trainable:
    """Which of the two tables are trained; everything else in a drafter always is.

    embedding: "frozen", "mask_row" (a parallel drafter's mask token alone) or "all".
    head: "frozen" or "all". A table that is lent by the target and trained starts as a copy.
    """

    embedding: str = "mask_row"
    head: str = "frozen"

    def __post_init__(self) -> None:
        for name, allowed in (("embedding", _EMBEDDINGS), ("head", _HEADS)):
            if getattr(self, name) not in allowed:
                raise InputError(
                    f"trainable: {name}: found {getattr(self, name)!r}, "
                    f"expected one of {', '.join(allowed)}"
                )

    def check(self, config: DrafterConfig) -> None:
        """Raises InputError where there is no mask row to train."""
        if self.embedding == "mask_row" and not config.parallel:
            raise InputError(
                "trainable: embedding: found 'mask_row', expected 'frozen' or 'all' "
                "for an autoregressive drafter, which has no mask rows"
            )


@dataclasses.dataclass(frozen=True)
class Split:
    """A drafter in training: `merge(trained, frozen)` are the parameters of `config`,
    and `mask_embedding` where the mask row is trained apart."""

    config: DrafterConfig
    trained: Params
    frozen: Params


def split(
    config: DrafterConfig,
    params: Params,
    target: ModelConfig,
    target_params: Params,
    trainable: Trainable,
) -> Split:
    """Takes a drafter's parameters apart by what is to be trained.

    `Split.config` owns every table that is trained, lent or not before. Arrays that were
    not copied are shared with `params`.

    Raises InputError where the choice does not suit the drafter.
    """
    trainable.check(config)
    params = dict(params)
    embedding = embedding_table(config, params, target_params)
    if trainable.embedding == "all" and not config.own_embedding:
        params["embed_tokens"] = {"embedding": jnp.copy(embedding)}
    if trainable.embedding == "mask_row":
        params[MASK_EMBEDDING] = embedding[config.mask_token_id]
    if trainable.head == "all" and not config.own_head:
        rows = target_head(target, target_params, params.get("draft_to_target"))
        params["lm_head"] = {"kernel": jnp.copy(rows)}
    owning = dataclasses.replace(
        config, own_embedding="embed_tokens" in params, own_head="lm_head" in params
    )
    still = {"draft_to_target"}
    still |= {"embed_tokens"} if trainable.embedding != "all" else set()
    still |= {"lm_head"} if trainable.head == "frozen" else set()
    return Split(
        owning,
        trained={name: tree for name, tree in params.items() if name not in still},
        frozen={name: tree for name, tree in params.items() if name in still},
    )


def merge(trained: Params, frozen: Params) -> Params:
    """The union of two nested dicts that share no leaf."""
    left, right = flatten_dict(trained), flatten_dict(frozen)
    assert not left.keys() & right.keys()
    return unflatten_dict({**left, **right})


def export(
    config: DrafterConfig, trained: Params, frozen: Params, target_params: Params, dtype: Any
) -> tuple[DrafterConfig, Params]:
    """A whole drafter again: its config, and parameters with floats in `dtype`.

    A mask row that was trained apart goes into the drafter's own embedding. One that is lent
    becomes the drafter's own if the row differs from the target's; it stays lent otherwise.

    Args:
      config, trained, frozen: as `Split` has them, after training.
    """
    params = merge(trained, frozen)
    row = params.pop(MASK_EMBEDDING, None)
    if row is not None:
        table = embedding_table(config, params, target_params)
        row = row.astype(table.dtype)
        if config.own_embedding or bool(jnp.any(row != table[config.mask_token_id])):
            table = table.at[config.mask_token_id].set(row)
            params["embed_tokens"] = {"embedding": table}
            config = dataclasses.replace(config, own_embedding=True)
    return config, cast_floats(params, dtype)


def cast_floats(params: Params, dtype: Any) -> Params:
    """Floating-point leaves in `dtype`; integers, such as `draft_to_target`, as they are."""

    def cast(leaf: Array) -> Array:
        return leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    return jax.tree.map(cast, params)


def embedding_table(
    config: DrafterConfig, params: Params, target_params: Params
) -> Float[Array, "vocab hidden"]:
    """The drafter's own embedding, else the target's."""
    owner = params if config.own_embedding else target_params
    return jnp.asarray(owner["embed_tokens"]["embedding"])
