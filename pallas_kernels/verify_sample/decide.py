"""What a kernel does with some rows of logits: filters, noise and choice, on either backend.

A `Source` gives the rows in chunks, from wherever a backend keeps them. Everything a row has one
of is a column `[rows, 1]`. Thresholds are searched between the rows' extremes, halving values at
first and integer keys later, and no further than to one token: the reference's threshold is then
the same, or one that keeps the same tokens. Noise is drawn for a chunk only where one of its
tokens can still win, which most of a language model's vocabulary cannot.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels.verify_sample import noise
from pallas_kernels.verify_sample.filters import middle_of, sortable, value_of

BOTTOM = jnp.iinfo(jnp.int32).min
# Halvings of the values before those of the keys: 16 come within 2**-16 of a row's range.
BY_VALUE = 16


class Asked(NamedTuple):
    """Of each row: float32, then int32 (flags are 0 or 1).

    Attributes:
      temperature: 1 in greedy rows.
      top_p, min_p: see `Filters`.
      accept: uniform noise of the draft.
      top_k: 0 is off.
      first, second: the words of the noise's key.
      draft: the drafted token, -1 in the row after the last draft.
      greedy, filtered: as in `Filters`; neither in a row that is only padding.
    """

    temperature: Any
    top_p: Any
    min_p: Any
    accept: Any
    top_k: Any
    first: Any
    second: Any
    draft: Any
    greedy: Any
    filtered: Any


class Source(ABC):
    """Rows of scaled logits in chunks.

    Attributes:
      vocab, width, chunks: tokens of a row and of a chunk, and how many chunks those make.
    """

    vocab: int
    width: int
    chunks: int

    @abstractmethod
    def order(self, chunk: Any) -> Array:
        """`sortable` keys of the logits, BOTTOM past the vocabulary."""

    @abstractmethod
    def weigh(self, peak: Array, least: Array) -> None:
        """Prepares `weights` of tokens whose keys reach `least`."""

    @abstractmethod
    def weights(self, chunk: Any, peak: Array, least: Array) -> Array:
        """`exp(logit - peak)` of those tokens, 0 of the others; `weigh` was called before."""

    @abstractmethod
    def counters(self, chunk: Any) -> Array:
        """What each token's noise is drawn with."""

    @abstractmethod
    def draft_weights(self, chunk: Any, ids: Array) -> Array:
        """The drafts' distribution, not normalised."""


class Extent(NamedTuple):
    """A row's extremes, as keys, and its most likely token."""

    lowest: Array
    highest: Array
    best: Array


def sample(source: Source, asked: Asked) -> Array:
    """The token that each row draws, or its most likely one where greedy."""
    extent = _extent(source, asked)
    peak = value_of(extent.highest)
    top, least = _filters(source, asked, extent, peak, weigh_all=False)

    def consider(chunk: Any, best: tuple[Array, Array]) -> tuple[Array, Array]:
        logits = _kept(source, asked, chunk, peak, top, least)
        bound = jnp.maximum(best[0], peak + noise.LOWEST)
        highest = jnp.max(logits, axis=1, keepdims=True)
        able = (highest + noise.HIGHEST > bound) & (asked.greedy == 0)
        return jax.lax.cond(
            _any(able),
            lambda: _better(best, logits + _gumbel(source, asked, chunk), _ids(source, chunk)),
            lambda: best,
        )

    _, token = jax.lax.fori_loop(0, source.chunks, consider, _no_token(peak))
    return jnp.where(asked.greedy != 0, extent.best, token)


