"""Tuned block sizes: one JSON table for all kernels, written by `python -m pallas_kernels.tune`.

    {"NVIDIA H200": {"verify_attention/verify/d128/bfloat16": {"slots": 64, "warps": 4}}}

An entry holds the fields that replace a heuristic's. Where there is none the heuristic stands.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_name("tuned.json")


@functools.cache
def table() -> dict[str, dict[str, dict[str, Any]]]:
    """The table by device kind, then by kernel and size; empty where none was written."""
    return json.loads(TABLE.read_text(encoding="utf-8")) if TABLE.exists() else {}


def lookup(device_kind: str, key: str) -> dict[str, Any]:
    """The tuned fields of a kernel's size on a kind of device, {} where there are none."""
    return table().get(device_kind, {}).get(key, {})
