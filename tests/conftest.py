"""What every test runs under: the CPU, checked shapes, quiet logs.

Nothing here may import peagle_jax or jax at module level before the settings below: the
import hook checks only what is imported after it, and jax reads its platform once.
"""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Compiled programs are kept with the checkout, not in the user's cache folder.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache" / "xla"))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from jaxtyping import install_import_hook  # noqa: E402  # after the settings above

# Shapes and dtypes in signatures are checked at run time here, and only here.
install_import_hook(["peagle_jax", "pallas_kernels"], "beartype.beartype")
