"""Runs of several processes: two and four real ones on this machine, under `jax.distributed`."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from peagle_jax import cli
from peagle_jax.errors import EXIT_BAD_INPUT, InputError, exit_code
from peagle_jax.hosts import Joining, Part, Team, team_of
from peagle_jax.mesh_shape import MeshShape
from peagle_jax.serving.run_files import run_files
from tests.training import tiny_model

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target, requests, and the answers of one process."""
    folder: Path = tmp_path_factory.mktemp("hosts")
    tiny_model.write_target(folder / "target")
    rng = np.random.default_rng(3)
    lines = [
        {"id": f"r{n}", "token_ids": rng.integers(3, 64, rng.integers(1, 9)).tolist()}
        for n in range(24)
    ]
    lines[5]["temperature"] = lines[6]["temperature"] = 0.8
    (folder / "in.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    assert cli.main(["batch", *options(folder, folder / "one.jsonl")]) == 0
    return folder


def options(folder: Path, output: Path, slots: int = 4) -> list[str]:
    given = {
        "--model": folder / "target",
        "--input": folder / "in.jsonl",
        "--output": output,
        "--method": "prompt-lookup",
        "--num-draft-tokens": 2,
        "--max-new-tokens": 8,
        "--slots": slots,
        "--context": 32,
        "--page-size": 8,
    }
    return [str(part) for pair in given.items() for part in pair]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def run_processes(
    arguments: Sequence[str],
    count: int,
    devices: int = 1,
    seconds: float = 0.0,
    dies: int | None = None,
) -> list[tuple[int, str, float]]:
    """(exit code, stderr, second of its end) of every process; `dies` is killed after two
    answers."""
    address = f"127.0.0.1:{free_port()}"
    environment = {
        **os.environ,
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
    }
    command = [sys.executable, "-m", "tests.host_process", str(seconds)]
    rest = ["batch", *arguments, "--coordinator", address, "--num-processes", str(count)]
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(
                subprocess.Popen(
                    [*command, "2" if index == dies else "0", *rest, "--process-id", str(index)],
                    cwd=ROOT,
                    env=environment,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
            for index in range(count)
        ]
        for process in processes:
            stack.callback(process.kill)
        ends: dict[int, float] = {}
        while len(ends) < count:
            time.sleep(0.2)
            for index, process in enumerate(processes):
                if index not in ends and process.poll() is not None:
                    ends[index] = time.monotonic()
        found = []
        for index, process in enumerate(processes):
            assert process.stderr is not None
            found.append((int(process.returncode), process.stderr.read(), ends[index]))
        return found


def read(path: Path) -> dict[str, Any]:
    """Answers by id, each of them once."""
    found = [json.loads(line) for line in path.read_text().splitlines()]
    by_id = {one["id"]: one for one in found}
    assert len(by_id) == len(found)
    return by_id


def merged(output: Path, count: int) -> dict[str, Any]:
    files = [part.file(output) for part in Part(0, count).siblings()]
    parts = [read(file) for file in files if file.exists()]
    together = {key: one for part in parts for key, one in part.items()}
    assert len(together) == sum(map(len, parts))
    return together


def test_two_processes_with_a_mesh_give_the_answers_of_one(inputs, tmp_path) -> None:
    out = tmp_path / "out.jsonl"
    arguments = [*options(inputs, out), "--mesh", "data=2,model=2"]
    for code, errors, _ in run_processes(arguments, 2, devices=2):
        assert code == 0, errors
        assert "12 answered; " in errors
    assert merged(out, 2) == read(inputs / "one.jsonl")
    assert len(read(tmp_path / "out-00001-of-00002.jsonl")) == 12


def test_one_of_four_dies_and_a_restart_finishes(inputs, tmp_path) -> None:
    out = tmp_path / "out.jsonl"
    arguments = options(inputs, out)
    ends = run_processes(arguments, 4, seconds=8.0, dies=2)
    assert ends[2][0] == -9
    for index in (0, 1, 3):
        code, errors, at = ends[index]
        assert code != 0
        assert "another task died" in errors
        assert at - ends[2][2] < 60
    before = merged(out, 4)
    assert 2 <= len(before) < 24
    for code, errors, _ in run_processes(arguments, 4):
        assert code == 0, errors
    assert merged(out, 4) == read(inputs / "one.jsonl")


def test_two_processes_that_share_the_weights(inputs, tmp_path) -> None:
    out = tmp_path / "out.jsonl"
    arguments = [*options(inputs, out), "--mesh", "data=1,model=2"]
    # One process leads; what is done already is known to the other from the leader alone.
    done = (inputs / "one.jsonl").read_text().splitlines(keepends=True)[:5]
    out.write_text("".join(done))
    settings = json.loads((inputs / "one.jsonl.run.json").read_text())
    (tmp_path / "out.jsonl.run.json").write_text(json.dumps(settings))
    (leader, shown, _), (other, silent, _) = run_processes(arguments, 2)
    assert (leader, other) == (0, 0), shown + silent
    assert "19 answered, 5 were there before; " in shown
    assert "answered" not in silent
    assert read(out) == read(inputs / "one.jsonl")


def test_a_process_that_is_refused_does_not_wait_for_the_others(inputs, tmp_path) -> None:
    wrong = [*options(inputs, tmp_path / "out.jsonl"), "--mesh", "model=3"]
    ends = run_processes(wrong, 2)
    assert EXIT_BAD_INPUT in [code for code, _, _ in ends]
    for code, errors, _ in ends:
        # Both are wrong at about the same time; the slower one may be ended by JAX.
        assert code == EXIT_BAD_INPUT or "another task died" in errors
        assert "Traceback" not in errors
        if code == EXIT_BAD_INPUT:
            assert "--mesh: found model=3, which takes 3 devices, expected 2" in errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mesh", "data=2;model=2"], "--mesh: found 'data=2;model=2'"),
        (["--mesh", "tensor=2"], "--mesh: found the axis 'tensor', expected one of data"),
        (["--mesh", "data=64"], "--mesh: found data=64, which takes 64 devices, expected "),
        (["--coordinator", "nowhere"], "--coordinator: found 'nowhere', expected host:port"),
        (["--num-processes", "0"], "--num-processes: found 0, expected 1 or more"),
        (["--process-id", "-1"], "--process-id: found -1, expected 0 to"),
    ],
)
def test_bad_options_are_one_line(inputs, tmp_path, capsys, arguments, message) -> None:
    out = tmp_path / "out.jsonl"
    command = ["batch", *options(inputs, out), *arguments, "--model", "not/looked/at"]
    assert cli.main(command) == EXIT_BAD_INPUT
    shown = capsys.readouterr().err
    assert shown.startswith("peagle: error: ")
    assert message in shown
    assert shown.count("\n") == 1
    assert not out.exists()


