"""Trees of drafts: what one pass guesses, spent on alternatives instead of one chain.

A one-pass drafter guesses each depth without knowing what stands at those before it. So its
best tokens of every depth can be combined freely, and how likely a combination is is the product
of its tokens' probabilities (Medusa, arXiv 2401.10774, has such heads). Of all nodes of that tree
the N most likely are verified in one pass of the target, with those of the text's own past beside
them where that drafts too. Which they are is decided at every step by the drafter's confidence
(EAGLE-2, arXiv 2406.16858), inside the compiled loop.

Rows. Row 0 of a verification is the newest token, row 1 + j node j. A node's row comes after its
parent's.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

# How likely a token that was looked up is the next one, by how many newest tokens occurred
# before, and how likely is each further one where those before it were right. Counted on answers
# of SmolLM2-135M-Instruct to chat, code, maths and summaries; being wrong costs no correctness.
_FIRST_FOUND = (0.01, 0.26, 0.52, 0.80)
_NEXT_FOUND = (0.50, 0.60, 0.74, 0.88)


@struct.dataclass
class DraftTree:
    """N drafted tokens, and the row each of them follows.

    scores: log of how likely the branch up to each is to stand, as far as the drafter knows.
    """

    tokens: Int[Array, "batch nodes"]
    parents: Int[Array, "batch nodes"]
    scores: Float[Array, "batch nodes"]

    def best(self, num_nodes: int) -> DraftTree:
        """The most likely of the nodes alone."""
        return _cut(self.scores, self.tokens, self.parents - 1, num_nodes)

    @property
    def sees(self) -> Bool[Array, "batch rows rows"]:
        """`[b, r, j]`: row j is row r or one of those before it on its branch."""
        rows = self.tokens.shape[1] + 1
        edges = self.parents[..., None] == jnp.arange(rows)
        one = jnp.pad(edges, ((0, 0), (1, 0), (0, 0))) | jnp.eye(rows, dtype=bool)
        for _ in range((rows - 1).bit_length()):  # each time twice as far
            far = one.astype(jnp.float32)
            one = jnp.einsum("brk,bkj->brj", far, far) > 0
        return one


def depths(sees: Bool[Array, "batch rows rows"]) -> Int[Array, "batch rows"]:
    """How many rows stand before each on its branch."""
    return jnp.sum(sees, axis=-1, dtype=jnp.int32) - 1


@functools.cache
def candidates(num_nodes: int, num_depths: int, num_ranks: int) -> tuple[tuple[int, ...], ...]:
    """Every node that can be among the `num_nodes` most likely: its tokens' ranks by depth.

    A node is at most as likely as one with no higher rank at any depth, so where there are
    `num_nodes` of these besides itself it is never taken. Parents come before children.
    """
    found: list[tuple[int, ...]] = []
    layer: list[tuple[int, ...]] = [()]
    while layer and len(layer[0]) < num_depths:
        layer = [
            (*path, rank)
            for path in layer
            for rank in range(num_ranks)
            if _likelier((*path, rank)) < num_nodes
        ]
        found += layer
    return tuple(found)


def _likelier(path: tuple[int, ...]) -> int:
    """How many other nodes are at least as likely as this one, whatever the probabilities."""
    return int(np.sum(np.cumprod(np.array(path) + 1))) - 1


def grow(
    log_probs: Float[Array, "batch depths ranks"],
    tokens: Int[Array, "batch depths ranks"],
    num_nodes: int,
    found: tuple[Int[Array, "batch nodes"], Int[Array, "batch"]] | None = None,
) -> DraftTree:
    """The most likely `num_nodes` nodes.

    Args:
      log_probs, tokens: the drafter's best tokens at every depth, best first.
      found: what `prompt_lookup.look_up` gives: one more branch.
    """
    _, num_depths, num_ranks = log_probs.shape
    paths = candidates(num_nodes, num_depths, num_ranks)
    place = {path: index for index, path in enumerate(paths)}
    parents = [place.get(path[:-1], -1) for path in paths]
    ranks = np.array([(*path, *[-1] * (num_depths - len(path))) for path in paths])
    each = log_probs[:, np.arange(num_depths), np.maximum(ranks, 0)]
    scores = jnp.sum(jnp.where(ranks < 0, 0.0, each), axis=-1)
    last = np.array([len(path) - 1 for path in paths])
    named = tokens[:, last, ranks[np.arange(len(paths)), last]]
    if found is not None:
        first, more = (jnp.log(jnp.array(table)) for table in (_FIRST_FOUND, _NEXT_FOUND))
        looked_up, shared = found
        branch = first[shared][:, None] + more[shared][:, None] * jnp.arange(num_nodes)
        scores = jnp.concatenate([scores, branch], axis=1)
        named = jnp.concatenate([named, looked_up], axis=1)
        parents += [-1, *range(len(paths), len(paths) + num_nodes - 1)]
    return _cut(scores, named, jnp.broadcast_to(jnp.array(parents), named.shape), num_nodes)


def _cut(
    scores: Float[Array, "batch all"],
    tokens: Int[Array, "batch all"],
    parents: Int[Array, "batch all"],
    num_nodes: int,
) -> DraftTree:
    """The best nodes of those there are; `parents` are nodes here, -1 the newest token."""

    def take(x: Array) -> Array:
        return jnp.take_along_axis(x, taken, axis=1)

    # A child is never likelier than its parent, and of equals the first is taken.
    _, taken = jax.lax.top_k(scores, num_nodes)
    taken = jnp.sort(taken, axis=1)
    above = take(parents)
    before = jnp.sum(taken[:, None] < above[..., None], axis=-1, dtype=jnp.int32)
    return DraftTree(take(tokens), jnp.where(above < 0, 0, 1 + before), take(scores))
