"""JSON values as error messages show them, and in what two of them differ."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

_MOST = 40  # characters of a value that a message shows


def shown(value: Any) -> str:
    """A value as JSON, cut where it is long."""
    text = json.dumps(value)
    return text if len(text) <= _MOST else f"{text[: _MOST - 3]}..."


def found_under(values: dict[str, Any], name: str) -> str:
    """The part of a message that says what an object has under a key."""
    return f"found {shown(values[name])}" if name in values else "found none"


def differences(left: Any, right: Any, key: str = "") -> Iterator[tuple[str, str, str]]:
    """(dotted key, value of `left`, value of `right`) wherever two JSON values differ.

    The values are as `shown` gives them, "none" where a side does not have the key.
    """
    if isinstance(left, dict) and isinstance(right, dict):
        for name in sorted(left.keys() | right.keys()):
            path = f"{key}.{name}" if key else name
            if name in left and name in right:
                yield from differences(left[name], right[name], path)
            else:
                yield path, found_under(left, name)[6:], found_under(right, name)[6:]
    elif left != right:
        yield key, shown(left), shown(right)
