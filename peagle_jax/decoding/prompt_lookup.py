"""Prompt lookup: the text's own past as a drafter (arXiv 2304.04487 calls it reference copying).

The tokens that followed the last occurrence of the text's newest words are the draft. It needs
no network and serves any target; it pays where answers repeat what was said, as summaries, edits
and loops do.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Int

MAX_NGRAM = 3  # newest tokens that are looked for; fewer where so many do not occur
# So many newest tokens must have occurred before a drafter's guess is worth less.
SURE_NGRAM = 2


def look_up(
    history: Int[Array, "batch size"],
    last: Int[Array, "batch"],
    num_draft_tokens: int,
    max_ngram: int = MAX_NGRAM,
) -> tuple[Int[Array, "batch drafts"], Int[Array, "batch"]]:
    """What followed the newest tokens where they last stood before.

    Of all earlier places the one counts that shares most of the newest tokens, `max_ngram` at
    most, and of several the latest. A draft that reaches the newest token goes on as if the
    text repeated itself from there. Where not even the newest token occurs before, it is
    repeated. The second result is how many of the newest tokens were found together.

    Args:
      history: the text's tokens; entries past `last` may be anything.
      last: index of the newest token.
    """
    size = history.shape[1]
    place = jnp.arange(size)
    shared = jnp.zeros(history.shape, jnp.int32)
    equal = jnp.ones(history.shape, bool)
    for back in range(max_ngram):
        newest = jnp.take_along_axis(history, jnp.maximum(last - back, 0)[:, None], axis=1)
        here = jnp.pad(history, ((0, 0), (back, 0)))[:, :size]
        equal &= (here == newest) & (place >= back) & (last[:, None] >= back)
        shared += equal
    shared = jnp.where(place < last[:, None], shared, 0)
    # One key orders by what is shared, then by place.
    found = jnp.argmax(shared * size + place * (shared > 0), axis=1)
    found = jnp.where(jnp.any(shared > 0, axis=1), found, last - 1)
    period = (last - found)[:, None]
    index = found[:, None] + 1 + jnp.arange(num_draft_tokens) % period
    drafts = jnp.take_along_axis(history, jnp.minimum(index, last[:, None]), axis=1)
    return drafts, jnp.max(shared, axis=1)
