"""Where the files that ship with the package are."""

from __future__ import annotations

import importlib.resources
from pathlib import Path

from peagle_jax.errors import InputError


def path(name: str) -> Path:
    """The folder `name` of the shipped checkpoints, in an installed wheel or a source checkout.

    A wheel carries `checkpoints/` as `peagle_jax/_checkpoints`; in a checkout it lies
    beside the package. Raises InputError where neither has `name`.
    """
    package = Path(str(importlib.resources.files("peagle_jax")))
    candidates = [package / "_checkpoints" / name, package.parent / "checkpoints" / name]
    for candidate in candidates:
        if candidate.is_dir():
            return candidate
    raise InputError(
        f"{name}: found no such shipped checkpoint, expected a folder {candidates[0]} "
        f"or {candidates[1]}"
    )