def reject(source: Source, asked: Asked) -> tuple[Array, Array]:
    """Whether each row's draft stands (0 or 1), and the token that comes where it does not."""
    extent = _extent(source, asked)
    peak = value_of(extent.highest)
    top, least = _filters(source, asked, extent, peak, weigh_all=True)

    def weights(chunk: Any) -> Array:
        kept = _kept(source, asked, chunk, peak, top, least) > -jnp.inf
        return jnp.where(kept, source.weights(chunk, peak, top), 0.0)

    def totals(chunk: Any, sums: tuple[Array, Array]) -> tuple[Array, Array]:
        q = source.draft_weights(chunk, _ids(source, chunk))
        return sums[0] + _sum(weights(chunk)), sums[1] + _sum(q)

    zero = jnp.zeros_like(peak)
    p_total, q_total = jax.lax.fori_loop(0, source.chunks, totals, (zero, zero))

    def consider(chunk: Any, state: Any) -> Any:
        p_draft, q_draft, recovered, plain = state
        ids = _ids(source, chunk)
        p, q = weights(chunk) / p_total, source.draft_weights(chunk, ids) / q_total
        drafted = ids == asked.draft
        p_draft += _sum(jnp.where(drafted, p, 0.0))
        q_draft += _sum(jnp.where(drafted, q, 0.0))
        residual = jnp.maximum(p - q, 0.0)
        able = (jnp.max(p, axis=1, keepdims=True) > 0) & (asked.greedy == 0)

        def draw() -> Any:
            drawn = _gumbel(source, asked, chunk)
            return (
                _better(recovered, jnp.log(residual) + drawn, ids),
                # What counts where nothing is left of the difference, or there is no draft.
                _better(plain, jnp.log(p) + drawn, ids),
            )

        return p_draft, q_draft, *jax.lax.cond(_any(able), draw, lambda: (recovered, plain))

    begin = (zero, zero, _no_token(peak), _no_token(peak))
    p_draft, q_draft, recovered, plain = jax.lax.fori_loop(0, source.chunks, consider, begin)
    left = (asked.draft >= 0) & (recovered[0] > -jnp.inf)
    token = jnp.where(left, recovered[1], plain[1])
    likely = asked.accept * q_draft < p_draft
    greedy = asked.greedy != 0
    stands = (greedy & (asked.draft == extent.best)) | (~greedy & likely)
    return jnp.where(stands, 1, 0), jnp.where(greedy, extent.best, token)


def _extent(source: Source, asked: Asked) -> Extent:
    def look(chunk: Any, state: Any) -> Any:
        lowest, highest, best = state
        order, ids = source.order(chunk), _ids(source, chunk)
        real = jnp.where(ids < source.vocab, order, -(BOTTOM + 1))
        return (
            jnp.minimum(lowest, jnp.min(real, axis=1, keepdims=True)),
            jnp.maximum(highest, jnp.max(order, axis=1, keepdims=True)),
            # Values, not keys: the two zeros are equal.
            _better(best, jnp.where(ids < source.vocab, value_of(order), -jnp.inf), ids),
        )

    column = jnp.zeros_like(asked.top_k)
    begin = (column - (BOTTOM + 1), column + BOTTOM, _no_token(asked.temperature))
    lowest, highest, best = jax.lax.fori_loop(0, source.chunks, look, begin)
    return Extent(lowest, highest, best[1])


def _filters(
    source: Source, asked: Asked, extent: Extent, peak: Array, *, weigh_all: bool
) -> tuple[Array, Array]:
    """The least keys that top-k keeps, and that top-p keeps of these."""
    everything = jnp.full_like(extent.lowest, BOTTOM)
    has_k = (asked.filtered != 0) & (asked.top_k > 0)
    has_p = (asked.filtered != 0) & (asked.top_p < 1)

    def count(order: Array, least: Array) -> Array:
        return _sum(jnp.where(order >= least, 1.0, 0.0))

    def tokens(least: Array) -> tuple[Array, Array]:
        number = _fold(source, lambda chunk: (count(source.order(chunk), least),), peak)[0]
        return number, number

    def search() -> tuple[Array, Array]:
        k = jnp.minimum(asked.top_k, source.vocab).astype(jnp.float32)
        top = _largest_threshold(tokens, k, extent, extent.lowest, source.vocab, has_k)
        top = jnp.where(has_k, top, BOTTOM)
        source.weigh(peak, top)

        def mass(least: Array) -> tuple[Array, Array]:
            def of(chunk: Any) -> tuple[Array, Array]:
                order = source.order(chunk)
                held = jnp.where(order >= least, source.weights(chunk, peak, top), 0.0)
                return _sum(held), count(order, least)

            total, number = _fold(source, of, peak, peak)
            return total, number

        (total,) = _fold(source, lambda chunk: (_sum(source.weights(chunk, peak, top)),), peak)
        low = jnp.maximum(top, extent.lowest)
        nucleus = _largest_threshold(mass, asked.top_p * total, extent, low, source.vocab, has_p)
        return top, jnp.where(has_p, jnp.maximum(top, nucleus), top)

    def nothing() -> tuple[Array, Array]:
        if weigh_all:
            source.weigh(peak, everything)
        return everything, everything

    return jax.lax.cond(_any(asked.filtered != 0), search, nothing)


