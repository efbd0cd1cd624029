"""Lines of many files, one at a time: globs, folders, standard input, gzip and Zstandard."""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import gzip
import io
import os
import sys
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

from peagle_jax.errors import InputError

STDIN = "-"
MOST_LINE_BYTES = 64 << 20  # longer lines are skipped, so that no line fills the memory
_SUFFIXES = (".jsonl", ".ndjson")
_PACKED = ("", ".gz", ".zst", ".zstd")
_ZSTD_BYTES = 4096  # unpacked at a time: 128 MiB at the very most
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_BOM = b"\xef\xbb\xbf"


@dataclasses.dataclass(frozen=True)
class InputLine:
    """A line that is not blank, without its end.

    file: as `find_inputs` names it. number: from 1. problem: why the line could not be read,
    None where it could. name: the file as `identify` names it, "" = as `file`.
    """

    file: str
    number: int
    text: bytes
    problem: str | None = None
    name: str = ""

    @property
    def place(self) -> str:
        """Which line this is, however its file was given."""
        return f"{self.name or self.file}:{self.number}"


@dataclasses.dataclass(frozen=True)
class Shard:
    """Part `index` of `count`: each line whose place among all lines, from 0, is `index`
    modulo `count`. Parts differ by one line at most, and need not know of one another."""

    index: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise InputError(
                f"shard: found {self.index}/{self.count}, expected i/n with i from 0 to n - 1"
            )

    def part(self, index: int, count: int) -> Shard:
        """Of this part the part `index` of `count`."""
        return Shard(self.index + self.count * index, self.count * count)

    @classmethod
    def parse(cls, text: str) -> Shard:
        """From "i/n"."""
        index, _, count = text.partition("/")
        try:
            return cls(int(index), int(count))
        except ValueError as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"shard: found {text!r}, expected i/n, as in 0/4") from None


def find_inputs(inputs: Sequence[str], exclude: Sequence[Path] = ()) -> list[str]:
    """Files that `inputs` name: paths, patterns with * ? [ or **, folders, or "-".

    A folder stands for the .jsonl and .ndjson files anywhere in it, compressed or not.
    A pattern's and a folder's files come in the order of their names; a file that was named
    before, or is one of `exclude` (a run's own output), is left out. Raises InputError for
    what names no file, or one that cannot be read.
    """
    excluded = {path.resolve() for path in exclude}
    found: dict[Path, str] = {}
    for name in inputs:
        matches = [] if name == STDIN else _matches(name)
        if name == STDIN:
            found[Path(STDIN)] = STDIN
        elif not matches:
            raise InputError(f"{name}: found no such file, expected a JSON Lines file")
        for match in matches:
            file = Path(match).resolve()
            if file not in excluded and file not in found:
                _check_readable(match)
                found[file] = os.path.normpath(match)
    if not found:
        raise InputError(f"{', '.join(inputs) or 'input'}: found no files, expected JSON Lines")
    return list(found.values())


def identify(files: Sequence[str]) -> tuple[str, list[str]]:
    """(folder, names): the innermost folder that all files are in, absolute and free of links,
    and each file's name in it. The same wherever a run is started and however its input is
    given. What is no file on a disk, such as a pipe, is in no folder and keeps its name."""
    real = {file: Path(file).resolve() for file in files if Path(file).is_file()}
    folder = os.path.commonpath([path.parent for path in real.values()]) if real else ""
    names = [real[file].relative_to(folder).as_posix() if file in real else file for file in files]
    return folder, names


def _matches(name: str) -> list[str]:
    if Path(name).exists():
        matches = [name]
    else:
        # Not Path.glob, which takes no absolute patterns.
        matches = sorted(glob.glob(name, recursive=True)) if glob.has_magic(name) else []  # noqa: PTH207
    files: list[str] = []
    for match in matches:
        if not Path(match).is_dir():
            files.append(match)
            continue
        inside = [
            str(path)
            for path in sorted(Path(match).rglob("*"))
            if path.is_file()
            and any(
                path.name.endswith(suffix + packed) for suffix in _SUFFIXES for packed in _PACKED
            )
        ]
        if not inside:
            raise InputError(f"{match}: found a folder without .jsonl files, expected some")
        files += inside
    return files


