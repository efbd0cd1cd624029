"""Key-value caches `[.., slots, dim]`: how a TPU lays them out, and which positions fit."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

LANES = 128


def sublanes(dtype: Any) -> int:
    """Rows of a register tile: 8 of 4-byte elements, packed more densely for smaller ones."""
    return 8 * 4 // jnp.dtype(dtype).itemsize


def slots_minor(dim: int) -> bool:
    """Whether the slots lie along the lanes.

    XLA lays out `[.., slots, dim]` so where dim is less than a register's 128 lanes: the other
    way half of HBM would be padding. A kernel then reads `[.., dim, slots]`, which is a view
    of the same bytes.
    """
    return dim % LANES != 0


def slot_tile(dim: int, dtype: Any) -> int:
    """Slots that lie in one tile, of which no part can be copied."""
    return LANES if slots_minor(dim) else sublanes(dtype)


def check_lengths(start: Int[Array, "batch"], rows: int, context: int) -> None:
    """Refuses rows outside a cache of `context` positions; under jit that is the caller's promise.

    Raises:
      ValueError: a concrete `start` that is negative or whose rows end past the cache.
    """
    if isinstance(start, jax.core.Tracer):
        return
    found = jax.device_get(start)  # a concrete array stays one where jit closes over it
    first, last = int(found.min()), int(found.max()) + rows - 1
    if first < 0 or last >= context:
        raise ValueError(
            f"start: rows at positions {first} .. {last}, the cache holds 0 .. {context - 1}"
        )
