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
    implementation: Implementation | None = None,
) -> Float[Array, "batch rows heads dim"]:
    """Causal attention of rows at positions `start[b] + r` over slots `0 .. position`.

    Args:
      q: rotated queries. heads is a multiple of kv_heads (grouped-query attention).
      keys, values: the cache, slot index = position, the new rows already written.
      start: position of each sequence's first row.
      window: sliding window in tokens (a row sees itself and `window - 1` before it).
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
    return reference.verify_attention(q, keys, values, start, window=window)
