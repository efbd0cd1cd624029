"""Results: what a line holds, and that every one is in the file once, whatever happens."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from peagle_jax.config import SamplingParams
from peagle_jax.errors import InputError
from peagle_jax.metrics import GenerationStats
from peagle_jax.serving.errors_file import ErrorsFile, errors_path
from peagle_jax.serving.input_order import InputOrder
from peagle_jax.serving.openai_format import CHAT, COMPLETIONS, Call
from peagle_jax.serving.requests_file import BadLine, BatchRequest
from peagle_jax.serving.result_lines import Result, json_line, read_key, result_line
from peagle_jax.serving.results_file import ResultsFile, settings_path

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = {"model": "tiny", "sampling": {"temperature": 0.0, "stop": ("a",)}, "shard": "0/1"}


def line(key: str) -> bytes:
    return json_line({"id": key})


def keys(path: Path) -> list[str]:
    return [read_key(one, "") for one in path.read_bytes().splitlines(keepends=True)]


def make_result(**changes: Any) -> Result:
    request = BatchRequest("a", "p", SamplingParams(seed=0), "in.jsonl", 1, **changes)
    stats = GenerationStats(5, 2, 6, (2, 1, 0), seconds=9.0, compile_seconds=8.0)
    return Result(request, "Übel\u2028", (4, 5, 6, 7, 8), 3, "stop", stats)


def test_own_result_lines() -> None:
    found = result_line(make_result(), model="tiny", created=5)
    assert "Übel".encode() in found
    assert found.endswith(b"\n")
    assert json.loads(found) == {
        "id": "a",
        "text": "Übel\u2028",
        "token_ids": [4, 5, 6, 7, 8],
        "finish_reason": "stop",
        "usage": {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8},
        "acceptance": {
            "num_drafts": 2,
            "num_draft_tokens": 6,
            "num_accepted": 3,
            "accepted_per_position": [2, 1, 0],
            "acceptance_length": 2.5,
        },
    }


@pytest.mark.parametrize(
    ("url", "kind", "choice"),
    [
        (CHAT, "chat.completion", {"message": {"role": "assistant", "content": "Übel\u2028"}}),
        (COMPLETIONS, "text_completion", {"text": "Übel\u2028"}),
    ],
)
def test_openai_result_lines(url, kind, choice) -> None:
    call = Call(url, None, "p", SamplingParams())
    found = json.loads(result_line(make_result(call=call), model="tiny", created=5))
    assert (found["custom_id"], found["error"]) == ("a", None)
    assert found["response"]["status_code"] == 200
    body = found["response"]["body"]
    expected = {"index": 0, "logprobs": None, "finish_reason": "stop", **choice}
    assert body["choices"] == [expected]
    assert (body["object"], body["model"], body["created"]) == (kind, "tiny", 5)
    assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}
    assert body["acceptance"]["acceptance_length"] == 2.5
    named = Call(url, "other", "p", SamplingParams())
    again = json.loads(result_line(make_result(call=named), model="tiny", created=6))
    assert again["response"]["body"]["model"] == "other"
    assert again["id"] == found["id"] != found["response"]["request_id"]


def test_keys_of_lines() -> None:
    assert read_key(b'{"id": 7}\n', "") == "7"
    assert read_key(b'{"id": "batch_req-1", "custom_id": "c"}\n', "") == "c"
    assert read_key(json_line({"id": "\ud800"}), "") == "\ud800"
    for text, message in (
        (b"[]", "out:1: id: found no object, expected a result's id"),
        (b'{"id": null}', "out:1: id: found null"),
        (b'{"custom_id": [], "id": "a"}', r"out:1: custom_id: found \[\]"),
        (b"{", "out:1: found invalid JSON"),
    ):
        with pytest.raises(InputError, match=message):
            read_key(text, "out:1")


def test_groups_are_synced_before_they_are_done(tmp_path: Path, monkeypatch) -> None:
    synced: list[int] = []
    now = [0.0]
    path = tmp_path / "out.jsonl"
    with ResultsFile(
        path, SETTINGS, group_size=3, group_seconds=10.0, clock=lambda: now[0]
    ) as file:
        monkeypatch.setattr(os, "fsync", lambda handle: synced.append(os.fstat(handle).st_size))
        for number in range(4):
            file.add(f"r{number}", line(f"r{number}"))
            assert len(file.done) == 3 * (number >= 2)
        assert synced == [path.stat().st_size]
        now[0] = 9.0
        file.add("r4", line("r4"))
        assert "r4" not in file.done
        now[0] = 10.0
        file.add("r5", line("r5"))
        assert "r5" in file.done
        file.add("r6", line("r6"))
    assert keys(path) == [f"r{number}" for number in range(7)]
    assert synced[-1] == path.stat().st_size


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_results_of_a_run_that_is_stopped_are_kept(tmp_path: Path, error) -> None:
    path = tmp_path / "out.jsonl"
    file = ResultsFile(path, SETTINGS)
    file.add("a", line("a"))
    file.__exit__(error, error(), None)
    assert keys(path) == ["a"]


def test_a_full_disk_loses_nothing_that_was_done(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "out.jsonl"
    real, full = os.write, [True]

    def write(handle: int, data: memoryview) -> int:
        if full[0] and len(data) < 20:
            raise OSError(28, "No space left on device")
        return real(handle, data[:20] if full[0] else data)

    file = ResultsFile(path, SETTINGS)
    file.add("a", line("a"))
    file.commit()
    monkeypatch.setattr(os, "write", write)
    file.add("b", line("b"))
    with pytest.raises(OSError, match="No space"):
        file.commit()
    assert ("b" in file.done, keys(path)) == (False, ["a"])
    full[0] = False
    file.commit()
    assert keys(path) == ["a", "b"]
    full[0] = True
    file.add("c", line("c"))
    error = OSError(28, "No space left on device")
    file.__exit__(OSError, error, None)  # not tried again
    assert keys(path) == ["a", "b"]


def test_a_file_cut_anywhere_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with ResultsFile(path, SETTINGS) as file:
        for key in "abc":
            file.add(key, line(key))
    whole = path.read_bytes()
    ends = [0, *(at + 1 for at, byte in enumerate(whole) if byte == 10)]
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        with ResultsFile(path, SETTINGS) as file:
            kept = sum(end <= size for end in ends) - 1
            assert [key in file.done for key in "abc"] == [place < kept for place in range(3)]
            assert path.stat().st_size == ends[kept]
            for key in "abc"[kept:]:
                file.add(key, line(key))
        assert path.read_bytes() == whole


def test_another_run_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with ResultsFile(path, SETTINGS) as file:
        file.add("a", line("a"))
    torn = path.read_bytes() + b"{"
    path.write_bytes(torn)
    for changes, message in (
        ({"model": "other"}, r'model: found "tiny", expected "other"; the results of another run'),
        ({"sampling": {"temperature": 0.5, "stop": ["a"]}}, r"sampling\.temperature: found 0\.0"),
        ({"shard": ...}, r'shard: found "0/1", expected none'),
        ({"new": 1}, r"new: found none, expected 1"),
    ):
        settings = {k: v for k, v in {**SETTINGS, **changes}.items() if v is not ...}
        with pytest.raises(InputError, match=rf"out\.jsonl\.run\.json: {message}"):
            ResultsFile(path, settings)
        assert path.read_bytes() == torn  # not even cut
    ResultsFile(path, SETTINGS).close()


def test_files_that_are_not_results(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text("a user's own file")
    with pytest.raises(InputError, match=r"out\.jsonl: found lines, but no out\.jsonl\.run\.json"):
        ResultsFile(path, SETTINGS)
    assert path.read_text() == "a user's own file"
    path.write_text("")
    ResultsFile(path, SETTINGS).close()  # an empty file is as good as none
    path.write_bytes(line("a") + b"not JSON\n")
    with pytest.raises(InputError, match=r"out\.jsonl:2: found invalid JSON"):
        ResultsFile(path, SETTINGS)
    path.write_bytes(line("a") + line("b") + line("a"))
    with pytest.raises(InputError, match=r"out\.jsonl:3: found the result of 'a' again"):
        ResultsFile(path, SETTINGS)
    with pytest.raises(InputError, match=r"none/out\.jsonl: found .*, expected a file that can be"):
        ResultsFile(tmp_path / "none" / "out.jsonl", SETTINGS)


def test_one_process_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with (
        ResultsFile(path, SETTINGS),
        pytest.raises(InputError, match=r"out\.jsonl: found another process that writes to it"),
    ):
        ResultsFile(path, SETTINGS)
    ResultsFile(path, SETTINGS).close()


def test_results_in_the_order_of_the_input() -> None:
    out: list[str] = []
    order = InputOrder(lambda key, _: out.append(key))
    for key in "abcde":
        order.expect(key)
    for key, verb, expected in (
        ("c", order.add, ""),
        ("b", lambda key, _: order.drop(key), ""),
        ("a", order.add, "ac"),
        ("e", order.add, "ac"),
        ("d", order.add, "acde"),
    ):
        verb(key, line(key))
        assert "".join(out) == expected
    assert order.num_expected == 0
    order.expect("f")
    assert order.num_expected == 1


def test_bad_lines_are_written_as_they_are_found(tmp_path: Path) -> None:
    path = errors_path(tmp_path / "out.jsonl")
    assert path.name == "out.errors.jsonl"
    path.write_text("of an earlier process")
    errors = ErrorsFile(path)
    assert not path.exists()
    errors.add(BadLine("in.jsonl", 3, "found é", "x"))
    errors.add(BadLine("in.jsonl", 9, "found none"))
    assert [json.loads(one) for one in path.read_text().splitlines()] == [
        {"file": "in.jsonl", "line": 3, "id": "x", "reason": "found é"},
        {"file": "in.jsonl", "line": 9, "id": None, "reason": "found none"},
    ]
    assert errors.count == 2
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError, match=r"folder: found .*, expected to replace it"):
        ErrorsFile(tmp_path / "folder")


# Answers what is missing, in a shuffled order and in small groups, a few bytes a write.
WORKER = """
import os, random, sys, time
from pathlib import Path
from peagle_jax.serving.input_order import InputOrder
from peagle_jax.serving.result_lines import json_line
from peagle_jax.serving.results_file import ResultsFile

