"""JAX's persistent compilation cache, on by default in the user's cache folder."""

from __future__ import annotations

import os

import jax


def enable() -> None:
    """Switch the cache on, unless the user chose another folder or none.

    JAX's own settings win: `JAX_COMPILATION_CACHE_DIR` moves it and
    `JAX_ENABLE_COMPILATION_CACHE=false` switches it off.
    """
    if jax.config.jax_compilation_cache_dir or "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    from platformdirs import user_cache_dir

    jax.config.update("jax_compilation_cache_dir", os.path.join(user_cache_dir("peagle-jax"), "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
