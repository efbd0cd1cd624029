"""Between text and token ids: encoding prompts, decoding piece by piece, stop strings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from peagle_jax.channels import ChannelTokens, Headers, Part, channel_name
from peagle_jax.errors import InputError
from peagle_jax.prompt_lines import check_text

# A string, a chat (list of {"role", "content"}), or token ids.
Prompt = str | Sequence[Mapping[str, str]] | Sequence[int] | Sequence[np.integer] | np.ndarray

_BETWEEN = "\n\n"  # between two messages of an answer in channels
_UNFINISHED = "\ufffd"  # what a tokenizer decodes half a character to


def encode_prompt(tokenizer: Any, prompt: Prompt, *, raw: bool, where: str = "prompt") -> list[int]:
    """Token ids of a prompt, the chat template applied to strings unless `raw`.

    `where` names the prompt in errors. Raises InputError for an empty or malformed one.
    """
    if isinstance(prompt, str):
        check_text(prompt, where)
        _need_tokenizer(tokenizer, where)
        if raw or not getattr(tokenizer, "chat_template", None):
            return _not_empty(tokenizer(prompt)["input_ids"], where)
        return encode_prompt(tokenizer, [{"role": "user", "content": prompt}], raw=raw, where=where)
    if isinstance(prompt, np.ndarray) and prompt.ndim == 1:
        prompt = prompt.tolist()
    if not isinstance(prompt, Sequence) or not prompt:
        raise InputError(f"{where}: found {prompt!r}, expected text, chat messages or token ids")
    if all(isinstance(item, Mapping) for item in prompt):
        for message in prompt:
            if not {"role", "content"} <= message.keys():  # type: ignore[union-attr]
                raise InputError(f"{where}: found message {message!r}, expected role and content")
            if isinstance(message["content"], str):  # type: ignore[index]
                check_text(message["content"], where, empty=True)  # type: ignore[index]
        _need_tokenizer(tokenizer, where)
        if not getattr(tokenizer, "chat_template", None):
            raise InputError(
                f"{where}: found chat messages, but the tokenizer has no chat template"
            )
        ids = tokenizer.apply_chat_template(
            list(prompt), add_generation_prompt=True, tokenize=True, return_dict=False
        )
        return _not_empty(ids, where)
    if all(isinstance(item, (int, np.integer)) and not isinstance(item, bool) for item in prompt):
        return [int(item) for item in cast("Sequence[int]", prompt)]
    raise InputError(f"{where}: found mixed items, expected text, chat messages or token ids")


def _need_tokenizer(tokenizer: Any, where: str) -> None:
    if tokenizer is None:
        raise InputError(f"{where}: found text, but no tokenizer is loaded; expected token ids")


def _not_empty(ids: Sequence[int], where: str) -> list[int]:
    if not ids:
        raise InputError(f"{where}: found no tokens, expected at least one")
    return list(ids)


class TextStream:
    """Turns a growing list of token ids into text, and ends it at a stop string.

    Decoding ids one by one loses the spaces and characters that span tokens, so a
    piece is the difference of two decodings that share the few ids before it; half
    a character waits for the rest of it.

    Of an answer in channels (see `channels`) the text is that of its messages, an empty line
    between two.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._ids: list[int] = []
        self._anchor = 0  # ids from here on are decoded again for context
        self._read = 0  # ids up to here are in the text
        self.text = ""
        self.stopped = False
        tokens = ChannelTokens.of(tokenizer)
        self._headers = Headers(tokens) if tokens else None
        self._starts: list[tuple[str, int]] = []  # channel, and where its message begins

    @property
    def num_ids(self) -> int:
        """Token ids taken in so far, the one that completed a stop string included."""
        return len(self._ids)

    def push(self, ids: Sequence[int]) -> None:
        """Take in more ids; after a stop string was completed the rest is ignored."""
        for token in ids:
            if self.stopped:
                return
            self._ids.append(token)
            if self._headers is None:
                self._extend(final=False)
            else:
                self._push_framed(token, self._headers)

    def finish(self) -> None:
        """No more ids will come: half characters are given out as they are."""
        if not self.stopped and not (self._headers and self._headers.inside):
            self._extend(final=True)

    @property
    def parts(self) -> tuple[Part, ...]:
        """The messages so far of an answer in channels; of any other none."""
        if not self._starts:
            return ()
        ends = [start - len(_BETWEEN) for _, start in self._starts[1:]] + [len(self.text)]
        return tuple(
            Part(channel, self.text[start : max(start, end)])
            for (channel, start), end in zip(self._starts, ends, strict=True)
            if start <= len(self.text)
        )

    def channel_ends(self) -> list[tuple[str | None, int]]:
        """Where the text of each channel ends, what separates it from the next included."""
        if not self._starts:
            return [(None, len(self.text))]
        ends = [start for _, start in self._starts[1:]] + [len(self.text)]
        return [(channel, end) for (channel, _), end in zip(self._starts, ends, strict=True)]

    def _push_framed(self, token: int, headers: Headers) -> None:
        before = headers.inside
        begun = headers.push(token)
        if headers.inside and not before:
            # The message is over: what is left of its last character will not come.
            self._ids.pop()
            self._extend(final=True)
            self._ids.append(token)
        if headers.inside or begun is not None:
            self._anchor = self._read = len(self._ids)
        if begun is not None:
            if self.text:
                self.text += _BETWEEN
            self._starts.append((channel_name(self._decode(begun)), len(self.text)))
        elif not headers.inside:
            self._extend(final=False)

    def safe_length(self) -> int:
        """How much of `text` can be shown now: the rest may be the start of a stop string."""
        if self.stopped:
            return len(self.text)
        held = 0
        for stop in self._stop:
            for size in range(min(len(stop) - 1, len(self.text)), held, -1):
                if self.text.endswith(stop[:size]):
                    held = size
                    break
        return len(self.text) - held

    def _decode(self, ids: Sequence[int]) -> str:
        if self._tokenizer is None:
            return ""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def _extend(self, *, final: bool) -> None:
        before = self._decode(self._ids[self._anchor : self._read])
        whole = self._decode(self._ids[self._anchor :])
        if len(whole) <= len(before) or (whole.endswith(_UNFINISHED) and not final):
            return
        scanned = len(self.text)
        self.text += whole[len(before) :]
        self._anchor, self._read = self._read, len(self._ids)
        ends = []
        for stop in self._stop:
            at = self.text.find(stop, max(0, scanned - len(stop) + 1))
            if at >= 0:
                ends.append(at)
        if ends:
            self.text = self.text[: min(ends)]
            self.stopped = True
