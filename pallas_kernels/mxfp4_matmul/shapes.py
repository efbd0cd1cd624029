"""Block sizes of the MXFP4 product, and what each backend covers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pallas_kernels import tuned
from pallas_kernels.layout import LANES, sublanes
from pallas_kernels.mxfp4_matmul.reference import BLOCK
from pallas_kernels.target import Target

DTYPES = ("bfloat16", "float32")
FEW, MANY = 32, 128  # rows of a tile, by how many an expert has
# A step's packed weights: large enough that the step outlasts its fixed cost (about a third of a
# microsecond), small enough that two of them, and one unpacked, leave room in VMEM.
STEP_BYTES = 1536 * 1024


@dataclass(frozen=True)
class Blocks:
    """Tiling of both kernels.

    Attributes:
      rows: rows of a tile; on a GPU a power of two, at least 16.
      outputs: outputs of a step; on a TPU a multiple of 128, on a GPU a power of two.
      warps, stages: Triton's warps a program and depth of its load pipeline.
    """

    rows: int
    outputs: int
    warps: int = 4
    stages: int = 3


@dataclass(frozen=True)
class Problem:
    """The sizes that a tiling is chosen for."""

    rows: int
    experts: int
    width: int
    outputs: int
    dtype: str

    @property
    def phase(self) -> str:
        """Whether an expert has few rows, as in a verification, or many, as in a prefill."""
        return "few" if self.rows <= self.experts * FEW // 2 else "many"

    @property
    def key(self) -> str:
        """Its entry in the table of tuned sizes."""
        return f"mxfp4_matmul/{self.phase}/{self.dtype}"


def limit(problem: Problem) -> str | None:
    """What every Pallas implementation supports, where `problem` is something else."""
    if problem.dtype not in DTYPES:
        return f"supports dtype {' and '.join(DTYPES)}, found {problem.dtype}"
    return None


def padded_width(width: int) -> int:
    """Inputs whose scales are whole tiles of a TPU's registers."""
    tile = BLOCK * sublanes("uint8")
    return -(-width // tile) * tile


def blocks(problem: Problem, target: Target) -> Blocks:
    """The tiling of a target's own kernel: tuned fields where the table has them."""
    return blocks_with(problem, target, tuned.lookup(target.device_kind, problem.key))


def blocks_with(problem: Problem, target: Target, fields: Mapping[str, Any]) -> Blocks:
    """The heuristic tiling, `fields` of the table in place of its own."""
    rows = FEW if problem.phase == "few" else MANY
    if target.platform == "gpu":
        return Blocks(**{"rows": min(rows, 64), "outputs": 64, **fields})
    lanes = -(-problem.outputs // LANES)
    # As even as whole registers allow: each step waits for as many bytes.
    steps = -(-padded_width(problem.width) // 2 * lanes * LANES // STEP_BYTES)
    return Blocks(**{"rows": rows, "outputs": -(-lanes // max(1, steps)) * LANES, **fields})
