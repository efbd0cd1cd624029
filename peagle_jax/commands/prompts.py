"""Prompts from a JSON Lines file: strings, chat messages or token ids, one a line."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from peagle_jax.errors import InputError

Prompt = str | list[dict[str, str]] | list[int]


@dataclasses.dataclass(frozen=True)
class Record:
    """A line of a prompts file; `id` is the line's number where it has none."""

    prompt: Prompt
    id: str
    category: str | None
    source: str | None


def read_prompts(path: Path) -> list[Prompt]:
    """The prompts of a JSON Lines file, in its order; empty lines are skipped.

    A line is a JSON string, or an object with exactly one of the keys `prompt` (a string),
    `messages` (a list of {"role", "content"}) and `token_ids` (a list of integers); its
    other keys are ignored. Raises InputError naming the file, line and key.
    """
    return [prompt for _, _, prompt in _read(path)]


def read_records(path: Path) -> list[Record]:
    """`read_prompts`, with the keys `id` (a string or an integer), `category` and `source`
    (strings)."""
    records = []
    for where, value, prompt in _read(path):
        keys = value if isinstance(value, dict) else {}
        name = keys.get("id")
        if name is not None and type(name) not in (str, int):
            raise InputError(f"{where}: id: found {_kind(name)}, expected a string or an integer")
        for key in ("category", "source"):
            if not isinstance(keys.get(key, ""), str):
                raise InputError(f"{where}: {key}: found {_kind(keys[key])}, expected a string")
        number = where.rpartition(":")[2]
        name = number if name is None else str(name)
        records.append(Record(prompt, name, keys.get("category"), keys.get("source")))
    return records


def _read(path: Path) -> list[tuple[str, Any, Prompt]]:
    """(file:line, the line's value, its prompt) of every line that is not empty."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: found bytes that are not UTF-8 ({error.reason})") from None
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}, expected a JSON Lines file") from None
    lines = [
        (where := f"{path}:{number}", *_parse(line, where))
        # Not splitlines: JSON strings may hold other line separators as they are.
        for number, line in enumerate(text.split("\n"), start=1)
        if line.strip()
    ]
    if not lines:
        raise InputError(f"{path}: found no prompts, expected one a line")
    return lines


def _parse(line: str, where: str) -> tuple[Any, Prompt]:
    """The value of a line and the prompt in it."""
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(f"{where}: found invalid JSON ({error.msg})") from None
    if isinstance(value, str):
        return value, value
    if not isinstance(value, dict):
        raise InputError(f"{where}: found {_kind(value)}, expected a string or an object")
    present = [key for key in _SHAPES if key in value]
    if len(present) != 1:
        found = " and ".join(present) or "none of them"
        raise InputError(f"{where}: found {found}, expected exactly one of {', '.join(_SHAPES)}")
    (key,) = present
    check, expected = _SHAPES[key]
    prompt: Prompt = value[key]
    if not check(prompt):
        raise InputError(f"{where}: {key}: found {_kind(prompt)}, expected {expected}")
    return value, prompt


def _kind(value: Any) -> str:
    shown = json.dumps(value)
    return shown if len(shown) <= 40 else f"{shown[:37]}..."


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_messages(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(turn, dict)
        and isinstance(turn.get("role"), str)
        and isinstance(turn.get("content"), str)
        for turn in value
    )


def _is_token_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


_SHAPES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "prompt": (_is_text, "a string"),
    "messages": (_is_messages, 'a list of {"role": string, "content": string}'),
    "token_ids": (_is_token_ids, "a list of integers from 0"),
}
