"""Attention of a few new rows over a long cache: decoding, verification and drafting."""

from __future__ import annotations

from typing import Literal

from jaxtyping import Array, Float, Int

from pallas_kernels.verify_attention import reference

Implementation = Literal["reference"]


def verify_attention(
    q: Float[Array, "batch rows heads dim"],
    keys: Float[Array, "batch kv_heads capacity dim"],
    values: Float[Array, "batch kv_heads capacity dim"],
    start: Int[Array, "batch"],
    *,
    window: int | None = None,
    sinks: Float[Array, "heads"] | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "batch rows heads dim"]:
    """Causal attention of rows at positions `start[b] + r` over a cache that holds them.

    Without a window slot s holds position s, and capacity exceeds every position. With one
    the cache may be a ring of `capacity >= window + rows - 1` slots: slot s holds the newest
    position p <= start + rows - 1 with p % capacity == s, so

        p = last - (last - s) % capacity,    last = start[b] + rows - 1,

    and a slot whose p is negative holds nothing yet. A cache that never wraps is the same
    rule at work. Row r sees p where `start + r - window < p <= start + r`.

    Args:
      q: rotated queries. heads is a multiple of kv_heads (grouped-query attention).
      keys, values: the cache, the new rows already written.
      start: position of each sequence's first row.
      window: sliding window in tokens (a row sees itself and `window - 1` before it).
      sinks: one more score a query head, which takes its share of the softmax and adds no
        value (attention sinks, as in gpt-oss).
      implementation: None picks by platform; an explicit choice never falls back.

    Returns:
      Outputs in q's dtype; softmax in float32.

    Raises:
      NotImplementedError: `implementation` is one that does not exist here.
    """
    if implementation not in (None, "reference"):
        raise NotImplementedError(
            f"verify_attention: implementation {implementation!r} is not available; "
            "supported: 'reference'"
        )
    return reference.verify_attention(q, keys, values, start, window=window, sinks=sinks)
