"""How many tokens to draft in a step, by what steps cost and what was accepted so far.

A step of K drafts yields 1 + r_1 + r_1 r_2 + .. + r_1 .. r_K tokens on average, r_j being how
often draft j is accepted where those before it were. The K of the most tokens a millisecond is
taken, 0 among them. Of a tree, once it is drafted, the drafter's confidence says how many of its
nodes are worth a verification. Costs are measured, see `peagle_jax.step_costs`; rates are
followed for each sequence, so both may be wrong without a token being so.

A drafter that is not asked must be fed all the same, or it knows the text no more. Where that costs
more than a sequence is likely to gain, the sequence gives up drafting.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

# Before anything is known of a sequence: good enough to try, soon corrected.
FIRST_RATE = 0.6
# What a good drafter may reach: hoped for where it is tried rarely, and many sequences gain.
HOPED_RATE = 0.8
# How much one observation counts: a rate forgets what is older than some 16 drafts.
WEIGHT = 1 / 16
# How much the mean of all sequences' observations counts besides: together they know sooner.
SHARED_WEIGHT = 1 / 8
# The drafter is fed at least every so many steps, so that it can be tried again: what a sequence
# has confirmed since it drafted last is kept for it in as many rows.
MOST_PENDING = 32
# Of a sequence's time, what drafts that do not pay may take for that.
MOST_SHARE = 0.015
# How much faster drafting must make decoding to be worth the drafter's part of prefill.
LEAST_GAIN = 1.05
# And to be worth a draft: costs and rates are known no better.
LEAST_STEP_GAIN = 1.03


class Choice(NamedTuple):
    """Of a step. place: in the draft lengths. gives_up: who drafts no more from now on."""

    place: Int[Array, ""]
    gives_up: Bool[Array, "batch"]


def choose(
    rates: Float[Array, "batch drafts"],
    active: Bool[Array, "batch"],
    gave_up: Bool[Array, "batch"],
    full: Bool[Array, "batch"],
    costs: Float[Array, "lengths"],
    lengths: tuple[int, ...],
) -> Choice:
    """The draft length with the most tokens a millisecond, all active sequences together; 0 where
    no other is better by LEAST_STEP_GAIN.

    Where no more can be kept for the drafter, the length is one above 0, provided that a draft now
    and then costs little, or that drafts would pay if all sequences made them. Otherwise nothing
    more would be learnt of drafts, and sequences give up at once.

    Args:
      rates: acceptance of each draft, those before it being accepted.
      gave_up: of these no draft is accepted.
      full: of these no more can be kept for the drafter.
      costs: milliseconds of a step with each of `lengths` drafts, 0 the first.
    """
    drafting = active & ~gave_up
    expected = jnp.where(drafting[:, None], _expected(rates, lengths), 1.0)

    doubted = jnp.where(jnp.arange(len(lengths)) > 0, LEAST_STEP_GAIN, 1.0) * costs

    def value(sequences: Array) -> Array:
        return jnp.sum(jnp.where(sequences[:, None], expected, 0.0), axis=0) / doubted

    cheap = jnp.min(costs[1:]) - costs[0] <= MOST_SHARE * MOST_PENDING * costs[0]
    goes_on = cheap | (jnp.argmax(value(drafting)) > 0)
    must_draft = jnp.any(full & drafting) & goes_on
    place = jnp.argmax(value(active).at[0].multiply(jnp.where(must_draft, -1.0, 1.0)))
    return Choice(place, drafting & ~goes_on)


def worth_drafting(
    rates: Float[Array, "batch drafts"], costs: Float[Array, "lengths"], lengths: tuple[int, ...]
) -> Bool[Array, ""]:
    """Whether sequences of which drafts are accepted at these rates should have a drafter."""
    value = jnp.mean(_expected(rates, lengths), axis=0) / costs
    return jnp.max(value[1:]) > LEAST_GAIN * value[0]


def _expected(
    rates: Float[Array, "batch drafts"], lengths: tuple[int, ...]
) -> Float[Array, "batch lengths"]:
    """Tokens of a step with each of `lengths` drafts."""
    reached = jnp.cumsum(jnp.cumprod(rates, axis=1), axis=1)
    expected = jnp.pad(1.0 + reached, ((0, 0), (1, 0)), constant_values=1.0)
    return expected[:, jnp.array(lengths)]


def choose_nodes(
    scores: Float[Array, "batch nodes"],
    active: Bool[Array, "batch"],
    gave_up: Bool[Array, "batch"],
    costs: Float[Array, "sizes"],
    sizes: tuple[int, ...],
) -> Int[Array, ""]:
    """Index into `sizes` of how many of a tree's nodes to verify for the most tokens a
    millisecond: the best n nodes yield 1 + the sum of their probabilities on average.

    Args:
      scores: log-probability of each node, see `DraftTree`.
      gave_up: as for `choose`.
      costs: milliseconds of a step with each of `sizes` nodes.
    """
    chances = jnp.where(gave_up[:, None], 0.0, jnp.exp(scores))
    likeliest = jnp.flip(jnp.sort(chances, axis=1), axis=1)
    expected = 1.0 + jnp.cumsum(likeliest, axis=1)[:, jnp.array(sizes) - 1]
    tokens = jnp.sum(jnp.where(active[:, None], expected, 0.0), axis=0)
    return jnp.argmax(tokens / costs)


def observe(
    rates: Float[Array, "batch drafts"],
    accepted: Int[Array, "batch"],
    drafted: int,
    drafting: Bool[Array, "batch"],
) -> Float[Array, "batch drafts"]:
    """The rates after a step of `drafted` drafts, of which the first `accepted` stood: the next
    one was refused, and of those behind it nothing is known.

    Rows without a sequence that drafts take what those with one have on average: what the next
    sequence there begins with.
    """
    if not drafted:
        return rates
    place = jnp.arange(rates.shape[1])
    seen = (place <= accepted[:, None]) & (place < drafted) & drafting[:, None]
    news = jnp.where(seen, (place < accepted[:, None]) - rates, 0.0)
    witnesses = jnp.maximum(jnp.sum(seen, axis=0), 1)
    shared = jnp.sum(news, axis=0) / witnesses * (1 - 1 / witnesses)
    own = rates + WEIGHT * news + SHARED_WEIGHT * shared
    count = jnp.sum(drafting)
    mean = jnp.sum(jnp.where(drafting[:, None], own, 0.0), axis=0) / jnp.maximum(count, 1)
    return jnp.where(drafting[:, None], own, jnp.where(count > 0, mean, rates))


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
