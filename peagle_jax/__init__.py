"""P-EAGLE speculative decoding in JAX.

    import peagle_jax as pj
    pair = pj.load("smollm2")
    out = pj.generate(pair, "Why is the sky blue?", pj.SamplingParams(max_new_tokens=64))

Names are imported when first used, so that `import peagle_jax` is instant.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from peagle_jax.api import generate, load, stream
    from peagle_jax.config import DrafterConfig, ModelConfig, SamplingParams
    from peagle_jax.decoding.generate import jit_generate_tokens as generate_tokens
    from peagle_jax.decoding.sampling import RequestArrays
    from peagle_jax.decoding.speculate import Speculator
    from peagle_jax.errors import InputError
    from peagle_jax.metrics import GenerationStats
    from peagle_jax.runner import Output, Pair

_HOMES = {
    "generate": "peagle_jax.api",
    "load": "peagle_jax.api",
    "stream": "peagle_jax.api",
    "DrafterConfig": "peagle_jax.config",
    "ModelConfig": "peagle_jax.config",
    "SamplingParams": "peagle_jax.config",
    "generate_tokens": "peagle_jax.decoding.generate",
    "RequestArrays": "peagle_jax.decoding.sampling",
    "Speculator": "peagle_jax.decoding.speculate",
    "InputError": "peagle_jax.errors",
    "GenerationStats": "peagle_jax.metrics",
    "Output": "peagle_jax.runner",
    "Pair": "peagle_jax.runner",
}

__all__ = [
    "DrafterConfig",
    "GenerationStats",
    "InputError",
    "ModelConfig",
    "Output",
    "Pair",
    "RequestArrays",
    "SamplingParams",
    "Speculator",
    "generate",
    "generate_tokens",
    "load",
    "stream",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'peagle_jax' has no attribute {name!r}")
    attribute = "jit_generate_tokens" if name == "generate_tokens" else name
    return getattr(importlib.import_module(_HOMES[name]), attribute)
