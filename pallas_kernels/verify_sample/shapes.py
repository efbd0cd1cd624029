"""What a sampling kernel takes, one line a row of logits, and what each backend covers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from pallas_kernels import tuned
from pallas_kernels.layout import LANES
from pallas_kernels.target import Target
from pallas_kernels.verify_sample.filters import Filters

ROWS = 8  # rows of a TPU's register tile, taken at once
# What the compiler may use of VMEM (64 MiB on the smallest chips), and what stays for the rest.
VMEM_LIMIT = 48 * 1024 * 1024
VMEM_REST = 2 * 1024 * 1024
FLOATS, INTS = 4, 6


@dataclass(frozen=True)
class Blocks:
    """Tiling of both kernels.

    Attributes:
      chunk: tokens looked at together: on a TPU a multiple of 128, on a GPU a power of two.
      warps: Triton's warps a program.
    """

    chunk: int
    warps: int = 8


@dataclass(frozen=True)
class Problem:
    """The sizes that a tiling is chosen for; `drafted` where a second array of logits comes."""

    rows: int
    vocab: int
    dtype: str
    drafted: bool = False

    @property
    def key(self) -> str:
        """Its entry in the table of tuned sizes."""
        return f"verify_sample/{'reject' if self.drafted else 'sample'}"


def limit(problem: Problem) -> str | None:
    """What every Pallas implementation supports, where `problem` is something else."""
    if problem.dtype != "float32":
        return f"supports float32 logits, found {problem.dtype}"
    return None


def tpu_limit(problem: Problem) -> str | None:
    """What the TPU kernel supports: rows that fit into VMEM as a whole."""
    most = (VMEM_LIMIT - VMEM_REST) // _bytes_a_token(problem) // LANES * LANES
    if limit(problem) is None and problem.vocab > most:
        return f"supports vocabularies of up to {most}, found {problem.vocab}"
    return limit(problem)


def _bytes_a_token(problem: Problem) -> int:
    """VMEM: two buffers of each input, keys and weights, and the drafts' weights."""
    return ROWS * 4 * (7 if problem.drafted else 4)


def blocks(problem: Problem, target: Target) -> Blocks:
    """The tiling of a target's own kernel: tuned fields where the table has them."""
    return blocks_with(problem, target, tuned.lookup(target.device_kind, problem.key))


def blocks_with(problem: Problem, target: Target, fields: Mapping[str, Any]) -> Blocks:
    """The heuristic tiling, `fields` of the table in place of its own."""
    chosen = {"chunk": 2048, **fields}
    if target.platform == "tpu":
        chosen["chunk"] = min(chosen["chunk"], -(-problem.vocab // LANES) * LANES)
    return Blocks(**chosen)


class Packed(NamedTuple):
    """A line for each row, padded to whole tiles of rows.

    Attributes:
      floats: temperature (1 in greedy rows), top_p, min_p, uniform noise of the draft.
      ints: top_k, both words of the key, draft (-1: none), greedy, filtered.
    """

    floats: Float[Array, "lines 4"]
    ints: Int[Array, "lines 6"]


def pack(
    filters: Filters,
    keys: UInt32[Array, "batch rows 2"],
    drafts: Int[Array, "batch drafts"] | None,
    accept_noise: Float[Array, "batch drafts"] | None,
) -> Packed:
    """One line a row; lines of padding are greedy, so that nothing is done for them."""
    batch, rows = keys.shape[:2]

    def line(of_sequence: Array) -> Array:
        return jnp.broadcast_to(of_sequence[:, None], (batch, rows))

    def of_drafts(values: Array | None, fill: int, dtype: Any) -> Array:
        if values is None:
            return jnp.full((batch, rows), fill, dtype)
        extra = ((0, 0), (0, rows - values.shape[1]))
        return jnp.pad(values.astype(dtype), extra, constant_values=fill)

    floats = jnp.stack(
        [
            line(jnp.where(filters.greedy, 1.0, filters.temperature)),
            line(filters.top_p),
            line(filters.min_p),
            of_drafts(accept_noise, 0, jnp.float32),
        ],
        axis=-1,
    )
    words = jax.lax.bitcast_convert_type(keys, jnp.int32)
    ints = jnp.stack(
        [
            line(filters.top_k),
            words[..., 0],
            words[..., 1],
            of_drafts(drafts, -1, jnp.int32),
            line(filters.greedy.astype(jnp.int32)),
            line(filters.filtered.astype(jnp.int32)),
        ],
        axis=-1,
    )
    extra = -(batch * rows) % ROWS
    floats = jnp.pad(floats.reshape(-1, FLOATS), ((0, extra), (0, 0)), constant_values=1.0)
    ints = jnp.pad(ints.reshape(-1, INTS), ((0, extra), (0, 0)))
    padding = (jnp.arange(ints.shape[0]) >= batch * rows).astype(jnp.int32)
    return Packed(floats.astype(jnp.float32), ints.astype(jnp.int32).at[:, 4].max(padding))
