"""Folders of distilled answers as numbered documents: which are trained on, and their tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from jaxtyping import Bool, Int

from peagle_jax.errors import InputError
from peagle_jax.training.answers import META, AnswersFile
from peagle_jax.training.survey import survey_answers

Overlong = Literal["error", "truncate", "skip"]
Empty = Literal["error", "skip"]


@dataclasses.dataclass(frozen=True)
class DocumentCounts:
    """What became of the documents of some folders.

    documents: that are trained on, `truncated` of them cut at the end.
    skipped_empty, skipped_overlong: that are left out.
    tokens, answer_tokens: of the documents that are trained on, after truncation.
    """

    documents: int
    truncated: int
    skipped_empty: int
    skipped_overlong: int
    tokens: int
    answer_tokens: int


class Documents:
    """The documents that are trained on, read from their files when asked for.

    A document is a prompt and its answer. Numbers follow the order of folders and lines.

    Attributes:
        surveys: one a folder.
        lengths: int64, tokens of every document, after truncation.
        counts: what became of all documents.
    """

    def __init__(
        self, files: Sequence[AnswersFile], length: int, overlong: Overlong, empty: Empty
    ) -> None:
        """Surveys the files and applies the rules for empty and overlong documents.

        Args:
            files: as `open_answers` gives them.
            length: the most tokens of a document.
            overlong: what is done with longer ones: refused ("error"), cut at the end
                ("truncate"; left out where no token of the answer stays), or left out ("skip").
            empty: what is done where the answer has no tokens: refused or left out.

        Raises InputError for the first document to refuse, and where none is left.
        """
        self._files = files
        self.surveys = [survey_answers(file) for file in files]
        prompts = np.concatenate([one.prompt_lengths for one in self.surveys]).astype(np.int64)
        answers = np.concatenate([one.answer_lengths for one in self.surveys]).astype(np.int64)
        sizes = [len(file) for file in files]
        self._file_of = np.repeat(np.arange(len(files)), sizes)
        self._line_of = np.concatenate([np.arange(size) for size in sizes])

        is_empty = answers == 0
        is_long = (prompts + answers > length) & ~is_empty
        if empty == "error":
            for place in np.flatnonzero(is_empty)[:1]:
                raise self._refuse(place, "found an empty answer, expected tokens to learn from")
        if overlong == "error":
            for place in np.flatnonzero(is_long)[:1]:
                size = int(prompts[place] + answers[place])
                raise self._refuse(place, f"found {size} tokens, expected at most {length}")
        dropped = is_long if overlong == "skip" else is_long & (prompts >= length)
        kept = np.flatnonzero(~is_empty & ~dropped)
        self._file_of, self._line_of = self._file_of[kept], self._line_of[kept]
        self.lengths = np.minimum(prompts + answers, length)[kept]
        self.counts = DocumentCounts(
            documents=len(kept),
            truncated=int(np.sum(is_long & ~dropped)),
            skipped_empty=int(np.sum(is_empty)),
            skipped_overlong=int(np.sum(dropped)),
            tokens=int(self.lengths.sum()),
            answer_tokens=int((self.lengths - prompts[kept]).sum()),
        )
        if not len(kept):
            paths = ", ".join(str(file.path) for file in files)
            raise InputError(
                f"{paths}: found no document to train on (left out: {self.counts.skipped_empty} "
                f"empty, {self.counts.skipped_overlong} of more than {length} tokens), expected one"
            )

    def __len__(self) -> int:
        return len(self.lengths)

    def read(self, index: int) -> tuple[Int[np.ndarray, "document"], Bool[np.ndarray, "document"]]:
        """Token ids (int32) of a document, and which of them are the answer's.

        Raises InputError where its line is not what it was when it was surveyed.
        """
        file, line = self._files[self._file_of[index]], int(self._line_of[index])
        answer = file[line]
        survey = self.surveys[self._file_of[index]]
        found = len(answer.prompt_ids), len(answer.answer_ids)
        expected = int(survey.prompt_lengths[line]), int(survey.answer_lengths[line])
        if found != expected:
            raise InputError(
                f"{file.where(line)}: found {found[0]} + {found[1]} tokens, expected {expected[0]} "
                f"+ {expected[1]}: the file has changed"
            )
        size = int(self.lengths[index])
        tokens = np.array(answer.prompt_ids + answer.answer_ids, np.int32)[:size]
        return tokens, np.arange(size) >= len(answer.prompt_ids)

    def where(self, index: int) -> str:
        """File and line of a document."""
        return self._files[self._file_of[index]].where(int(self._line_of[index]))

    def _refuse(self, place: np.intp, problem: str) -> InputError:
        file, line = self._files[self._file_of[place]], int(self._line_of[place])
        return InputError(f"{file.where(line)}: id {file[line].id!r}: {problem}")


def open_answers(
    folders: Sequence[Path], *, tokenizer_sha256: str, vocab_size: int
) -> list[AnswersFile]:
    """Folders of answers of one model, given its tokenizer's hash (answers.py) and vocabulary.

    Raises InputError where a folder is named twice, or its answers are of another tokenizer
    or vocabulary size.
    """
    if not folders:
        raise InputError("data: found no folder, expected one or more of distilled answers")
    model = {"tokenizer_sha256": tokenizer_sha256, "vocab_size": vocab_size}
    files: dict[Path, AnswersFile] = {}
    for folder in folders:
        if folder.resolve() in files:
            raise InputError(f"{folder}: found twice, expected every folder once")
        file = files[folder.resolve()] = AnswersFile(folder)
        for key, expected in model.items():
            found = getattr(file.meta, key)
            if found != expected:
                raise InputError(
                    f"{folder / META}: {key}: found {found}, expected the model's {expected}"
                )
    return list(files.values())
