"""Block sizes of training attention, and what each backend covers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pallas_kernels import tuned
from pallas_kernels.target import Target

HEAD_DIMS = (64, 128)
DTYPES = ("bfloat16", "float32")
COLUMNS = 1024  # of a tile: enough rows that a block of keys is read for
# Scores of a tile and a block: 2 MiB of float32 in VMEM, several times over backwards. Products of
# float32 operands split them into parts, which need room too.
SCORES = {"bfloat16": 1 << 19, "float32": 1 << 18}


@dataclass(frozen=True)
class TpuBlocks:
    """Tiling of the TPU kernels.

    Attributes:
      rows: rows of a tile, each with all heads of a group; a multiple of 128.
      keys: keys of a block; a multiple of 128.
    """

    rows: int
    keys: int


@dataclass(frozen=True)
class GpuBlocks:
    """Tiling of the GPU kernels.

    Attributes:
      rows: rows of a tile, a power of two, at least 16; one head at a time.
      keys: keys of a block, likewise.
      warps, stages: Triton's warps a program and depth of its load pipeline.
    """

    rows: int
    keys: int
    warps: int = 4
    stages: int = 2


def limit(dim: int, q_dtype: str, keys_dtype: str, values_dtype: str) -> str | None:
    """What every Pallas implementation supports, where the arguments are something else."""
    if dim not in HEAD_DIMS:
        return f"supports head_dim 64 and 128, found {dim}"
    found = sorted({q_dtype, keys_dtype, values_dtype})
    if len(found) > 1 or found[0] not in DTYPES:
        names = " and ".join(found)
        return f"supports {' or '.join(DTYPES)} for queries, keys and values, found {names}"
    return None


@dataclass(frozen=True)
class Problem:
    """The sizes that a tiling is chosen for: query heads a key head, head_dim, the dtype."""

    group: int
    dim: int
    dtype: str

    @property
    def key(self) -> str:
        """Its entry in the table of tuned sizes."""
        return f"cod_attention/d{self.dim}/{self.dtype}"


def blocks(problem: Problem, target: Target) -> TpuBlocks | GpuBlocks:
    """The tiling of a target's own kernels: tuned fields where the table has them."""
    return blocks_with(problem, target, tuned.lookup(target.device_kind, problem.key))


def blocks_with(
    problem: Problem, target: Target, fields: Mapping[str, Any]
) -> TpuBlocks | GpuBlocks:
    """The heuristic tiling, `fields` of the table in place of its own. On a TPU the table has
    `columns`, rows times heads of a group, from which the rows follow."""
    if target.platform == "gpu":
        size = 64 if problem.dtype == "bfloat16" else 32
        return GpuBlocks(**{"rows": size, "keys": size, **fields})
    columns = fields.get("columns", COLUMNS)
    rows = max(128, columns // problem.group // 128 * 128)
    scores = fields.get("scores", SCORES[problem.dtype])
    return TpuBlocks(rows, max(128, scores // (rows * problem.group) // 128 * 128))
