"""Rotary embeddings in config.json, in both of their homes, to RopeConfig and back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, get_args

from peagle_jax.config import RopeConfig, RopeKind
from peagle_jax.errors import InputError

_ORIGINAL = "original_max_position_embeddings"
# Numbers that a kind cannot do without.
_NEEDED: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL),
    "yarn": ("factor", _ORIGINAL),
}


def rope_config(config: Mapping[str, Any], where: str) -> RopeConfig:
    """From `rope_parameters`, or its older homes `rope_theta` and `rope_scaling`.

    Raises InputError on an unknown kind and on missing numbers.
    """
    home = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    rope: Mapping[str, Any] = config.get(home) or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in get_args(RopeKind) or any(isinstance(v, Mapping) for v in rope.values()):
        raise InputError(
            f"{where}: {home}: found rope type {kind!r}, "
            f"expected one of {', '.join(get_args(RopeKind))} for all layers"
        )
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise InputError(f"{where}: partial_rotary_factor: found {partial}, expected 1.0")
    for key in _NEEDED[kind]:
        if not isinstance(rope.get(key), int | float):
            raise InputError(f"{where}: {home}.{key}: found {rope.get(key)!r}, expected a number")
    numbers: dict[str, Any] = {key: float(rope[key]) for key in _NEEDED[kind] if key != _ORIGINAL}
    if _ORIGINAL in _NEEDED[kind]:
        numbers["original_max_positions"] = int(rope[_ORIGINAL])
    if kind == "yarn":
        numbers |= {
            "beta_fast": float(rope.get("beta_fast") or 32),
            "beta_slow": float(rope.get("beta_slow") or 1),
            "truncate": bool(rope.get("truncate", True)),
            "attention_factor": _attention_factor(rope),
        }
    theta = float(rope.get("rope_theta") or config.get("rope_theta") or 10_000.0)
    return RopeConfig(theta=theta, kind=kind, **numbers)


def _attention_factor(rope: Mapping[str, Any]) -> float:
    """YaRN's scale of cosines and sines, where it is not given: grows with log(factor)."""
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(rope["factor"]) + 1 if rope["factor"] > 1 else 1.0

    weight, of_all = rope.get("mscale"), rope.get("mscale_all_dim")
    return scale(float(weight)) / scale(float(of_all)) if weight and of_all else scale(1.0)


def rope_json(rope: RopeConfig) -> dict[str, Any]:
    """The keys of a config.json that `rope_config`, transformers and vLLM read as `rope`."""
    written: dict[str, Any] = {"rope_theta": rope.theta}
    if rope.kind == "default":
        return written
    scaling: dict[str, Any] = {"rope_type": rope.kind, "factor": rope.factor}
    if rope.kind == "llama3":
        scaling |= {
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
        }
    if rope.kind == "yarn":
        scaling |= {
            "beta_fast": rope.beta_fast,
            "beta_slow": rope.beta_slow,
            "truncate": rope.truncate,
            "attention_factor": rope.attention_factor,
        }
    if _ORIGINAL in _NEEDED[rope.kind]:
        scaling[_ORIGINAL] = rope.original_max_positions
    return written | {"rope_scaling": scaling}