def _check_readable(file: str) -> None:
    if not Path(file).is_file():
        return  # a pipe: what is read from it now would be missed later
    try:
        with Path(file).open("rb") as opened:
            start = opened.read(4)
    except OSError as error:
        raise InputError(f"{file}: {error.strerror}, expected a JSON Lines file") from None
    if start == _ZSTD:
        _zstandard(file)


def read_lines(files: Sequence[str], shard: Shard | None = None) -> Iterator[InputLine]:
    """The lines of files of `find_inputs`, one after the other; blank ones are skipped.

    Only one line is in memory. What is compressed is told by its first bytes. A file that
    turns out to be damaged gives a last line with the problem, and the next file follows.
    """
    shard = shard or Shard()
    place = 0
    for file, name in zip(files, identify(files)[1], strict=True):
        with contextlib.ExitStack() as stack:
            number = 0
            try:
                stream = stack.enter_context(_open(file))
                for number, text, problem in _split(stream):
                    own = place % shard.count == shard.index
                    place += 1
                    if own and (problem or text.strip()):
                        yield InputLine(file, number, text, problem, name)
            except (OSError, EOFError, zlib.error) as error:
                problem = f"found {_reason(error)}; the file was not read from here on"
                yield InputLine(file, number + 1, b"", problem, name)


def _split(stream: io.BufferedIOBase) -> Iterator[tuple[int, bytes, str | None]]:
    """(number, line, problem) of every line."""
    number, problem = 0, None
    while line := stream.readline(MOST_LINE_BYTES + 1):
        number += 1
        problem = None
        if len(line) > MOST_LINE_BYTES:
            problem = f"found a line of more than {MOST_LINE_BYTES} bytes, expected fewer"
            while line and not line.endswith(b"\n"):
                line = stream.readline(MOST_LINE_BYTES)
            line = b""
        if number == 1:
            line = line.removeprefix(_BOM)
        yield number, line.rstrip(b"\r\n"), problem


@contextlib.contextmanager
def _open(file: str) -> Iterator[io.BufferedIOBase]:
    with contextlib.ExitStack() as stack:
        if file == STDIN:
            plain = cast("io.BufferedReader", sys.stdin.buffer)
        else:
            plain = stack.enter_context(Path(file).open("rb"))
        start = plain.peek(4)[:4]
        if start.startswith(_GZIP):
            yield stack.enter_context(gzip.GzipFile(fileobj=plain))
        elif start == _ZSTD:
            unpacked = _Zstandard(plain, _zstandard(file))
            yield stack.enter_context(io.BufferedReader(unpacked))
        else:
            yield plain


class _Zstandard(io.RawIOBase):
    """The content of Zstandard frames. The package's own reader takes a frame that was cut
    short for a whole one."""

    def __init__(self, packed: io.BufferedIOBase, zstandard: Any) -> None:
        self._packed, self._zstandard = packed, zstandard
        self._frame: Any = None
        self._next = b""  # read, and not yet unpacked
        self._content = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._content:
            data = self._next or self._packed.read(_ZSTD_BYTES)
            self._next = b""
            if not data and self._frame:
                raise EOFError("Zstandard data that ends in the middle")
            if not data:
                return 0
            self._unpack(data)
        count = min(len(buffer), len(self._content))
        buffer[:count], self._content = self._content[:count], self._content[count:]
        return count

    def _unpack(self, data: bytes) -> None:
        try:
            self._frame = self._frame or self._zstandard.ZstdDecompressor().decompressobj()
            self._content = memoryview(self._frame.decompress(data))
        except self._zstandard.ZstdError as error:
            raise OSError(f"damaged Zstandard data ({error})") from None
        if self._frame.eof:
            self._next, self._frame = self._frame.unused_data, None


def _zstandard(file: str) -> Any:
    try:
        import zstandard
    except ImportError:
        raise InputError(
            f"{file}: found Zstandard data, which the zstandard package reads; expected it from "
            "pip install zstandard"
        ) from None
    return zstandard


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return " ".join(str(error).split())