path, ordered, total = Path(sys.argv[1]), sys.argv[2] == "1", int(sys.argv[3])
real = os.write
os.write = lambda handle, data: real(handle, data[:7])
with ResultsFile(path, {"total": total}, group_size=5) as file:
    order = InputOrder(file.add)
    missing = [str(n) for n in range(total) if str(n) not in file.done]
    print("ready", flush=True)
    for begin in range(0, len(missing), 8):
        batch = missing[begin : begin + 8]
        for key in batch:
            order.expect(key)
        random.shuffle(batch)
        for key in batch:
            time.sleep(0.0005)
            line = json_line({"id": key, "text": "answer to " + key})
            order.add(key, line) if ordered else file.add(key, line)
"""


@pytest.mark.parametrize(("ordered", "kills"), [(False, 5), (True, 2)])
def test_killed_at_any_moment_every_id_is_there_once(tmp_path, ordered: bool, kills: int) -> None:
    path, total = tmp_path / "out.jsonl", 400
    draw = random.Random(ordered)
    command = [sys.executable, "-c", WORKER, str(path), str(int(ordered)), str(total)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    before, killed = 0, 0
    for kill in [*[True] * kills, False]:
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            if kill:
                time.sleep(draw.uniform(0.0, 0.06))
                process.kill()
        killed += process.returncode == -9
        whole = path.read_bytes().count(b"\n")
        assert whole >= before  # what was done stays done
        before = whole
    assert process.returncode == 0
    assert killed > 0
    found = [json.loads(one) for one in path.read_text().splitlines()]
    numbers = [int(one["id"]) for one in found]
    assert sorted(numbers) == list(range(total))
    assert not ordered or numbers == list(range(total))
    assert all(one["text"] == f"answer to {one['id']}" for one in found)
    assert json.loads(settings_path(path).read_text()) == {"format": 1, "total": total}
