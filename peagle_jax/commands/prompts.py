"""Prompts from a JSON Lines file: strings, chat messages or token ids, one a line."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from peagle_jax.errors import InputError
from peagle_jax.json_values import shown
from peagle_jax.prompt_lines import JsonPrompt, find_prompt, parse_line


@dataclasses.dataclass(frozen=True)
class Record:
    """A line of a prompts file; `id` is the line's number where it has none."""

    prompt: JsonPrompt
    id: str
    category: str | None
    source: str | None = None
    answer: str | None = None


def read_prompts(path: Path) -> tuple[list[JsonPrompt], list[str]]:
    """The prompts of a JSON Lines file, in its order, and what errors call them, "file:line";
    empty lines are skipped.

    A line is a JSON string, or an object with exactly one of the keys `prompt` (a string),
    `messages` (a list of {"role", "content"}) and `token_ids` (a list of integers); its
    other keys are ignored. Raises InputError naming the file, line and key.
    """
    lines = _read(path)
    return [prompt for _, _, prompt in lines], [where for where, _, _ in lines]


def read_records(path: Path) -> list[Record]:
    """`read_prompts`, with the keys `id` (a string or an integer), `category`, `source` and
    `answer` (strings)."""
    records = []
    for where, value, prompt in _read(path):
        keys = value if isinstance(value, dict) else {}
        name = keys.get("id")
        if name is not None and type(name) not in (str, int):
            raise InputError(f"{where}: id: found {shown(name)}, expected a string or an integer")
        for key in ("category", "source", "answer"):
            if not isinstance(keys.get(key, ""), str):
                raise InputError(f"{where}: {key}: found {shown(keys[key])}, expected a string")
        number = where.rpartition(":")[2]
        name = number if name is None else str(name)
        texts = (keys.get(key) for key in ("category", "source", "answer"))
        records.append(Record(prompt, name, *texts))
    return records


def _read(path: Path) -> list[tuple[str, Any, JsonPrompt]]:
    """(file:line, the line's value, its prompt) of every line that is not empty."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: found bytes that are not UTF-8 ({error.reason})") from None
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}, expected a JSON Lines file") from None
    lines = [
        (where := f"{path}:{number}", value := parse_line(line, where), find_prompt(value, where))
        # Not splitlines: JSON strings may hold other line separators as they are.
        for number, line in enumerate(text.split("\n"), start=1)
        if line.strip()
    ]
    if not lines:
        raise InputError(f"{path}: found no prompts, expected one a line")
    return lines
