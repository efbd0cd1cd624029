"""Which expert's weights meet which tile of rows: the work of a grouped product, in order."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int


class Visits(NamedTuple):
    """Every meeting of an expert with a tile that holds some of its rows, by expert.

    The shape allows for as many as there can be. Those past the last meeting repeat it, so that
    nothing new is copied for them, and have no rows.

    Attributes:
      expert, tile: who meets.
      first, end: the expert's rows; in a repetition end is 0.
    """

    expert: Int[Array, "visits"]
    tile: Int[Array, "visits"]
    first: Int[Array, "visits"]
    end: Int[Array, "visits"]


def most_visits(experts: int, rows: int, tile: int) -> int:
    """Meetings of so many rows at most: each tile but the first begins one more."""
    return max(1, min(experts, rows) + -(-rows // tile) - 1)


def running_sum(values: Int[Array, "experts"]) -> Int[Array, "experts"]:
    """`jnp.cumsum`, by comparing all places with all: of so few integers that is one operation
    on a TPU, which takes several for the other."""
    place = jnp.arange(values.shape[0])
    upto = place[None, :] <= place[:, None]
    return jnp.sum(jnp.where(upto, values[None, :], 0), axis=1)


def visits(sizes: Int[Array, "experts"], rows: int, tile: int) -> Visits:
    """The meetings of rows sorted by expert, `sizes[e]` of them expert e's, in tiles of `tile`.

    Lookups are sums over comparisons, as in `running_sum`.
    """
    sizes = sizes.astype(jnp.int32)
    experts = jnp.arange(sizes.shape[0])
    ends = running_sum(sizes)
    firsts = ends - sizes
    tiles = jnp.where(sizes > 0, (ends - 1) // tile - firsts // tile + 1, 0)
    upto = running_sum(tiles)
    number = jnp.arange(most_visits(sizes.shape[0], rows, tile), dtype=jnp.int32)
    total = jnp.sum(tiles)
    index = jnp.clip(number, 0, jnp.maximum(total - 1, 0))
    expert = jnp.sum(upto[None, :] <= index[:, None], axis=1, dtype=jnp.int32)
    expert = jnp.minimum(expert, sizes.shape[0] - 1)  # where no expert has rows
    own = experts[None, :] == expert[:, None]

    def of_expert(values: Int[Array, "experts"]) -> Int[Array, "visits"]:
        return jnp.sum(jnp.where(own, values[None, :], 0), axis=1)

    at = of_expert(firsts // tile - upto + tiles) + index
    end = jnp.where(number < total, of_expert(ends), 0)
    return Visits(expert, jnp.clip(at, 0, -(-rows // tile) - 1), of_expert(firsts), end)
