"""The target's own tokens at the rows of a verification."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from peagle_jax.decoding import sampling
from peagle_jax.decoding.networks import Networks
from peagle_jax.decoding.sampling import Draws, RequestArrays

# The rows that drafts were made for: their tokens and the rows that these follow.
Drafts = tuple[Int[Array, "batch drafts"], Int[Array, "batch drafts"]]


def choose(
    networks: Networks,
    hidden: Float[Array, "batch rows hidden"],
    requests: RequestArrays,
    drawn: Draws,
    at: Int[Array, "batch rows"] | None = None,
    drafts: Drafts | None = None,
) -> Int[Array, "batch rows"]:
    """The target's own token at every row. Where no row samples nothing is made of the logits but
    their argmax.

    Args:
      at: which of `drawn` a row is drawn with; None = its own.
      drafts: those of rows 1 and on. With them the token may be -1 at rows behind a draft that does
        not stand: on a CPU one row of a large head costs one sequence a third to a half of what
        four do, and most drafts fall early.
    """

    def best() -> Array:
        return networks.of_target(hidden, method="best")

    def best_where_needed() -> Array:
        assert drafts is not None

        def of_row(row: Array) -> Array:
            one = jnp.take_along_axis(hidden, row[:, None, None], axis=1)
            return networks.of_target(one, method="best")[:, 0]

        return choose_where_needed(drafts, of_row)

    def greedy() -> Array:
        if drafts is None or hidden.shape[0] > 1 or hidden.shape[1] == 1:
            return best()
        return jax.lax.platform_dependent(cpu=best_where_needed, default=best)

    def sample() -> Array:
        noise = drawn if at is None else drawn.at(at)
        return sampling.sample(networks.of_target(hidden, method="logits"), requests, noise)

    return jax.lax.cond(jnp.all(requests.greedy), greedy, sample)


def choose_where_needed(
    drafts: Drafts,
    choose: Callable[[Int[Array, "batch"]], Int[Array, "batch"]],
) -> Int[Array, "batch rows"]:
    """The target's own tokens at those rows alone that follow from what it chose before.

    Args:
      drafts: those of rows 1 and on.
      choose: the target's own token at one row of each sequence.

    Returns the tokens, -1 at rows that are not asked for: those of drafts that do not stand. So
    it is called as often as tokens are confirmed, one row after the other.
    """
    tokens, parents = drafts
    batch, num_drafts = tokens.shape
    rows = jnp.arange(num_drafts + 1)

    def follow(choices: Array) -> Array:
        stands = tokens == jnp.take_along_axis(choices, parents, axis=1)
        return jnp.pad(stands, ((0, 0), (1, 0)), constant_values=True) & (choices < 0)

    def ask(choices: Array) -> Array:
        asked = follow(choices)
        row = jnp.argmax(asked, axis=1)
        here = asked & (rows == row[:, None])
        return jnp.where(here, choose(row)[:, None], choices)

    nothing = jnp.full((batch, num_drafts + 1), -1, jnp.int32)
    return jax.lax.while_loop(lambda choices: jnp.any(follow(choices)), ask, nothing)