def test_teams() -> None:
    process = Part(1, 4)
    alone = team_of(process, MeshShape(8, 1, 4), 8, 32)
    assert alone == Team(process, MeshShape(2, 1, 4), (1,), leads=True)
    assert alone.alone
    experts = team_of(process, MeshShape(4, 2, 4), 8, 32)
    assert experts == Team(process, MeshShape(1, 2, 4), (1,), leads=True)
    pair = team_of(process, MeshShape(2, 1, 16), 8, 32)
    assert pair == Team(Part(0, 2), MeshShape(1, 1, 16), (0, 1), leads=False)
    assert not pair.alone
    assert team_of(Part(2, 4), MeshShape(2, 1, 16), 8, 32).leads
    assert team_of(process, None, 8, 32) == Team(process, MeshShape(), (1,), leads=True)
    with pytest.raises(InputError, match="12 devices share a copy of the weights, expected a div"):
        team_of(process, MeshShape(2, 1, 12), 8, 24)
    with pytest.raises(InputError, match="takes 8 devices, expected 32"):
        team_of(process, MeshShape(2, 1, 4), 8, 32)


def test_files_of_parts(tmp_path) -> None:
    out = tmp_path / "out.jsonl"
    alone = run_files(out, None, Part())
    assert (alone.output, alone.errors) == (out, tmp_path / "out.errors.jsonl")
    third = run_files(out, tmp_path / "bad.jsonl", Part(2, 3))
    assert third.output == tmp_path / "out-00002-of-00003.jsonl"
    assert third.errors == tmp_path / "bad-00002-of-00003.jsonl"
    assert len(third.every) == 9
    assert tmp_path / "out-00000-of-00003.jsonl.run.json" in third.every
    with pytest.raises(InputError, match="--errors: found"):
        run_files(out, out, Part(0, 2))
    third.output.write_text("{}\n")
    assert run_files(out, None, Part(1, 3)).output.name == "out-00001-of-00003.jsonl"
    for other in (Part(), Part(0, 2)):
        message = f"of a run of 3 parts, expected {other.count}, as this one has"
        with pytest.raises(InputError, match=message):
            run_files(out, None, other)


def test_processes_that_do_not_belong_together() -> None:
    with pytest.raises(InputError, match="--process-id: found 4, expected 0 to"):
        Joining("host:1", 4, 4)
    assert not Joining().wanted
    with Joining().joined() as process:
        assert process == Part()


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (SystemExit(143), 143),
        (SystemExit("text"), 1),
        (InputError("x"), 2),
        (OSError("x"), 2),
        (BrokenPipeError(), 141),
        (KeyboardInterrupt(), 130),
        (RuntimeError("x"), 1),
    ],
)
def test_exit_codes(error, code) -> None:
    assert exit_code(error) == code
