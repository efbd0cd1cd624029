"""`peagle distill`: options to answers, statistics, bad input."""

from __future__ import annotations

import json

import pytest

from peagle_jax import cli
from peagle_jax.training.answers import AnswersFile, read_meta
from tests.training import tiny_model


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return tiny_model.write_target(tmp_path_factory.mktemp("models") / "target")


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    lines = [
        {"id": "a", "source": "S", "category": "C", "prompt": "w5 w6"},
        {"token_ids": [3, 4]},
        {"id": "c", "prompt": "w7"},
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def test_answers_and_statistics(target, prompts, tmp_path, capsys) -> None:
    out = tmp_path / "D"
    command = ["distill", "--model", str(target), "--prompts", str(prompts), "--out", str(out)]
    command += ["--max-new-tokens", "6", "--temperature", "0.5", "--seed", "3", "--limit", "2"]
    assert cli.main([*command, "--json"]) == 0
    shown = capsys.readouterr()
    found = {one.id: one for one in AnswersFile(out)}
    assert set(found) == {"a", "2"}
    assert (found["a"].source, found["a"].category) == ("S", "C")
    assert json.loads(shown.out)["answered"] == 2
    assert "2 prompts answered, 0 were there before" in shown.err
    assert read_meta(out).sampling["temperature"] == 0.5
    assert cli.main(command[:-2]) == 0
    assert "1 prompts answered, 2 were there before" in capsys.readouterr().err
    assert len(AnswersFile(out)) == 3


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "--prompts and --self-prompt: found neither"),
        (["--self-prompt", "-1"], "--self-prompt: found -1, expected 0 or more"),
        (["--self-prompt", "1", "--batch-size", "0"], "--batch-size: found 0"),
        (["--self-prompt", "1", "--temperature", "-1"], "temperature: found -1.0"),
        (["--prompts", "missing.jsonl"], "missing.jsonl"),
    ],
)
def test_bad_options(options, words, tmp_path, capsys) -> None:
    out = tmp_path / "D"
    assert cli.main(["distill", "--out", str(out), *options]) == 2
    assert words in capsys.readouterr().err
    assert not out.exists()
