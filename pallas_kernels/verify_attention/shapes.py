"""Block sizes of verification attention, and what each backend covers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from pallas_kernels import tuned
from pallas_kernels.chips import tensor_cores
from pallas_kernels.layout import slot_tile
from pallas_kernels.target import Target

MAX_ROWS = 64
HEAD_DIMS = (64, 128)
QUERY_DTYPES = ("bfloat16", "float32")
CACHE_DTYPES = ("bfloat16", "float32", "float8_e4m3fn", "float8_e5m2")
# A block's keys or values: large enough that a grid step outlasts its fixed cost (about a third of
# a microsecond), small enough that two of each leave room in VMEM.
BLOCK_BYTES = 512 * 1024
SCORE_BYTES = 1024 * 1024


@dataclass(frozen=True)
class TpuBlocks:
    """Tiling of the TPU kernel.

    Attributes:
      heads: key heads a grid step; divides kv_heads.
      slots: cache slots attended to at once; a multiple of `chunk`.
      chunk: slots copied at once; divides the page size (the capacity of a contiguous cache).
      cores: TensorCores that share the grid (2 on a chip whose cores appear as one device).
    """

    heads: int
    slots: int
    chunk: int
    cores: int = 1


@dataclass(frozen=True)
class GpuBlocks:
    """Tiling of the GPU kernel.

    Attributes:
      rows: query rows of a tile, a power of two, at least 16.
      slots: cache slots attended to at once, a power of two.
      splits: parts of the context, attended to independently.
      warps, stages: Triton's warps a program and depth of its load pipeline.
    """

    rows: int
    slots: int
    splits: int
    warps: int = 4
    stages: int = 3


@dataclass(frozen=True)
class Problem:
    """The sizes that a tiling is chosen for; `context` is the most slots a sequence can have."""

    batch: int
    rows: int
    heads: int
    kv_heads: int
    dim: int
    page_size: int
    context: int
    q_dtype: str
    cache_dtype: str

    @property
    def phase(self) -> str:
        """Which of a step's calls this looks like."""
        return "decode" if self.rows == 1 else "verify" if self.rows <= 16 else "prefill"

    @property
    def key(self) -> str:
        """Its entry in the table of tuned sizes."""
        return f"verify_attention/{self.phase}/d{self.dim}/{self.q_dtype}"


def limit(problem: Problem) -> str | None:
    """What every Pallas implementation supports, where `problem` is something else."""
    checks = (
        (problem.dim in HEAD_DIMS, "head_dim", "64 and 128", problem.dim),
        (problem.rows <= MAX_ROWS, "rows", f"1 to {MAX_ROWS}", problem.rows),
        (problem.q_dtype in QUERY_DTYPES, "dtype", " and ".join(QUERY_DTYPES), problem.q_dtype),
        (
            problem.cache_dtype in CACHE_DTYPES,
            "cache dtype",
            ", ".join(CACHE_DTYPES),
            problem.cache_dtype,
        ),
    )
    for covered, name, supported, found in checks:
        if not covered:
            return f"supports {name} {supported}, found {found}"
    return None


def tpu_limit(problem: Problem) -> str | None:
    """What the TPU kernel supports, where `problem` is something else."""
    common = limit(problem)
    tile = slot_tile(problem.dim, problem.cache_dtype)
    if common is None and problem.page_size % tile:
        return (
            f"supports page sizes and capacities that are multiples of {tile} for a "
            f"{problem.cache_dtype} cache of head_dim {problem.dim}, found {problem.page_size}"
        )
    return common


def cpu_limit(problem: Problem, *, tree: bool) -> str | None:
    """What the loop over pages supports, where `problem` is something else."""
    if tree and problem.rows > MAX_ROWS:
        return f"supports trees of 1 to {MAX_ROWS} rows, found {problem.rows}"
    return None


def _divisor(size: int, at_most: int, multiple: int = 1) -> int:
    """The largest divisor of `size` that is a multiple of `multiple` and at most `at_most`."""
    return max(
        (d for d in range(multiple, min(size, at_most) + 1, multiple) if size % d == 0),
        default=multiple,
    )


def blocks(problem: Problem, target: Target) -> TpuBlocks | GpuBlocks:
    """The tiling of a target's own kernel: tuned fields where the table has them."""
    return blocks_with(problem, target, tuned.lookup(target.device_kind, problem.key))


def blocks_with(
    problem: Problem, target: Target, fields: Mapping[str, Any]
) -> TpuBlocks | GpuBlocks:
    """The heuristic tiling, `fields` of the table in place of its own."""
    if target.platform == "tpu":
        return _tpu_blocks(problem, target, **fields)
    return _gpu_blocks(problem, **fields)


def _tpu_blocks(problem: Problem, target: Target, block_bytes: int = BLOCK_BYTES) -> TpuBlocks:
    """All key heads of a sequence in a step where they fit, and a block of `block_bytes`."""
    item = jnp.dtype(problem.cache_dtype).itemsize
    tile = slot_tile(problem.dim, problem.cache_dtype)
    tile_rows = -(-problem.heads // problem.kv_heads * problem.rows // 8) * 8
    cores = tensor_cores(target.device_kind)
    most = max(1, SCORE_BYTES // (tile_rows * 128 * 4))
    if problem.batch % cores:
        # Every core has a share of the heads where it cannot have one of the sequences.
        most = min(most, max(1, problem.kv_heads // cores))
    heads = _divisor(problem.kv_heads, most)
    slots = min(
        block_bytes // (heads * problem.dim * item),
        max(128, SCORE_BYTES // (heads * tile_rows * 4)),
        -(-problem.context // tile) * tile,
    )
    chunk = _divisor(problem.page_size, slots, tile)
    slots = max(1, slots // chunk) * chunk
    return TpuBlocks(heads, slots, chunk, cores)


def _gpu_blocks(
    problem: Problem, slots: int | None = None, warps: int = 4, stages: int = 3
) -> GpuBlocks:
    """Enough programs for every multiprocessor: the context is split where the batch is small."""
    tile_rows = problem.heads // problem.kv_heads * problem.rows
    rows = min(64, max(16, 1 << (tile_rows - 1).bit_length()))
    if slots is None:
        slots = 64 if problem.q_dtype == "bfloat16" else 32
    programs = problem.batch * problem.kv_heads * -(-tile_rows // rows)
    wanted = -(-256 // programs)
    # A split shorter than a few blocks costs more to combine than it gains.
    longest = max(1, problem.context // (4 * slots))
    return GpuBlocks(rows, slots, max(1, min(wanted, longest, 64)), warps, stages)
