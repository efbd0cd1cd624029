"""One pass over a folder's answers: how long they are and how often every token occurs.

Packing needs the lengths, the draft vocabulary and the mask token the counts, and all of them
before training starts; a pass over the JSON costs more than reading it. So the result is kept
in the folder and made again when the answers change.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import zipfile
from array import array
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Int

from peagle_jax.errors import InputError
from peagle_jax.files import replace_file
from peagle_jax.training.answers import AnswersFile, parse_answer

SURVEY = "survey.npz"
FORMAT = 1

_Stamp = tuple[int, int]


@dataclasses.dataclass(frozen=True, eq=False)
class Survey:
    """What is known of a folder's answers after one pass.

    path: the answers.jsonl.
    sha256: of its content, in hex.
    prompt_lengths, answer_lengths: int32, tokens of every answer.
    prompt_counts, answer_counts: int64, how often every token id occurs in prompts and answers.
    """

    path: Path
    sha256: str
    prompt_lengths: Int[np.ndarray, "answers"]
    answer_lengths: Int[np.ndarray, "answers"]
    prompt_counts: Int[np.ndarray, "vocab"]
    answer_counts: Int[np.ndarray, "vocab"]

    def occurrences(self, token_id: int) -> int:
        """How often a token occurs in prompts and answers together."""
        return int(self.prompt_counts[token_id] + self.answer_counts[token_id])


def survey_answers(answers: AnswersFile) -> Survey:
    """The survey of a folder: the one kept in its survey.npz, or a new one, which is kept there.

    A kept survey is used where size and time of the answers are those it was made with, or
    else their SHA-256 is. In a folder that cannot be written nothing is kept. Raises
    InputError for a line that is not an answer, and where the answers change meanwhile.
    """
    before = _stamp(answers.path)
    cache = answers.path.with_name(SURVEY)
    stamp, found = _load(cache, answers) or (None, None)
    if found is None or stamp != before:
        if found is None or found.sha256 != _sha256(answers.path):
            found = _count(answers)
        stamp = None
    if _stamp(answers.path) != before or len(found.answer_lengths) != len(answers):
        raise InputError(
            f"{answers.path}: found it changed while it was read, expected answers that no "
            "process is writing"
        )
    if stamp is None:
        _save(cache, found, before)
    return found


def total_answer_counts(surveys: Sequence[Survey]) -> Int[np.ndarray, "vocab"]:
    """int64: how often every token id occurs in the answers of one or more folders."""
    return np.sum([one.answer_counts for one in surveys], axis=0)


def _count(answers: AnswersFile) -> Survey:
    digest = hashlib.sha256()
    vocab_size = answers.meta.vocab_size
    counts = {"prompt_ids": np.zeros(vocab_size, np.int64)}
    counts["answer_ids"] = np.zeros(vocab_size, np.int64)
    lengths = {name: array("i") for name in counts}
    with answers.path.open("rb") as file:
        for index, line in enumerate(file):
            digest.update(line)
            answer = parse_answer(line, answers.where(index), vocab_size)
            for name, count in counts.items():
                ids = getattr(answer, name)
                lengths[name].append(len(ids))
                np.add.at(count, np.array(ids, np.int64), 1)
    return Survey(
        path=answers.path,
        sha256=digest.hexdigest(),
        prompt_lengths=np.array(lengths["prompt_ids"], np.int32),
        answer_lengths=np.array(lengths["answer_ids"], np.int32),
        prompt_counts=counts["prompt_ids"],
        answer_counts=counts["answer_ids"],
    )


_ARRAYS = ("prompt_lengths", "answer_lengths", "prompt_counts", "answer_counts")


def _stamp(path: Path) -> _Stamp:
    """Size in bytes and time of the last change in nanoseconds."""
    found = path.stat()
    return found.st_size, found.st_mtime_ns


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _save(path: Path, found: Survey, stamp: _Stamp) -> None:
    content = io.BytesIO()
    np.savez(
        content,
        key=np.array([FORMAT, *stamp], np.int64),
        sha256=np.array(found.sha256),
        **{name: getattr(found, name) for name in _ARRAYS},
    )
    with contextlib.suppress(OSError):
        replace_file(path, content.getvalue())


def _load(path: Path, answers: AnswersFile) -> tuple[_Stamp, Survey] | None:
    """What is kept, None where there is nothing of use: it can always be made again."""
    try:
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as file:
            version, size, time = file["key"].tolist()
            arrays = {name: file[name] for name in _ARRAYS}
            found = Survey(path=answers.path, sha256=str(file["sha256"]), **arrays)
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None
    if version != FORMAT or len(found.answer_counts) != answers.meta.vocab_size:
        return None
    return (size, time), found
