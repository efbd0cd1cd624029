"""Distilled answers: the format of a folder of a target's own answers, its writer and reader.

A folder holds `answers.jsonl`, one JSON object a line with the fields of `Answer`, and
`meta.json`, one object with the fields of `AnswersMeta`. Lines are only ever added, a batch
at a time, so that a run that was stopped goes on where it was; whatever is not a whole line
at the end of the file is what a stopped run left of its last batch.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import weakref
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from peagle_jax.convert.base_reader import one_line, read_json
from peagle_jax.durable_lines import DurableLines
from peagle_jax.errors import InputError
from peagle_jax.files import Closing, replace_file
from peagle_jax.json_values import differences, found_under

ANSWERS = "answers.jsonl"
META = "meta.json"
FORMAT = 1

FinishReason = Literal["stop", "length"]
Messages = list[dict[str, str]]


@dataclasses.dataclass(frozen=True)
class Answer:
    """One prompt and what the target answered, both as token ids.

    prompt_ids: at least one, chat template and its special tokens included.
    answer_ids: as generated, so with the end-of-sequence token where finish_reason is "stop".
    finish_reason: "stop" = the target ended it, "length" = max_new_tokens did.
    source, category: where the prompt is from and what it is about; free text.
    prompt: as it was given: a string, or chat messages; None where it was token ids.
    text: the answer as text, for people to read.
    """

    id: str
    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    finish_reason: FinishReason
    source: str = ""
    category: str = ""
    prompt: str | Messages | None = None
    text: str = ""


@dataclasses.dataclass(frozen=True)
class AnswersMeta:
    """What all answers of a folder have in common.

    model: the target, as the user named it.
    tokenizer_sha256: `tokenizer_sha256` of its tokenizer.
    vocab_size: of the target; token ids are below it.
    sampling: how answers were drawn: names to JSON values.
    max_new_tokens: the most tokens an answer was given.
    """

    model: str
    tokenizer_sha256: str
    vocab_size: int
    sampling: dict[str, Any]
    max_new_tokens: int
    format: int = FORMAT


def tokenizer_sha256(tokenizer: Any) -> str:
    """SHA-256, in hex, of what each id of a transformers tokenizer stands for.

    It is taken over the vocabulary with its added tokens, in the order of ids, so that one
    tokenizer read from tokenizer.json and from a GGUF file is one tokenizer.
    """
    vocabulary = sorted((index, token) for token, index in tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()


def read_meta(folder: Path) -> AnswersMeta:
    """The meta.json of a folder of answers. Raises InputError naming the file and the key."""
    path = folder / META
    if not path.exists():
        raise InputError(f"{path}: found none, expected a folder that `peagle distill` wrote")
    found = read_json(path)
    if found.get("format") != FORMAT:
        raise InputError(f"{path}: format: found {found.get('format')!r}, expected {FORMAT}")
    for name, check, expected in _META_FIELDS:
        if not check(found.get(name)):
            raise InputError(f"{path}: {name}: {found_under(found, name)}, expected {expected}")
    return AnswersMeta(**{field.name: found[field.name] for field in _fields(AnswersMeta)})


class AnswersFile:
    """Answers of a folder by their index, read from the file when asked for.

    Only the offset of every line is in memory (8 bytes each). Answers added after the file
    was opened are not seen. Reading is safe from several threads at once.

    Attributes:
        path: the answers.jsonl.
        meta: the folder's meta.json.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        """Raises InputError where the folder is not one of answers."""
        self.path = Path(folder) / ANSWERS
        self.meta = read_meta(Path(folder))
        self._offsets = array("q", [0])
        try:
            self._handle = os.open(self.path, os.O_RDONLY)
            weakref.finalize(self, os.close, self._handle)
            with self.path.open("rb") as file:
                for line in file:
                    self._offsets.append(self._offsets[-1] + len(line))
        except OSError as error:
            raise InputError(f"{self.path}: found {one_line(error)}, expected answers") from None

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, index: int) -> Answer:
        """The answer of line `index + 1`. Raises InputError where that line is not one."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"{self.path}: answer {index} of {len(self)}")
        index %= len(self)
        start, stop = self._offsets[index], self._offsets[index + 1]
        line = os.pread(self._handle, stop - start, start)
        return parse_answer(line, self.where(index), self.meta.vocab_size)

    def __iter__(self) -> Iterator[Answer]:
        return (self[index] for index in range(len(self)))

    def where(self, index: int) -> str:
        """File and line of an answer, as error messages name it."""
        return f"{self.path}:{index + 1}"


class AnswersWriter(Closing):
    """Adds answers to a folder, durably; a context manager.

    Opening makes the folder or goes on with one that is there: what a stopped run left of a
    line is cut off, and `ids` are those of the answers that are there. Two processes cannot
    write to one folder at a time.

    Attributes:
        ids: ids of all answers in the folder, also of those added since.
    """

    def __init__(self, folder: str | os.PathLike[str], meta: AnswersMeta) -> None:
        """Raises InputError where the folder has another meta, or a line that is not an
        answer, or is being written to by another process."""
        self._folder = Path(folder)
        self.path = self._folder / ANSWERS
        self.ids: set[str] = set()

        def read(line: bytes, where: str) -> None:
            one = parse_answer(line, where, meta.vocab_size).id
            if one in self.ids:
                raise InputError(f"{where}: id: found {one!r} twice, expected once")
            self.ids.add(one)

        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._lines = DurableLines(self.path)
        except OSError as error:
            raise InputError(
                f"{self._folder}: found {one_line(error)}, expected a folder that can be written"
            ) from None
        try:
            self._open_meta(meta)
            self._lines.recover(read)
        except BaseException:
            self.close()
            raise

    def append(self, answers: Sequence[Answer]) -> None:
        """Adds a batch; when this returns it is on the disk.

        Raises InputError for an id that is already there, before anything is written, and
        OSError where the disk does not take the batch; then none of it is in the file.
        """
        ids = [answer.id for answer in answers]
        for place, one in enumerate(ids):
            if one in self.ids or one in ids[:place]:
                raise InputError(f"{self.path}: id: found {one!r} twice, expected ids to differ")
        lines = "".join(f"{json.dumps(dataclasses.asdict(one))}\n" for one in answers).encode()
        self._lines.append(lines)
        self.ids.update(ids)

    def close(self) -> None:
        """Closes the file and lets others write to the folder."""
        self._lines.close()

    def _open_meta(self, meta: AnswersMeta) -> None:
        """Writes meta.json, or holds the one that is there against `meta`."""
        # Through JSON, so that both sides have lists where one was given tuples.
        expected: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(meta)))
        path = self._folder / META
        if path.exists():
            found = dataclasses.asdict(read_meta(self._folder))
            for key, left, right in differences(found, expected):
                raise InputError(
                    f"{path}: {key}: found {left}, expected {right}; other answers need another "
                    "folder"
                )
        elif self._lines.size:
            raise InputError(
                f"{path}: found none beside {ANSWERS}, expected it to say what they are"
            )
        else:
            replace_file(path, f"{json.dumps(expected, indent=2)}\n".encode())


def parse_answer(line: bytes, where: str, vocab_size: int) -> Answer:
    """The answer that a line of answers.jsonl holds.

    `where` begins the message of the InputError that is raised where the line is not an
    object with an answer's fields, or a token id is not below `vocab_size`. Other fields are
    ignored.
    """
    try:
        found = json.loads(line)
    except ValueError:  # also for bytes that are not UTF-8
        text = line.decode(errors="replace").strip()
        shown = repr(text[:40]) if text else "a blank line"
        whole = line.endswith(b"\n") or not text.startswith("{")
        cut = "" if whole else "; it was cut short: distil into this folder again"
        raise InputError(f"{where}: found {shown}, expected JSON{cut}") from None
    if not isinstance(found, dict):
        raise InputError(f"{where}: found a {type(found).__name__}, expected a JSON object")
    for name, check, expected in _ANSWER_FIELDS:
        if name not in found or not check(found[name]):
            raise InputError(f"{where}: {name}: {found_under(found, name)}, expected {expected}")
    for name in ("prompt_ids", "answer_ids"):
        ids = found[name]
        if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
            wrong = next(one for one in ids if not 0 <= one < vocab_size)
            raise InputError(
                f"{where}: {name}: found {wrong}, expected ids from 0 to {vocab_size - 1}"
            )
        found[name] = tuple(ids)
    return Answer(**{field.name: found[field.name] for field in _fields(Answer)})


def _fields(kind: type) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(kind)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _is_size(value: Any) -> bool:
    return type(value) is int and value > 0


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and set(map(type, value)) <= {int}


def _is_prompt(value: Any) -> bool:
    if isinstance(value, list):
        return all(isinstance(turn, dict) and all(map(_is_text, turn.values())) for turn in value)
    return value is None or isinstance(value, str)


# Name, check and what is expected, in the words of an error.
_META_FIELDS = (
    ("model", _is_name, "a name"),
    ("tokenizer_sha256", _is_name, "a SHA-256 in hex"),
    ("vocab_size", _is_size, "an integer from 1"),
    ("sampling", lambda value: isinstance(value, dict), "an object"),
    ("max_new_tokens", _is_size, "an integer from 1"),
)
_ANSWER_FIELDS = (
    ("id", _is_name, "a string that is not empty"),
    ("prompt_ids", lambda value: _is_ids(value) and value, "a list of token ids, one or more"),
    ("answer_ids", _is_ids, "a list of token ids"),
    ("finish_reason", lambda value: value in get_args(FinishReason), '"stop" or "length"'),
    ("source", _is_text, "a string"),
    ("category", _is_text, "a string"),
    ("prompt", _is_prompt, "a string, chat messages or null"),
    ("text", _is_text, "a string"),
)
