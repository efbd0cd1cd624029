"""What every test runs under: the CPU, checked shapes, quiet logs.

Nothing here may import peagle_jax or jax at module level before the settings below: the
import hook checks only what is imported after it, and jax reads its platform once.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Compiled programs are kept with the checkout, not in the user's cache folder.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache" / "xla"))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import flax.struct  # noqa: E402  # after the settings above
import jax  # noqa: E402
import pytest  # noqa: E402
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

MAPS = Path("/proc/self/maps")
MANY_MAPS = 20_000


@pytest.fixture(autouse=True, scope="module")
def _memory_maps_left() -> Iterator[None]:
    """Every compiled program takes memory maps, of which Linux gives a process 65,530: past them
    compiling ends in a segmentation fault. What a module compiled is dropped before that."""
    yield
    if MAPS.exists() and MAPS.read_bytes().count(b"\n") > MANY_MAPS:
        gc.collect()
        jax.clear_caches()
        gc.collect()
