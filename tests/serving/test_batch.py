"""A batch run over an engine without a device: every request's answer, once, in its file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from peagle_jax.config import SamplingParams
from peagle_jax.serving.batch import BatchRun
from peagle_jax.serving.batch_report import BatchReport, Status
from peagle_jax.serving.engine_protocol import EngineShape
from peagle_jax.serving.errors_file import ErrorsFile
from peagle_jax.serving.input_lines import InputLine
from peagle_jax.serving.requests_file import BadLine, BatchRequest, read_requests
from peagle_jax.serving.results_file import ResultsFile
from peagle_jax.serving.scheduler import Policy
from peagle_jax.serving.sequence import Request
from tests.decoding import tiny
from tests.serving.fake_engine import EOS, VOCAB, FakeEngine, answer

SHAPE = EngineShape(num_slots=3, num_pages=40, page_size=2, context=30, num_draft_tokens=2)
MODEL = tiny.target_config(vocab_size=VOCAB, max_positions=SHAPE.context)


class TimedFake(FakeEngine):
    compile_seconds = 0.0
    wait_seconds = 0.0

    def fetch(self, pending: int) -> Any:
        self.wait_seconds += 0.5
        return super().fetch(pending)


class Letters:
    """One letter a token; the end of sequence is "a", and special."""

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) - ord("a") for letter in text]}

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return "".join(chr(ord("a") + one) for one in ids if one != EOS)


def lines(values: Iterable[Any]) -> list[InputLine]:
    return [
        InputLine("in.jsonl", number, one if isinstance(one, bytes) else json.dumps(one).encode())
        for number, one in enumerate(values, start=1)
    ]


def run(
    folder: Path, requests: Iterable[BatchRequest | BadLine], tokenizer: Any = None, **options: Any
) -> tuple[BatchReport, list[tuple[int, str]]]:
    seen: list[tuple[int, str]] = []
    with ResultsFile(folder / "out.jsonl", {}) as results:
        errors = ErrorsFile(folder / "bad.jsonl")
        batch = BatchRun(
            TimedFake(SHAPE),
            tokenizer or Letters(),
            MODEL,
            results,
            errors,
            model_name="tiny",
            policy=Policy(2, 8),
            **options,
        )
        report = batch.run(requests, lambda status: seen.append((status.done, str(status))))
    return report, seen


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def parsed(values: Iterable[Any], max_new_tokens: int = 9) -> list[BatchRequest | BadLine]:
    return list(read_requests(lines(values), SamplingParams(max_new_tokens=max_new_tokens), 7))


MANY: list[dict[str, Any]] = [
    {"id": f"r{n}", "token_ids": [1 + n % 20, *[3] * (n % 9)], "max_new_tokens": 1 + n % 11}
    for n in range(60)
]


@pytest.mark.parametrize("ordered", [False, True])
def test_every_request_is_answered_once(tmp_path: Path, ordered) -> None:
    requests = parsed(MANY)
    report, seen = run(tmp_path, requests, ordered=ordered)
    found = read(tmp_path / "out.jsonl")
    order = [one["id"] for one in found]
    assert sorted(order) == sorted(one["id"] for one in MANY)
    assert (order == [one["id"] for one in MANY]) == ordered
    by_id = {one["id"]: one for one in found}
    num_tokens = 0
    for one in requests:
        assert isinstance(one, BatchRequest)
        assert isinstance(one.prompt, list)
        assert one.params.seed is not None
        request = Request(one.key, [int(str(i)) for i in one.prompt], one.params, one.params.seed)
        tokens, reason = answer(request, SHAPE.context)
        result = by_id[one.id]
        assert (tuple(result["token_ids"]), result["finish_reason"]) == (tokens, reason)
        assert result["text"] == Letters().decode(list(tokens), skip_special_tokens=True)
        assert result["usage"]["prompt_tokens"] == len(one.prompt)
        num_tokens += len(tokens)
    assert (report.answered, report.skipped, report.bad_lines) == (60, 0, 0)
    assert report.stats.tokens == num_tokens
    assert report.prompt_tokens == sum(len(one["token_ids"]) for one in MANY)
    drafts = sum(one["acceptance"]["num_drafts"] for one in found)
    accepted = sum(one["acceptance"]["num_accepted"] for one in found)
    assert report.stats.acceptance_length == 1 + accepted / drafts
    assert 0.5 < report.occupancy < 1
    assert report.latency["p99"] >= report.latency["p50"] >= report.first_token["p50"] >= 0
    assert report.wait_seconds == report.counters.steps / 2 * 0.5
    assert report.to_json()["answered"] == 60
    assert report.host_seconds == max(0.0, report.stats.seconds - report.wait_seconds)
    text = "\n".join(report.lines())
    assert text.startswith("60 answered; ")
    assert f"tokens out   {num_tokens} (" in text
    # All but the last group is on the disk only with the end of the run.
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert "acceptance length " in seen[-1][1]
    assert not (tmp_path / "bad.jsonl").exists()


def test_a_stopped_run_goes_on(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir()
    parts.mkdir()
    run(whole, parsed(MANY))

    def until(count: int) -> Iterator[BatchRequest | BadLine]:
        yield from parsed(MANY)[:count]
        raise KeyboardInterrupt

    done = 0
    for count in (20, 30, 55):
        with pytest.raises(KeyboardInterrupt):
            run(parts, until(count), ordered=count == 30)
        assert len(read(parts / "out.jsonl")) > done
        done = len(read(parts / "out.jsonl"))
    report, _ = run(parts, parsed(MANY))
    assert (report.answered, report.skipped) == (60 - done, done)
    by_id = {one["id"]: one for one in read(whole / "out.jsonl")}
    found = read(parts / "out.jsonl")
    assert len(found) == 60
    assert {one["id"]: one for one in found} == by_id
    report, _ = run(parts, parsed(MANY))
    assert (report.answered, report.skipped, report.latency) == (0, 60, {})
    assert report.lines()[0].startswith("0 answered, 60 were there before; ")


def test_bad_lines_do_not_stop_the_run(tmp_path: Path) -> None:
    values = [
        {"id": "a", "token_ids": [1, 2]},
        b"{",
        {"id": "b", "token_ids": [5] * 30},
        {"id": "c", "token_ids": [24]},
        {"id": "a", "token_ids": [3]},
        {"id": "d", "messages": [{"role": "user", "content": "b"}]},
        {"id": "e", "prompt": "bcd", "max_new_tokens": 3},
    ]
    report, seen = run(tmp_path, parsed(values))
    assert sorted(one["id"] for one in read(tmp_path / "out.jsonl")) == ["a", "e"]
    assert (report.answered, report.bad_lines) == (2, 5)
    assert "2 answered, 5 bad lines; " in report.lines()[0]
    assert [(one["line"], one["id"], one["reason"]) for one in read(tmp_path / "bad.jsonl")] == [
        (2, None, "found invalid JSON (Expecting property name enclosed in double quotes)"),
        (
            3,
            "b",
            "found 30 tokens, expected at most 29 (the target's context less one token of answer)",
        ),
        (4, "c", "found token id 24, expected 0 to 23 (the target's vocabulary)"),
        (5, "a", 'id: found "a" again, expected it once'),
        (6, "d", "found chat messages, but the tokenizer has no chat template"),
    ]
    assert seen[-1][0] <= 7
    # What an engine has no room for is found by its scheduler.
    small = EngineShape(num_slots=1, num_pages=6, page_size=2, context=30, num_draft_tokens=2)
    with ResultsFile(tmp_path / "small.jsonl", {}) as results:
        errors = ErrorsFile(tmp_path / "small.bad.jsonl")
        batch = BatchRun(TimedFake(small), None, MODEL, results, errors, model_name="tiny")
        stop = {"id": "s", "token_ids": [1], "stop": "x", "max_new_tokens": 2}
        batch.run(parsed([{"id": "big", "token_ids": [1] * 9}, stop]))
    reasons = [one["reason"] for one in read(tmp_path / "small.bad.jsonl")]
    assert reasons[0].startswith("found 9 tokens and max_new_tokens 9, which need 11 pages of 2;")
    assert reasons[1] == "found stop strings, but no tokenizer is loaded"


def test_a_stop_string_ends_an_answer(tmp_path: Path) -> None:
    plain = {"token_ids": [4, 4], "max_new_tokens": 20, "ignore_eos": True, "seed": 1}
    run(tmp_path, parsed([{"id": "whole", **plain}]))
    (whole,) = read(tmp_path / "out.jsonl")
    stop = whole["text"][5:7]
    at = whole["text"].index(stop)
    run(tmp_path, parsed([{"id": "cut", **plain, "stop": [stop, "zzz"]}]))
    cut = read(tmp_path / "out.jsonl")[1]
    assert (cut["text"], cut["finish_reason"]) == (whole["text"][:at], "stop")
    assert cut["token_ids"] == whole["token_ids"][: len(cut["token_ids"])]
    assert len(cut["token_ids"]) < 20


@pytest.mark.parametrize("ordered", [False, True])
def test_few_requests_are_in_memory(tmp_path: Path, ordered) -> None:
    answered = [0]
    most = [0]

    def source() -> Iterator[BatchRequest | BadLine]:
        # The first one takes the longest; the others are over at once.
        first = {"id": "long", "token_ids": [1], "max_new_tokens": 29, "ignore_eos": True}
        rest = ({"id": n, "token_ids": [2], "max_new_tokens": 1} for n in range(400))
        for count, one in enumerate(parsed([first, *rest])):
            most[0] = max(most[0], count - answered[0])
            yield one

    with ResultsFile(tmp_path / "out.jsonl", {}, group_size=1) as results:
        batch = BatchRun(
            TimedFake(SHAPE),
            None,
            MODEL,
            results,
            ErrorsFile(tmp_path / "bad.jsonl"),
            model_name="tiny",
            ordered=ordered,
            policy=Policy(1, 8),
        )

        def watch(status: Status) -> None:
            answered[0] = status.done

        batch.run(source(), watch)
    assert len(read(tmp_path / "out.jsonl")) == 401
    # Slots, as many that wait, those of a visit; in order also what came before the first.
    assert most[0] <= (64 + 16 * 3 if ordered else 3 + 8 + 3 + 1)
