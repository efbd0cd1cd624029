"""The format of distilled answers: writer, reader, and what both refuse."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest

from peagle_jax.errors import InputError
from peagle_jax.files import replace_file
from peagle_jax.tokenizer import load_tokenizer
from peagle_jax.training.answers import (
    ANSWERS,
    META,
    Answer,
    AnswersFile,
    AnswersMeta,
    AnswersWriter,
    read_meta,
    tokenizer_sha256,
)

META_VALUES = AnswersMeta(
    model="tiny",
    tokenizer_sha256="ab" * 32,
    vocab_size=64,
    sampling={"temperature": 0.7, "stop": ("a", "b")},
    max_new_tokens=16,
)


def answer(name: str, **changes: Any) -> Answer:
    one = Answer(
        id=name,
        prompt_ids=(1, 2, 3),
        answer_ids=(4, 63, 0),
        finish_reason="stop",
        source="made",
        category="test",
        prompt=[{"role": "user", "content": "hé\u2028llo \ud800"}],
        text='line\nbreak "quoted"',
    )
    return dataclasses.replace(one, **changes)


def write(folder: Path, *answers: Answer) -> Path:
    with AnswersWriter(folder, META_VALUES) as writer:
        writer.append(answers)
    return folder / ANSWERS


def edit(path: Path, line: int, **changes: Any) -> None:
    """Replaces fields of a line; ... removes one."""
    lines = path.read_text().split("\n")
    values = {**json.loads(lines[line]), **changes}
    lines[line] = json.dumps({key: value for key, value in values.items() if value is not ...})
    path.write_text("\n".join(lines))


def test_what_is_written_is_read(tmp_path: Path) -> None:
    written = [
        answer("a"),
        answer("b", answer_ids=(), finish_reason="length", prompt="plain"),
        answer("c", prompt=None, text=""),
    ]
    folder = tmp_path / "new" / "folder"
    with AnswersWriter(folder, META_VALUES) as writer:
        writer.append(written[:2])
        writer.append([])
        writer.append(written[2:])
        assert writer.ids == {"a", "b", "c"}
    found = AnswersFile(folder)
    assert list(found) == written
    assert (len(found), found[-1], found[-3]) == (3, written[2], written[0])
    assert found.where(1) == f"{folder / ANSWERS}:2"
    with pytest.raises(IndexError):
        found[3]
    assert read_meta(folder) == dataclasses.replace(
        META_VALUES, sampling={"temperature": 0.7, "stop": ["a", "b"]}
    )


def test_lines_are_one_object_each_in_ascii(tmp_path: Path) -> None:
    lines = write(tmp_path, answer("a"), answer("b")).read_bytes().split(b"\n")
    assert [json.loads(line)["id"] for line in lines[:-1]] == ["a", "b"]
    assert lines[-1] == b""
    assert json.loads(lines[0]).keys() == {field.name for field in dataclasses.fields(Answer)}


@pytest.mark.parametrize("torn", [b"{", b'{"id": "c", "prompt_ids": [1, 2', b"whole"])
def test_a_stopped_run_goes_on(tmp_path: Path, torn: bytes) -> None:
    path = write(tmp_path, answer("a"), answer("b"))
    whole = path.read_bytes()
    if torn == b"whole":  # all but the line's end: it is dropped and made again
        torn = json.dumps(dataclasses.asdict(answer("c"))).encode()
    path.write_bytes(whole + torn)
    with AnswersWriter(tmp_path, META_VALUES) as writer:
        assert writer.ids == {"a", "b"}
        assert path.read_bytes() == whole
        writer.append([answer("c")])
    assert [one.id for one in AnswersFile(tmp_path)] == ["a", "b", "c"]


def test_opening_a_whole_folder_changes_nothing(tmp_path: Path) -> None:
    path = write(tmp_path, answer("a"))
    before = path.stat().st_mtime_ns, (tmp_path / META).stat().st_mtime_ns, path.read_bytes()
    AnswersWriter(tmp_path, META_VALUES).close()
    after = path.stat().st_mtime_ns, (tmp_path / META).stat().st_mtime_ns, path.read_bytes()
    assert before == after


def test_an_id_is_taken_once(tmp_path: Path) -> None:
    with AnswersWriter(tmp_path, META_VALUES) as writer:
        writer.append([answer("a")])
        for batch in ([answer("a")], [answer("b"), answer("b")]):
            with pytest.raises(InputError, match=r"id: found '[ab]' twice"):
                writer.append(batch)
    assert len(AnswersFile(tmp_path)) == 1
    path = tmp_path / ANSWERS
    path.write_bytes(path.read_bytes() * 2)
    with pytest.raises(InputError, match=r"answers\.jsonl:2: id: found 'a' twice"):
        AnswersWriter(tmp_path, META_VALUES)


def test_a_full_disk_leaves_no_part_of_a_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with AnswersWriter(tmp_path, META_VALUES) as writer:
        writer.append([answer("a")])
        real, calls = os.write, 0

        def short_then_full(handle: int, data: memoryview) -> int:
            nonlocal calls
            calls += 1
            if calls == 2:
                raise OSError(28, "No space left on device")
            return real(handle, data[: len(data) // 2])

        with monkeypatch.context() as patch:
            patch.setattr(os, "write", short_then_full)
            with pytest.raises(OSError, match="No space"):
                writer.append([answer("b"), answer("c")])
        assert writer.ids == {"a"}
        writer.append([answer("b")])
    assert [one.id for one in AnswersFile(tmp_path)] == ["a", "b"]


def test_every_batch_is_synced_before_append_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    with AnswersWriter(tmp_path, META_VALUES) as writer:
        monkeypatch.setattr(os, "fsync", lambda handle: synced.append(os.fstat(handle).st_size))
        writer.append([answer("a"), answer("b")])
    assert synced == [(tmp_path / ANSWERS).stat().st_size]


def test_two_writers_of_one_folder(tmp_path: Path) -> None:
    with (
        AnswersWriter(tmp_path, META_VALUES),
        pytest.raises(InputError, match="found another process that writes to it"),
    ):
        AnswersWriter(tmp_path, META_VALUES)
    AnswersWriter(tmp_path, META_VALUES).close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "other"}, 'model: found "tiny", expected "other"'),
        ({"vocab_size": 65}, "vocab_size: found 64, expected 65"),
        ({"sampling": {"temperature": 1, "stop": ["a", "b"]}}, "sampling.temperature: found 0.7"),
        ({"sampling": {"temperature": 0.7}}, r"sampling.stop: found \[.*, expected none"),
        ({"max_new_tokens": 32}, "max_new_tokens: found 16, expected 32"),
    ],
)
def test_another_meta_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    write(tmp_path, answer("a"))
    with pytest.raises(InputError, match=rf"meta\.json: {message}"):
        AnswersWriter(tmp_path, dataclasses.replace(META_VALUES, **changes))


def test_answers_without_meta_are_refused(tmp_path: Path) -> None:
    write(tmp_path, answer("a"))
    (tmp_path / META).unlink()
    with pytest.raises(InputError, match=r"meta\.json: found none beside answers"):
        AnswersWriter(tmp_path, META_VALUES)
    with pytest.raises(InputError, match=r"meta\.json: found none, expected a folder"):
        AnswersFile(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 2}, "format: found 2, expected 1"),
        ({"vocab_size": True}, "vocab_size: found true, expected an integer"),
        ({"model": ...}, "model: found none, expected a name"),
    ],
)
def test_bad_meta(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    write(tmp_path)
    values = {**json.loads((tmp_path / META).read_text()), **changes}
    values = {key: value for key, value in values.items() if value is not ...}
    (tmp_path / META).write_text(json.dumps(values))
    with pytest.raises(InputError, match=rf"meta\.json: {message}"):
        read_meta(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"id": ""}, 'id: found "", expected a string that is not empty'),
        ({"id": ...}, "id: found none"),
        ({"prompt_ids": []}, r"prompt_ids: found \[\], expected .* one or more"),
        ({"prompt_ids": [1, -1]}, "prompt_ids: found -1, expected ids from 0 to 63"),
        ({"answer_ids": [5, 64]}, "answer_ids: found 64, expected ids from 0 to 63"),
        ({"answer_ids": [True]}, r"answer_ids: found \[true\], expected a list of token ids"),
        ({"answer_ids": [1.0]}, r"answer_ids: found \[1.0\]"),
        ({"answer_ids": "12"}, 'answer_ids: found "12"'),
        ({"finish_reason": "eos"}, 'finish_reason: found "eos", expected "stop" or "length"'),
        ({"prompt": [{"role": 1}]}, "prompt: found .*, expected a string, chat messages or null"),
        ({"text": ...}, "text: found none, expected a string"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = write(tmp_path, answer("a"), answer("b"), answer("c"))
    edit(path, 1, **changes)
    found = AnswersFile(tmp_path)
    assert found[0] == answer("a")
    with pytest.raises(InputError, match=rf"answers\.jsonl:2: {message}") as info:
        found[1]
    assert "\n" not in str(info.value)
    with pytest.raises(InputError, match=rf"answers\.jsonl:2: {message}"):
        AnswersWriter(tmp_path, META_VALUES)


@pytest.mark.parametrize("line", [b"\n", b"[]\n", b"\xff\n", b"{\n"])
def test_lines_that_are_no_objects(tmp_path: Path, line: bytes) -> None:
    path = write(tmp_path, answer("a"))
    path.write_bytes(path.read_bytes() + line)
    with pytest.raises(InputError, match=r"answers\.jsonl:2: found .*, expected (a )?JSON") as info:
        AnswersFile(tmp_path)[1]
    assert "\n" not in str(info.value)


def test_a_reader_tells_of_a_line_cut_short(tmp_path: Path) -> None:
    path = write(tmp_path, answer("a"), answer("b"))
    os.truncate(path, path.stat().st_size - 10)
    with pytest.raises(InputError, match=r"answers\.jsonl:2: .* cut short: distil .* again"):
        AnswersFile(tmp_path)[1]


def test_folders_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"file: found .*, expected a folder that can be written"):
        AnswersWriter(tmp_path / "file", META_VALUES)
    write(tmp_path / "d")
    (tmp_path / "d" / ANSWERS).unlink()
    with pytest.raises(InputError, match=r"answers\.jsonl: found .*No such file"):
        AnswersFile(tmp_path / "d")


def test_tokenizer_hash_is_of_what_ids_mean() -> None:
    tokenizer = load_tokenizer("smollm2")
    first = tokenizer_sha256(tokenizer)
    tokenizer(["a", "b c"], padding=True, truncation=True, max_length=2)  # changes its settings
    assert tokenizer_sha256(tokenizer) == first
    assert len(first) == 64
    tokenizer.add_tokens(["<new>"])
    assert tokenizer_sha256(tokenizer) != first


def test_replace_file_is_whole_or_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    replace_file(path, b"one")
    replace_file(path, b"two")
    assert path.read_bytes() == b"two"

    def fail(handle: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="Input/output"):
        replace_file(path, b"three")
    assert path.read_bytes() == b"two"
    assert [one.name for one in tmp_path.iterdir()] == ["file"]
