"""Answers in parts, as gpt-oss writes them: its reasoning on one channel, what it says on another.

The harmony format frames each message with special tokens:
`<|start|>assistant<|channel|>analysis<|message|>...<|end|>`. A model writes so if its tokenizer has
these tokens; what stands before a message is a header, not text.
"""

from __future__ import annotations

import dataclasses
from typing import Any

_MARKS = ("<|start|>", "<|channel|>", "<|message|>")
_ENDS = ("<|end|>", "<|return|>", "<|call|>")
# What a message is on that names no channel.
UNNAMED = "final"


@dataclasses.dataclass(frozen=True)
class Part:
    """A message of an answer: "analysis" is reasoning, "final" what is said to the user,
    "commentary" mostly calls of tools."""

    channel: str
    text: str


@dataclasses.dataclass(frozen=True)
class ChannelTokens:
    """Ids of the tokens that frame messages."""

    start: int
    channel: int
    message: int
    ends: frozenset[int]

    @classmethod
    def of(cls, tokenizer: Any) -> ChannelTokens | None:
        """Those of a tokenizer, None where its model does not write in channels."""
        known: dict[str, int] = getattr(tokenizer, "get_added_vocab", dict)()
        if not all(mark in known for mark in _MARKS):
            return None
        ends = frozenset(known[end] for end in _ENDS if end in known)
        start, channel, message = (known[mark] for mark in _MARKS)
        return cls(start, channel, message, ends)


class Headers:
    """Tells headers from text, token by token."""

    def __init__(self, tokens: ChannelTokens) -> None:
        self._tokens = tokens
        self._channel: list[int] | None = None  # ids after <|channel|>, of a header
        self._inside = False

    def push(self, token: int) -> list[int] | None:
        """None for a token of text or of a header that goes on; where the message of a header
        begins, the ids that name its channel. Look at `inside` after it."""
        tokens = self._tokens
        if token in (tokens.start, tokens.channel) or token in tokens.ends:
            self._inside = True
            self._channel = [] if token == tokens.channel else None
        elif self._inside and token == tokens.message:
            self._inside = False
            return self._channel or []
        elif self._inside and self._channel is not None:
            self._channel.append(token)
        return None

    @property
    def inside(self) -> bool:
        """Whether the last token belongs to a header, or to what is between two messages."""
        return self._inside


def channel_name(header: str) -> str:
    """The channel that a header names; behind it may stand whom a message is for."""
    words = header.split()
    return words[0] if words else UNNAMED
