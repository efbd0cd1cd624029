"""Lines of many files: which files, how they are opened, and what is wrong with them."""

from __future__ import annotations

import gzip
import io
import os
import sys
from pathlib import Path

import pytest

from peagle_jax.errors import InputError
from peagle_jax.serving import input_lines
from peagle_jax.serving.input_lines import (
    STDIN,
    InputLine,
    Shard,
    find_inputs,
    identify,
    read_lines,
)


def write(path: Path, content: bytes | str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def texts(files: list[str], **options) -> list[bytes]:
    return [line.text for line in read_lines(files, **options)]


def test_files_folders_and_patterns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("b.jsonl", "a.jsonl", "in/x.jsonl", "in/deep/y.ndjson.gz", "in/z.jsonl.zst"):
        write(Path(name), "1\n")
    write(Path("in/notes.txt"), "no")
    write(Path("out.jsonl"), "1\n")
    assert find_inputs(["b.jsonl", "?.jsonl"]) == ["b.jsonl", "a.jsonl"]
    assert find_inputs(["in"]) == ["in/deep/y.ndjson.gz", "in/x.jsonl", "in/z.jsonl.zst"]
    assert find_inputs(["./in//x.jsonl", "in"])[0] == "in/x.jsonl"  # named once
    assert len(find_inputs(["./in//x.jsonl", "in"])) == 3
    assert find_inputs(["**/*.jsonl"], exclude=[tmp_path / "out.jsonl"]) == [
        "a.jsonl",
        "b.jsonl",
        "in/x.jsonl",
    ]
    assert find_inputs([str(tmp_path / "[ab].jsonl")])[0] == str(tmp_path / "a.jsonl")
    assert find_inputs(["a.jsonl", str(tmp_path / "a.jsonl")]) == ["a.jsonl"]
    write(Path("odd[1].jsonl"), "1\n")
    assert find_inputs(["odd[1].jsonl"]) == ["odd[1].jsonl"]  # a name first, then a pattern
    assert find_inputs([STDIN]) == [STDIN]


def test_files_are_the_same_however_they_are_given(tmp_path: Path, monkeypatch) -> None:
    for name in ("in/x.jsonl", "in/deep/y.jsonl"):
        write(tmp_path / name, "1\n")
    (tmp_path / "link").symlink_to("in")
    expected = (str(tmp_path.resolve() / "in"), ["deep/y.jsonl", "x.jsonl"])
    monkeypatch.chdir(tmp_path / "in")
    for given in (["../in"], ["."], [str(tmp_path / "link")], ["deep/*", "x.jsonl"]):
        files = find_inputs(given)
        assert identify(files) == expected, given
        assert [line.place for line in read_lines(files)] == ["deep/y.jsonl:1", "x.jsonl:1"]
    assert identify(["x.jsonl"]) == (expected[0], ["x.jsonl"])
    assert identify([STDIN]) == ("", [STDIN])
    read, write_end = os.pipe()
    os.close(write_end)
    assert identify([f"/dev/fd/{read}", "x.jsonl"]) == (expected[0], [f"/dev/fd/{read}", "x.jsonl"])
    os.close(read)


def test_inputs_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    out = write(Path("out.jsonl"), "1\n")
    for inputs, message in (
        (["none.jsonl"], "none.jsonl: found no such file"),
        (["*.nothing"], "*.nothing: found no such file"),
        (["empty"], "empty: found a folder without .jsonl files"),
        ([], "input: found no files"),
    ):
        with pytest.raises(InputError) as error:
            find_inputs(inputs)
        assert message in str(error.value)
    with pytest.raises(InputError, match=r"out\.jsonl: found no files"):
        find_inputs([out], exclude=[Path(out)])

    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", refuse)
        with pytest.raises(InputError, match=r"out\.jsonl: Permission denied"):
            find_inputs([out])


def test_blank_lines_line_ends_and_numbers(tmp_path: Path) -> None:
    file = write(tmp_path / "a", b"\xef\xbb\xbfone\r\n\n  \ntwo\x0bhalf \nthree")
    assert list(read_lines([file])) == [
        InputLine(file, 1, b"one", name="a"),
        InputLine(file, 4, b"two\x0bhalf ", name="a"),
        InputLine(file, 5, b"three", name="a"),
    ]


def test_compressed_files_are_told_by_their_content(tmp_path: Path) -> None:
    two_members = gzip.compress(b"1\n2") + gzip.compress(b"2\n3\n")
    assert texts([write(tmp_path / "a.jsonl", two_members)]) == [b"1", b"22", b"3"]
    zstandard = pytest.importorskip("zstandard")
    pack = zstandard.ZstdCompressor().compress
    many = b"".join(b"%d\n" % number for number in range(5_000))
    file = write(tmp_path / "b.jsonl", pack(many + b"x") + pack(b"y\nz"))
    found = texts([file])
    assert found[:3] == [b"0", b"1", b"2"]
    assert found[-3:] == [b"4999", b"xy", b"z"]
    assert len(found) == 5_002


@pytest.mark.parametrize("kind", ["gzip", "zstd", "zstd garbage"])
def test_a_damaged_file_ends_and_the_next_one_follows(tmp_path: Path, kind: str) -> None:
    content = b"".join(b"%032x\n" % (number**7) for number in range(8_000))
    if kind == "gzip":
        packed = gzip.compress(content)[:-2000]
    else:
        packed = pytest.importorskip("zstandard").ZstdCompressor().compress(content)[:-2000]
    if kind == "zstd garbage":
        packed += b"\xff" * 3000
    damaged, whole = write(tmp_path / "a", packed), write(tmp_path / "b", "whole\n")
    lines = list(read_lines([damaged, whole]))
    assert lines[0].text == b"%032x" % 0
    assert lines[-1] == InputLine(whole, 1, b"whole", name="b")
    problem = lines[-2]
    assert (problem.file, problem.number) == (damaged, len(lines) - 1)
    assert problem.problem is not None
    assert problem.problem.endswith("the file was not read from here on")
    assert all(line.problem is None for line in lines[:-2])


def test_zstandard_data_without_the_package(tmp_path: Path, monkeypatch) -> None:
    file = write(tmp_path / "a.zst", b"\x28\xb5\x2f\xfd....")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(InputError, match=r"a\.zst: found Zstandard data, .* pip install zstandard"):
        find_inputs([file])


def test_lines_that_are_too_long_are_skipped(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(input_lines, "MOST_LINE_BYTES", 10)
    file = write(tmp_path / "a", "a" * 9 + "\n" + "b" * 10 + "\n" + "c" * 35 + "\nd\n" + "e" * 11)
    lines = list(read_lines([file]))
    assert [line.number for line in lines] == [1, 2, 3, 4, 5]
    assert [line.text for line in lines if line.problem is None] == [b"a" * 9, b"d"]
    assert lines[1].problem == lines[2].problem == lines[4].problem
    assert lines[2].problem == "found a line of more than 10 bytes, expected fewer"


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    for content in (b"1\n\n2", gzip.compress(b"1\n\n2")):
        stdin = io.TextIOWrapper(io.BufferedReader(io.BytesIO(content)))
        monkeypatch.setattr(sys, "stdin", stdin)
        assert list(read_lines([STDIN])) == [
            InputLine("-", number, text, name="-") for number, text in ((1, b"1"), (3, b"2"))
        ]


def test_a_pipe_is_not_read_before_its_time() -> None:
    read, write_end = os.pipe()
    with os.fdopen(write_end, "wb") as pipe:
        pipe.write(b"first\nsecond\n")
    files = find_inputs([f"/dev/fd/{read}"])
    assert texts(files) == [b"first", b"second"]
    os.close(read)


def test_shards_part_all_lines(tmp_path: Path) -> None:
    files = [
        write(tmp_path / "a", "0\n\n2\n"),
        write(tmp_path / "b", "3\n"),
        write(tmp_path / "c", "".join(f"{n}\n" for n in range(4, 12))),
    ]
    parts = [texts(files, shard=Shard(index, 3)) for index in range(3)]
    assert parts[1] == [b"4", b"7", b"10"]  # line 1 is blank, and counts
    assert sorted(int(text) for part in parts for text in part) == [0, *range(2, 12)]
    assert texts(files) == texts(files, shard=Shard(0, 1))


def test_shards_from_text() -> None:
    assert Shard.parse("2/4") == Shard(2, 4)
    for text, message in (
        ("4/4", "shard: found 4/4, expected i/n with i from 0"),
        ("-1/4", "shard: found -1/4"),
        ("0/0", "shard: found 0/0"),
        ("a/4", "shard: found 'a/4', expected i/n, as in 0/4"),
        ("3", "shard: found '3', expected i/n"),
    ):
        with pytest.raises(InputError) as error:
            Shard.parse(text)
        assert message in str(error.value)
