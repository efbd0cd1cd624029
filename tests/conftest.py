"""What every test runs under: the CPU, checked shapes, quiet logs.

Nothing here may import peagle_jax or jax at module level before the settings below: the
import hook checks only what is imported after it, and jax reads its platform once.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Compiled programs are kept with the checkout, not in the user's cache folder.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache" / "xla"))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import flax.struct  # noqa: E402  # after the settings above
from jaxtyping import install_import_hook  # noqa: E402


def unchecked_pytree(cls: type, _dataclass: Any = flax.struct.dataclass) -> type:
    """flax.struct.dataclass, its fields left unchecked: lowering a function rebuilds its pytrees
    with descriptions of arrays in their place."""
    made = _dataclass(cls)
    made.__no_type_check__ = True
    return made


flax.struct.dataclass = unchecked_pytree  # type: ignore[assignment]
# Shapes and dtypes in signatures are checked at run time here, and only here.
install_import_hook(["peagle_jax", "pallas_kernels"], "beartype.beartype")
