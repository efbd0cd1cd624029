"""The one pass over answers: what it counts, when it is kept and when it is made again."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import numpy as np
import pytest

from peagle_jax.errors import InputError
from peagle_jax.training import survey as survey_module
from peagle_jax.training.answers import ANSWERS, META, AnswersFile
from peagle_jax.training.survey import SURVEY, Survey, survey_answers, total_answer_counts
from tests.training.folders import write_folder

PAIRS = [([1, 2, 2], [3, 3, 3, 7]), ([5], []), ([1], [7, 0])]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "d", PAIRS, vocab_size=8)


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Grows by the file of every pass over answers."""
    made: list[Path] = []
    real = survey_module._count

    def count(answers: AnswersFile) -> Survey:
        made.append(answers.path)
        return real(answers)

    monkeypatch.setattr(survey_module, "_count", count)
    return made


def run(folder: Path) -> Survey:
    return survey_answers(AnswersFile(folder))


def test_what_is_counted(folder: Path) -> None:
    for found in (run(folder), run(folder)):  # counted, then kept
        assert found.path == folder / ANSWERS
        assert found.sha256 == hashlib.sha256((folder / ANSWERS).read_bytes()).hexdigest()
        assert found.prompt_lengths.tolist() == [3, 1, 1]
        assert found.answer_lengths.tolist() == [4, 0, 2]
        assert found.prompt_counts.tolist() == [0, 2, 2, 0, 0, 1, 0, 0]
        assert found.answer_counts.tolist() == [1, 0, 0, 3, 0, 0, 0, 2]
        assert [found.occurrences(one) for one in range(8)] == [1, 2, 2, 3, 0, 1, 0, 2]
        assert found.prompt_lengths.dtype == np.int32
        assert found.answer_counts.dtype == np.int64
    total = total_answer_counts([found, found])
    assert total.tolist() == [2, 0, 0, 6, 0, 0, 0, 4]


def test_kept_until_the_answers_change(folder: Path, passes: list[Path]) -> None:
    run(folder)
    run(folder)
    assert len(passes) == 1
    write_folder(folder, [([4], [4])], vocab_size=8)
    assert run(folder).answer_lengths.tolist() == [4, 0, 2, 1]
    assert len(passes) == 2
    # The same size at another time: told apart by content.
    path = folder / ANSWERS
    os.utime(path, ns=(1, 1))
    run(folder)
    assert len(passes) == 2
    path.write_bytes(path.read_bytes().replace(b"[5]", b"[6]"))
    assert run(folder).occurrences(6) == 1
    assert len(passes) == 3
    assert {one.name for one in folder.iterdir()} == {ANSWERS, META, SURVEY}


@pytest.mark.parametrize("damage", ["empty", "cut", "flipped", "text", "other"])
def test_a_damaged_one_is_made_again(folder: Path, passes: list[Path], damage: str) -> None:
    expected = run(folder)
    path = folder / SURVEY
    content = bytearray(path.read_bytes())
    place = content.index(b"answer_counts") + 150
    content[place] ^= 0xFF
    changed = {
        "empty": b"",
        "cut": path.read_bytes()[:-30],
        "flipped": bytes(content),
        "text": b"no archive",
    }
    if damage == "other":  # an archive of something else
        np.savez(path, some=np.zeros(3))
    else:
        path.write_bytes(changed[damage])
    np.testing.assert_array_equal(run(folder).answer_counts, expected.answer_counts)
    assert len(passes) == 2
    run(folder)
    assert len(passes) == 2


def test_another_vocabulary_size_is_another_survey(folder: Path) -> None:
    run(folder)
    meta = json.loads((folder / META).read_text())
    (folder / META).write_text(json.dumps({**meta, "vocab_size": 16}))
    assert len(run(folder).answer_counts) == 16


def test_a_folder_that_cannot_be_written(
    folder: Path, passes: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, content: bytes) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(survey_module, "replace_file", refuse)
    assert run(folder).answer_lengths.tolist() == run(folder).answer_lengths.tolist()
    assert len(passes) == 2
    assert not (folder / SURVEY).exists()


def test_answers_that_are_being_written(folder: Path) -> None:
    opened = AnswersFile(folder)
    write_folder(folder, [([4], [4])], vocab_size=8)
    with pytest.raises(InputError, match=r"answers\.jsonl: found it changed while it was read"):
        survey_answers(opened)
    run(folder)
    with pytest.raises(InputError, match="found it changed"):
        survey_answers(opened)  # also where a survey of what is there now is kept


def test_a_bad_line(folder: Path) -> None:
    path = folder / ANSWERS
    path.write_bytes(path.read_bytes().replace(b"[5]", b"[8]"))
    with pytest.raises(InputError, match=r"answers\.jsonl:2: prompt_ids: found 8, .* 0 to 7"):
        run(folder)
    assert not (folder / SURVEY).exists()
