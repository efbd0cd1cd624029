"""How many tokens to draft in a step, by what steps cost and what was accepted so far.

A step of K drafts yields 1 + r_1 + r_1 r_2 + .. + r_1 .. r_K tokens on average, r_j being how
often draft j is accepted where those before it were. The K of the most tokens a millisecond is
taken, 0 among them. Of a tree, once it is drafted, the drafter's confidence says how many of its
nodes are worth a verification. Costs are measured, see `peagle_jax.step_costs`; rates are
followed for each sequence, so both may be wrong without a token being so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

# Before anything is known of a sequence: good enough to try, soon corrected.
FIRST_RATE = 0.6
# How much one observation counts: a rate forgets what is older than some 16 drafts.
WEIGHT = 1 / 16
# The drafter is fed at least every so many steps, so that it can be tried again: what a sequence
# has confirmed since it drafted last is kept for it in as many rows.
MOST_PENDING = 32


def choose(
    rates: Float[Array, "batch drafts"],
    active: Bool[Array, "batch"],
    must_draft: Bool[Array, ""],
    costs: Float[Array, "lengths"],
    lengths: tuple[int, ...],
) -> Int[Array, ""]:
    """Index into `lengths` of the draft length with the most tokens a millisecond, all active
    sequences together; one above 0 where `must_draft`.

    Args:
      rates: acceptance of each draft, those before it being accepted.
      costs: milliseconds of a step with each of `lengths` drafts.
    """
    reached = jnp.cumsum(jnp.cumprod(rates, axis=1), axis=1)
    expected = jnp.pad(1.0 + reached, ((0, 0), (1, 0)), constant_values=1.0)
    tokens = jnp.sum(jnp.where(active[:, None], expected[:, jnp.array(lengths)], 0.0), axis=0)
    value = tokens / costs
    return jnp.argmax(jnp.where((jnp.array(lengths) == 0) & must_draft, -1.0, value))


def choose_nodes(
    scores: Float[Array, "batch nodes"],
    active: Bool[Array, "batch"],
    costs: Float[Array, "sizes"],
    sizes: tuple[int, ...],
) -> Int[Array, ""]:
    """Index into `sizes` of how many of a tree's nodes to verify for the most tokens a
    millisecond: the best n nodes yield 1 + the sum of their probabilities on average.

    Args:
      scores: log-probability of each node, see `DraftTree`.
      costs: milliseconds of a step with each of `sizes` nodes.
    """
    likeliest = jnp.flip(jnp.sort(jnp.exp(scores), axis=1), axis=1)
    expected = 1.0 + jnp.cumsum(likeliest, axis=1)[:, jnp.array(sizes) - 1]
    tokens = jnp.sum(jnp.where(active[:, None], expected, 0.0), axis=0)
    return jnp.argmax(tokens / costs)


def observe(
    rates: Float[Array, "batch drafts"],
    accepted: Int[Array, "batch"],
    drafted: int,
    active: Bool[Array, "batch"],
) -> Float[Array, "batch drafts"]:
    """The rates after a step of `drafted` drafts, of which the first `accepted` stood: the next
    one was refused, and of those behind it nothing is known."""
    place = jnp.arange(rates.shape[1])
    seen = (place <= accepted[:, None]) & (place < drafted) & active[:, None]
    stood = (place < accepted[:, None]).astype(rates.dtype)
    return jnp.where(seen, rates + WEIGHT * (stood - rates), rates)


Carried = TypeVar("Carried")


def switch(
    index: Int[Array, ""],
    branches: Sequence[Callable[[Carried], Carried]],
    carried: Carried,
) -> Carried:
    """`jax.lax.switch`, but for caches in what is carried: XLA's conditionals copy these on CPU,
    loops do not. An index past all branches changes nothing."""

    def go_on(turn: tuple[Array, Carried]) -> Array:
        return turn[0]

    for place, branch in enumerate(branches):

        def once(turn: tuple[Array, Carried], branch: Any = branch) -> Any:
            return jnp.zeros_like(turn[0]), branch(turn[1])

        _, carried = jax.lax.while_loop(go_on, once, (index == place, carried))
    return carried
