"""Sampling parameters in a JSON object, under the names of one format or another."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from peagle_jax.config import SamplingParams
from peagle_jax.errors import InputError
from peagle_jax.json_values import shown


def read_sampling(
    values: Mapping[str, Any], names: Mapping[str, str], defaults: SamplingParams, where: str
) -> SamplingParams:
    """`defaults`, changed by what an object has under `names`; null is as good as absent.

    names: key of the object -> field of SamplingParams. Raises InputError that begins with
    `where` and names the key; also where two keys give one field.
    """
    chosen: dict[str, Any] = {}
    for key, field in names.items():
        value = values.get(key)
        if value is None:
            continue
        check, make, expected = _KINDS[field]
        if not check(value):
            raise InputError(f"{where}: {key}: found {shown(value)}, expected {expected}")
        if field in chosen:
            raise InputError(f"{where}: {key}: found another key for {field} too, expected one")
        chosen[field] = make(value)
    try:
        return dataclasses.replace(defaults, **chosen)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


def _is_integer(value: Any) -> bool:
    return type(value) is int


def _is_number(value: Any) -> bool:
    return type(value) is float or (type(value) is int and abs(value) < 2**53)


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_stop(value: Any) -> bool:
    return isinstance(value, str) or (
        isinstance(value, list) and all(isinstance(one, str) for one in value)
    )


def _texts(value: str | list[str]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


# Field -> what its value must be, what is made of it, and how an error says so.
_Kind = tuple[Callable[[Any], bool], Callable[[Any], Any], str]
_INTEGER: _Kind = (_is_integer, int, "an integer")
_NUMBER: _Kind = (_is_number, float, "a number")
_KINDS: dict[str, _Kind] = {
    "max_new_tokens": _INTEGER,
    "temperature": _NUMBER,
    "top_k": _INTEGER,
    "top_p": _NUMBER,
    "min_p": _NUMBER,
    "seed": _INTEGER,
    "stop": (_is_stop, _texts, "a string or a list of strings"),
    "ignore_eos": (_is_flag, bool, "true or false"),
}

# The fields under their own names.
OWN_NAMES: dict[str, str] = {field: field for field in _KINDS}
