"""Which keys of depth 0 an element of drafter training sees: a span of indices.

Element (anchor a, depth d) stands at position a + d of its document and sees depth 0 up to its
anchor, under a window from position a + d - window + 1 on. The rows of a document are neighbours
in a packed row, so that what it sees has a first and a last index: two integers say it all, and
their least and greatest over a block of elements tell which blocks of keys it can leave out.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

MASKED = -1e30  # finite: -inf would turn a row that sees nothing (padding) into NaN
NOTHING = (2**30, -1)  # first and last index of an empty span


def visible(
    query_anchor: Any,
    query_depth: Any,
    key_anchor: Any,
    key_depth: Any,
    same_document: Any,
    window: int | None,
) -> Bool[Array, "..."]:
    """Whether the query element sees the key element; arguments broadcast.

    `window` is in positions, as in decoding: a row sees itself and the `window - 1` positions
    before it, of its own chain too. Indices in a packed row stand for positions, since
    the rows of a document are neighbours.
    """
    seen = jnp.where(
        key_depth == 0,
        key_anchor <= query_anchor,
        (key_anchor == query_anchor) & (key_depth <= query_depth),
    )
    seen &= same_document
    if window is not None:
        seen &= key_anchor + key_depth > query_anchor + query_depth - window
    return seen


def visible_spans(
    anchor: Int[Array, "batch rows"],
    depth: Int[Array, "rows"],
    documents: Int[Array, "batch length"],
    window: int | None,
) -> Int[Array, "batch 2 rows"]:
    """First and last index of depth 0 that `visible` shows each row; `NOTHING` where none."""
    index = jnp.arange(documents.shape[1], dtype=jnp.int32)
    begins = jnp.pad(documents[:, 1:] != documents[:, :-1], ((0, 0), (1, 0)))
    begin = jax.lax.cummax(jnp.where(begins, index, 0), axis=1)
    first = jnp.take_along_axis(begin, anchor, axis=1)
    if window is not None:
        first = jnp.maximum(first, anchor + depth - window + 1)
    spans = jnp.stack([first, anchor], axis=1).astype(jnp.int32)
    nothing = jnp.asarray(NOTHING, jnp.int32)[:, None]
    return jnp.where((first <= anchor)[:, None], spans, nothing)
