"""Configurations as JSON, and where the files of a conversion came from."""

from __future__ import annotations

import dataclasses
import hashlib
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from peagle_jax.config import DrafterConfig, ModelConfig
from peagle_jax.errors import InputError

_READ_BYTES = 4 << 20

CONFIGS: dict[str, type] = {"target": ModelConfig, "drafter": DrafterConfig}


def config_to_json(config: ModelConfig | DrafterConfig) -> dict[str, Any]:
    """A configuration as plain JSON values."""
    return dataclasses.asdict(config)


def config_from_json(kind: type, values: Any, where: str) -> Any:
    """The dataclass `kind` back from `config_to_json`'s values.

    Raises InputError on a missing, unknown or wrongly typed key.
    """
    if not isinstance(values, Mapping):
        raise InputError(f"{where}: found {values!r}, expected an object")
    hints = typing.get_type_hints(kind)
    unknown = sorted(set(values) - set(hints))
    if unknown:
        raise InputError(f"{where}: {unknown[0]}: found and not understood, expected no such key")
    try:
        return kind(**{k: _value(hints[k], v, f"{where}: {k}") for k, v in values.items()})
    except TypeError as error:
        raise InputError(f"{where}: found {error}, expected a whole configuration") from None


def _value(hint: Any, value: Any, where: str) -> Any:
    origin = typing.get_origin(hint)
    plain: tuple[Any, ...] = (hint,)
    if origin in (typing.Union, types.UnionType):
        plain = typing.get_args(hint)
    nested = next((kind for kind in plain if dataclasses.is_dataclass(kind)), None)
    if isinstance(nested, type) and not (value is None and type(None) in plain):
        return config_from_json(nested, value, where)
    if origin is tuple and isinstance(value, list):
        return tuple(value)
    if origin is typing.Literal:
        plain = (str,)
    if float in plain:
        plain += (int,)
    if not isinstance(value, plain) or (isinstance(value, bool) and bool not in plain):
        raise InputError(f"{where}: found {value!r}, expected {getattr(hint, '__name__', hint)}")
    return value


def describe_file(path: Path, advance: Callable[[int], None]) -> dict[str, Any]:
    """Name, size in bytes and SHA-256 of a file; `advance(bytes)` is called as it is read."""
    digest, buffer = hashlib.sha256(), memoryview(bytearray(_READ_BYTES))
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(buffer):
            digest.update(buffer[:size])
            advance(size)
    return {"name": path.name, "size": path.stat().st_size, "sha256": digest.hexdigest()}
