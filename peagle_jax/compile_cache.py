"""JAX's persistent compilation cache, on by default in the user's cache folder."""

from __future__ import annotations

import os
from pathlib import Path

import jax


def enable() -> None:
    """Switch the cache on, unless the user chose another folder or none.

    JAX's own settings win: `JAX_COMPILATION_CACHE_DIR` moves it and
    `JAX_ENABLE_COMPILATION_CACHE=false` switches it off.
    """
    chosen = getattr(jax.config, "jax_compilation_cache_dir", None)
    if chosen or "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def cache_folder() -> Path:
    """Where things are kept that can be made again: the user's cache folder of this package."""
    from platformdirs import user_cache_dir

    return Path(user_cache_dir("peagle-jax"))
