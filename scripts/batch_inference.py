#!/usr/bin/env python3
"""`peagle batch` from a checkout: the same options, the same results."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from peagle_jax.cli import main

if __name__ == "__main__":
    sys.exit(main(["batch", *sys.argv[1:]]))
