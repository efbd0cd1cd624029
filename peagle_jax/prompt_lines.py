"""A prompt from a line of JSON: a string, or an object with one of three keys."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from peagle_jax.errors import InputError
from peagle_jax.json_values import shown

JsonPrompt = str | list[dict[str, str]] | list[int]


def parse_line(line: str | bytes, where: str) -> Any:
    """The JSON value of a line. Raises InputError that begins with `where`."""
    try:
        return json.loads(line if isinstance(line, str) else line.decode())
    except json.JSONDecodeError as error:
        raise InputError(f"{where}: found invalid JSON ({error.msg})") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{where}: found bytes that are not UTF-8 ({error.reason})") from None
    except (ValueError, RecursionError) as error:  # an integer of too many digits; too deep
        raise InputError(f"{where}: found invalid JSON ({error})") from None


def find_prompt(value: Any, where: str) -> JsonPrompt:
    """The prompt in a line's value.

    The value is a string, or an object with exactly one of the keys `prompt` (a string),
    `messages` (a list of {"role", "content"}) and `token_ids` (a list of integers from 0).
    Raises InputError that begins with `where`.
    """
    if isinstance(value, str):
        check_text(value, where)
        return value
    if not isinstance(value, dict):
        raise InputError(f"{where}: found {shown(value)}, expected a string or an object")
    present = [key for key in PROMPT_KEYS if key in value]
    if len(present) != 1:
        found = " and ".join(present) or "none of them"
        raise InputError(
            f"{where}: found {found}, expected exactly one of {', '.join(PROMPT_KEYS)}"
        )
    (key,) = present
    check, expected = PROMPT_KEYS[key]
    prompt: JsonPrompt = value[key]
    if not check(prompt):
        raise InputError(f"{where}: {key}: found {shown(prompt)}, expected {expected}")
    if isinstance(prompt, str):
        check_text(prompt, f"{where}: {key}")
    elif not prompt:
        raise InputError(f"{where}: {key}: found an empty list, expected {expected}")
    for turn in prompt if key == "messages" else ():
        check_text(turn["content"], f"{where}: {key}", empty=True)  # type: ignore[index]
    return prompt


def check_text(text: str, where: str, *, empty: bool = False) -> None:
    """Raises InputError for text that no tokenizer takes, and unless `empty` for none at all."""
    if not text and not empty:
        raise InputError(f"{where}: found an empty prompt, expected text")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"{where}: found half a character at {error.start} (U+{ord(text[error.start]):04X}), "
            "expected Unicode text"
        ) from None


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def is_messages(value: Any) -> bool:
    """Whether a value is a list of chat messages, each with a role and its text."""
    return isinstance(value, list) and all(
        isinstance(turn, dict)
        and isinstance(turn.get("role"), str)
        and isinstance(turn.get("content"), str)
        for turn in value
    )


def is_token_ids(value: Any) -> bool:
    """Whether a value is a list of integers from 0."""
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


# Key -> what its value must be, and how an error says so.
PROMPT_KEYS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "prompt": (_is_text, "a string"),
    "messages": (is_messages, 'a list of {"role": string, "content": string}'),
    "token_ids": (is_token_ids, "a list of integers from 0"),
}
