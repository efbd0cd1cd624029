"""With libtpu installed (no TPU needed), the real TPU compiler takes the kernels."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SIZES = (
    "verify b8 8k d64",
    "paged b8 8k, pages of 16",
    "ring b8",
    "K=8, 8k",
    "draw b1",
    "mxfp4_matmul verify b1",
)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
def test_kernels_compile_for_every_chip_within_their_bounds(tmp_path):
    output = tmp_path / "rows.json"
    matches = [part for size in SIZES for part in ("--match", size)]
    command = [sys.executable, "scripts/check_tpu.py", *matches, "--json", str(output)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(output.read_text())
    assert {row["chip"] for row in rows} == {"v5e", "v6e", "v5p", "tpu7x"}
    # Two attentions, one cache write, one ring, one training attention, one draw and one packed
    # product on each.
    assert len(rows) == 4 * 7
    assert all(row["vmem"] < 16 * 2**20 and not row["trouble"] for row in rows)
