"""The `peagle` command on SmolLM2-135M-Instruct and the drafter that ships for it."""

from __future__ import annotations

import json

import pytest

from peagle_jax import cli

pytestmark = pytest.mark.real_model

PROMPT = "Why is the sky blue?"


def generate(capsys, *options):
    code = cli.main(["generate", *options])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_drafting_changes_the_steps_not_the_answer(capsys):
    answers = []
    for method in ("p-eagle", "none"):
        code, out, err = generate(
            capsys, PROMPT, "--method", method, "--max-new-tokens", "24", "--json"
        )
        assert (code, err) == (0, "")
        answers.append(json.loads(out))
    drafted, plain = answers
    for key in ("text", "token_ids", "prompt_tokens", "finish_reason"):
        assert drafted[key] == plain[key]
    assert "sky" in drafted["text"]
    # The prompt's own pass gives the first token, each draft one more than it had accepted.
    assert 1 + drafted["num_drafts"] + drafted["num_accepted"] >= 24 > drafted["num_drafts"]
    assert 0 < drafted["num_accepted"] == sum(drafted["accepted_per_position"])
    assert drafted["num_draft_tokens"] == 3 * drafted["num_drafts"]
    assert plain["num_drafts"] == 0


def test_streamed_text_is_the_whole_text(capsys):
    options = (PROMPT, "--max-new-tokens", "24")
    code, streamed, _ = generate(capsys, *options, "--stream")
    assert code == 0
    assert streamed == generate(capsys, *options)[1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((PROMPT, "--method", "eagle3"), ("method", "eagle3", "p-eagle")),
        (("",), ("PROMPT", "empty")),
        (("sky " * 9000,), ("PROMPT", "8191")),
        ((PROMPT, "--model", "/nowhere/model"), ("/nowhere/model",)),
    ],
)
def test_bad_input_is_one_line(capsys, options, words):
    code, out, err = generate(capsys, *options)
    assert code == 2
    assert out == ""
    assert err.startswith("peagle: error: ")
    assert err.count("\n") == 1
    assert all(word in err for word in words)
