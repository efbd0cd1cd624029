"""`peagle batch`, killed with SIGKILL again and again: every id once, the same tokens."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from peagle_jax import cli
from tests.training import tiny_model

ROOT = Path(__file__).resolve().parent.parent
FIRST, TOTAL = 150, 260  # lines of the first file, of both
# Killed a moment after so many lines are in the output.
MOMENTS = {"as they come": (0, 1, 130), "ordered": (70,)}


def request(number: int) -> dict[str, Any]:
    """Own lines, some without an id, and OpenAI's; greedy and sampled, with and without seeds."""
    draw = random.Random(number)
    prompt = " ".join(f"w{draw.randrange(3, tiny_model.VOCAB)}" for _ in range(1 + number % 7))
    tokens = 2 + number % 9
    if number % 3 == 0:
        body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0.8 * (number % 2)}
        call = {"method": "POST", "url": "/v1/completions", "body": body}
        return {"custom_id": f"c{number}", **call}
    own = {"prompt": prompt, "max_new_tokens": tokens, "temperature": 0.7 * (number % 2)}
    if number % 5 == 0:
        own["seed"] = number
    return own if number % 7 == 0 else {"id": number, **own}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with model/, in/a.jsonl and in/b.jsonl, and whole.jsonl: an undisturbed run."""
    folder = tmp_path_factory.mktemp("killed")
    tiny_model.write_target(folder / "model")
    (folder / "in").mkdir()
    lines = [json.dumps(request(number)) + "\n" for number in range(TOTAL)]
    (folder / "in" / "a.jsonl").write_text("".join(lines[:FIRST]))
    (folder / "in" / "b.jsonl").write_text("".join(lines[FIRST:]))
    assert cli.main(command(folder, "whole.jsonl", str(folder / "in"), str(folder / "model"))) == 0
    return folder


def command(folder: Path, output: str, source: str, model: str) -> list[str]:
    return [
        *("batch", "--input", source, "--output", str(folder / output), "--model", model),
        *("--method", "prompt-lookup", "--num-draft-tokens", "2"),
        *("--slots", "4", "--context", "64", "--page-size", "8", "--pages", "20"),
    ]


def answers(path: Path) -> dict[str, Any]:
    """key -> what a result says beside the time of day."""
    found: dict[str, Any] = {}
    for line in path.read_text().splitlines():
        one = json.loads(line)
        name = str(one.get("custom_id", one["id"]))
        assert name not in found
        if "custom_id" in one:
            one["response"]["body"].pop("created")
        found[name] = one
    return found


def lines_in(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.slow
@pytest.mark.parametrize("order", MOMENTS)
def test_killed_and_started_again(folder: Path, order: str) -> None:
    out, ordered = folder / f"{order}.jsonl", order == "ordered"
    # Another folder and another spelling each time: the same files, the same run.
    spellings = [(folder, "in", "model"), (folder / "in", ".", "../model")]
    draw, there = random.Random(ordered), 0
    for turn, moment in enumerate([*MOMENTS[order], None]):
        place, source, model = spellings[turn % 2]
        run = [*command(folder, out.name, source, model), *["--ordered"] * ordered]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        with subprocess.Popen(
            [sys.executable, "-m", "peagle_jax.cli", *run],
            cwd=place,
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            while moment is not None and process.poll() is None and lines_in(out) < moment:
                time.sleep(0.005)
            if moment is not None:
                time.sleep(draw.uniform(0, 0.3))
                process.kill()
            assert process.stderr is not None
            said = process.stderr.read()
        assert process.returncode == (0 if moment is None else -signal.SIGKILL), said
        assert lines_in(out) >= there  # what was done stays done
        there = lines_in(out) if moment is not None else there
    assert f"{TOTAL - there} answered, {there} were there before; " in said
    expected, found = answers(folder / "whole.jsonl"), answers(out)
    assert len(found) == TOTAL
    assert found == expected
    assert {"a.jsonl:8", "b.jsonl:5"} <= found.keys()
    if ordered:
        assert list(found) == [key(number) for number in range(TOTAL)]


def key(number: int) -> str:
    """What tells request `number` from others: its id, or its file and line."""
    one = request(number)
    place = f"a.jsonl:{number + 1}" if number < FIRST else f"b.jsonl:{number - FIRST + 1}"
    return str(one.get("custom_id", one.get("id", place)))