def _largest_threshold(
    measure: Callable[[Array], tuple[Array, Array]],
    wanted: Array,
    extent: Extent,
    low: Array,
    inside: int,
    active: Array,
) -> Array:
    """The largest key whose `measure` is at least `wanted`, or one that the same tokens reach.

    Args:
      measure: of a key, what the tokens that reach it hold, and how many they are.
      low: a key that holds enough.
      inside: at least the number of tokens from there on.
      active: rows whose result counts.
    """

    def going(state: Any) -> Any:
        return state[-1] > 0

    def narrow(state: Any) -> Any:
        low, high, n_low, n_high, turn, _ = state
        by_value = sortable(0.5 * value_of(low) + 0.5 * value_of(high))
        by_value = jnp.minimum(jnp.maximum(by_value, low + 1), high)
        middle = jnp.where(turn < BY_VALUE, by_value, middle_of(low, high))
        amount, number = measure(middle)
        ok = amount >= wanted
        low, high = jnp.where(ok, middle, low), jnp.where(ok, high, middle - 1)
        n_low, n_high = jnp.where(ok, number, n_low), jnp.where(ok, n_high, number)
        more = active & (low < high) & (n_low - n_high > 1.5)
        return low, high, n_low, n_high, turn + 1, _number_of(more)

    high = extent.highest
    counts = jnp.full_like(wanted, inside), jnp.zeros_like(wanted)
    begin = (low, high, *counts, jnp.int32(0), _number_of(active & (low < high)))
    return jax.lax.while_loop(going, narrow, begin)[0]


def _kept(source: Source, asked: Asked, chunk: Any, peak: Array, top: Array, least: Array) -> Array:
    """A chunk's logits, -inf where filtered or past the vocabulary."""
    order = source.order(chunk)
    probable = (source.weights(chunk, peak, top) >= asked.min_p) | (asked.filtered == 0)
    keep = (order >= least) & probable & (_ids(source, chunk) < source.vocab)
    return jnp.where(keep, value_of(order), -jnp.inf)


def _gumbel(source: Source, asked: Asked, chunk: Any) -> Array:
    return noise.gumbel(asked.first, asked.second, source.counters(chunk))


def _ids(source: Source, chunk: Any) -> Array:
    shape = source.order(chunk).shape
    return chunk * source.width + jax.lax.broadcasted_iota(jnp.int32, shape, 1)


def _no_token(like: Array) -> tuple[Array, Array]:
    return jnp.full(like.shape, -jnp.inf, jnp.float32), jnp.zeros(like.shape, jnp.int32)


def _better(best: tuple[Array, Array], scores: Array, ids: Array) -> tuple[Array, Array]:
    """The best score so far and its token; of equals the lowest id. Later chunks only win."""
    highest = jnp.max(scores, axis=1, keepdims=True)
    most = -(BOTTOM + 1)
    token = jnp.min(jnp.where(scores < highest, most, ids), axis=1, keepdims=True)
    wins = highest > best[0]
    return jnp.where(wins, highest, best[0]), jnp.where(wins, token, best[1])


def _fold(source: Source, of: Callable[[Any], tuple[Array, ...]], *likes: Array) -> Any:
    """Sums of what `of` makes of each chunk, columns like `likes`."""

    def add(chunk: Any, sums: tuple[Array, ...]) -> tuple[Array, ...]:
        return tuple(a + b for a, b in zip(sums, of(chunk), strict=True))

    begin = tuple(jnp.zeros_like(like) for like in likes)
    return jax.lax.fori_loop(0, source.chunks, add, begin)


def _sum(x: Array) -> Array:
    return jnp.sum(x, axis=1, keepdims=True)


def _number_of(flags: Array) -> Array:
    return jnp.sum(jnp.where(flags, 1.0, 0.0))


def _any(flags: Array) -> Array:
    return _number_of(flags) > 0
