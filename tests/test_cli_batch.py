"""`peagle batch` on a tiny model: files in, files out, exit codes."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest

from peagle_jax import api, cli
from peagle_jax.commands.batch import parse_bytes
from peagle_jax.config import SamplingParams
from peagle_jax.errors import InputError
from peagle_jax.metrics import GenerationStats
from peagle_jax.serving.batch import BatchRun
from peagle_jax.serving.batch_report import Tally
from tests.training import tiny_model

LINES = [
    {"id": "a", "prompt": "w5 w6"},
    {"id": "b", "token_ids": [3, 4], "temperature": 0.9, "seed": 5, "max_new_tokens": 9},
    {
        "custom_id": "c",
        "method": "POST",
        "url": "/v1/completions",
        "body": {"prompt": "w7 w8 w9", "max_tokens": 5},
    },
]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return str(tiny_model.write_target(tmp_path_factory.mktemp("models") / "target"))


@pytest.fixture
def command(target, tmp_path):
    """A command line over LINES, a run of seconds."""
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(one) + "\n" for one in LINES))
    line = ["batch", "--model", target, "--input", str(source), "--output", str(out)]
    return [*line, "--max-new-tokens", "7", "--slots", "2", "--context", "64"]


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_answers_are_those_of_generate(command, target, tmp_path, capsys) -> None:
    assert cli.main([*command, "--json", "--ordered"]) == 0
    shown = capsys.readouterr()
    report = json.loads(shown.out)
    assert (report["answered"], report["skipped"], report["bad_lines"]) == (3, 0, 0)
    assert report["prompt_tokens"] == 2 + 2 + 3
    assert "3 answered; " in shown.err
    assert "tokens out" in shown.err
    a, b, c = read(tmp_path / "out.jsonl")
    prompts: list[Any] = ["w5 w6", [3, 4], "w7 w8 w9"]
    expected = api.generate(
        api.load(target, None),
        prompts,
        [
            SamplingParams(max_new_tokens=7),
            SamplingParams(max_new_tokens=9, temperature=0.9, seed=5),
            SamplingParams(max_new_tokens=5),
        ],
    )
    for found, output in ((a, expected[0]), (b, expected[1])):
        assert found["token_ids"] == output.token_ids
        assert found["text"] == output.text
        assert found["finish_reason"] == output.finish_reason
    assert (a["id"], b["id"], c["custom_id"]) == ("a", "b", "c")
    body = c["response"]["body"]
    assert body["choices"][0]["text"] == expected[2].text
    assert (body["model"], body["usage"]["completion_tokens"]) == (
        target,
        len(expected[2].token_ids),
    )
    before = (tmp_path / "out.jsonl").read_bytes()
    assert cli.main([*command, "--ordered", "--slots", "1", "--page-size", "8"]) == 0
    assert "0 answered, 3 were there before" in capsys.readouterr().err
    assert (tmp_path / "out.jsonl").read_bytes() == before
    assert cli.main([*command, "--ordered", "--temperature", "0.5"]) == 2
    assert "sampling.temperature: found 0.0, expected 0.5" in capsys.readouterr().err


def test_bad_lines_exit_3(command, tmp_path, capsys) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(source.read_text() + '{"id": "bad"}\n{"prompt": "w5", "temprature": 1}\n')
    assert cli.main([*command, "--errors", str(tmp_path / "bad.jsonl")]) == 3
    shown = capsys.readouterr()
    assert (shown.out, shown.err.count("bad lines")) == ("", 2)
    assert len(read(tmp_path / "out.jsonl")) == 3
    found = [(one["line"], one["id"]) for one in read(tmp_path / "bad.jsonl")]
    assert found == [(4, "bad"), (5, None)]


def test_sigterm_keeps_what_is_done(command, tmp_path, monkeypatch) -> None:
    finish, handler = BatchRun._finish, signal.getsignal(signal.SIGTERM)

    def finish_one(self, end):
        finish(self, end)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(BatchRun, "_finish", finish_one)
    with pytest.raises(SystemExit) as exit_:
        cli.main(command)
    assert exit_.value.code == 128 + signal.SIGTERM
    assert len(read(tmp_path / "out.jsonl")) == 1
    assert signal.getsignal(signal.SIGTERM) == handler
    monkeypatch.undo()
    assert cli.main(command) == 0
    found = read(tmp_path / "out.jsonl")
    assert sorted(one.get("custom_id", one["id"]) for one in found) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--shard", "2/2"], "shard: found 2/2, expected i/n"),
        (["--cache-memory", "much"], "--cache-memory: found 'much', expected a size"),
        (["--temperature", "-1"], "temperature: found -1.0"),
        (["--input", "nowhere.jsonl"], "nowhere.jsonl: found no such file"),
        (["--num-draft-tokens", "0"], "num_draft_tokens: found 0"),
        (["--model", "nowhere/model/folder"], "nowhere/model/folder"),
        (["--slots", "0"], "slots: found 0, expected 1 or more"),
        (["--pages", "1"], "pages: found 1, expected at least 2"),
        (["--context", "999"], "context: found 999, expected at most 128, the target's"),
        (["--method", "p-eagle"], "method: found 'p-eagle', but no drafter is loaded"),
        (["--output", "."], "--output: found ., a folder, expected a file"),
        (["--output", "/"], "--output: found /, a folder, expected a file"),
        (["--output", "/dev/null"], "--output: found /dev/null, which is no regular file"),
        (["--output", "nowhere/o.jsonl"], "--output: found nowhere/o.jsonl, expected a file in a"),
        (["--errors", "nowhere/e.jsonl"], "--errors: found nowhere/e.jsonl, expected a file in a"),
    ],
)
def test_bad_options_are_one_line(command, tmp_path, capsys, options, message) -> None:
    assert cli.main([*command, *options]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("peagle: error: ")
    assert shown.err.count("\n") == 1
    assert message in shown.err
    # A run that found nothing does not stand in the way of the next.
    assert not (tmp_path / "out.jsonl").exists() or not (tmp_path / "out.jsonl").read_bytes()


def test_files_of_a_run_are_different_ones(command, tmp_path, capsys) -> None:
    out = str(tmp_path / "out.jsonl")
    assert cli.main([*command, "--errors", out]) == 2
    assert "--errors: found" in capsys.readouterr().err
    given = command[command.index("--input") + 1]
    before = Path(given).read_bytes()
    assert cli.main([*command, "--output", given]) == 2
    assert f"--input: found {given}, which this run writes" in capsys.readouterr().err
    assert Path(given).read_bytes() == before


@pytest.mark.parametrize(
    ("text", "found"), [("123", 123), ("1K", 1024), ("1.5m", 3 << 19), ("2G", 2 << 30)]
)
def test_sizes(text, found) -> None:
    assert parse_bytes(text) == found


@pytest.mark.parametrize("text", ["", "G", "-1G", "0", "1 GB", "1e999", "nan"])
def test_sizes_that_are_none(text) -> None:
    with pytest.raises(InputError, match="--cache-memory: found"):
        parse_bytes(text)


def test_watched_runs(command, target, tmp_path, capsys) -> None:
    traces = tmp_path / "traces"
    source = tmp_path / "in.jsonl"
    prompt = {"token_ids": [3, 4, 5], "max_new_tokens": 12, "ignore_eos": True}
    source.write_text("".join(json.dumps(prompt) + "\n" for _ in range(12)))
    drafting = ["--method", "prompt-lookup", "--json"]
    assert cli.main([*command, *drafting, "--metrics-port", "0", "--profile", str(traces)]) == 0
    shown = capsys.readouterr()
    assert re.search(r"^metrics      http://\S+:\d+/metrics$", shown.err, re.MULTILINE)
    profile = json.loads(shown.out)["profile"]
    assert profile["visits"] > 0
    assert sum(profile["split"].values()) == pytest.approx(1)
    assert str(traces) in profile["trace"]
    assert "profile      " in shown.err
    assert "host         " in shown.err


def test_options_of_watching_are_checked_first(command, tmp_path, capsys) -> None:
    assert cli.main([*command, "--metrics-port", "99999"]) == 2
    assert "--metrics-port: found 99999, expected 0 to 65535" in capsys.readouterr().err
    assert not (tmp_path / "out.jsonl").exists()


def test_a_drafter_of_another_model_is_noticed(command, monkeypatch, capsys) -> None:
    real, drafts = Tally.stats, 0

    def stats(self, seconds: float, compile_seconds: float) -> GenerationStats:
        found = real(self, seconds, compile_seconds)
        return dataclasses.replace(found, num_drafts=drafts, accepted_per_position=(0, 0))

    monkeypatch.setattr(Tally, "stats", stats)
    for drafts, warned in ((64, True), (63, False)):  # noqa: B007  # `stats` looks at it
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            assert cli.main(command) == 0
        assert ("warning: none of 64 drafts was accepted" in capsys.readouterr().err) == warned
