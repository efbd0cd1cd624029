"""`peagle generate` against a stand-in for the library: what it asks for and what it prints."""

from __future__ import annotations

import io
import json

import pytest

import peagle_jax
from peagle_jax import cli
from peagle_jax.api import Piece
from peagle_jax.channels import Part
from peagle_jax.commands.prompts import read_prompts
from peagle_jax.config import SamplingParams
from peagle_jax.errors import InputError
from peagle_jax.metrics import GenerationStats
from peagle_jax.runner import Output


def make_output(text="A sky.", num_drafts=20, accepted=(15, 5), parts=()):
    stats = GenerationStats(
        tokens=3,
        num_drafts=num_drafts,
        num_draft_tokens=2 * num_drafts,
        accepted_per_position=accepted,
        seconds=0.25,
        compile_seconds=1.25,
    )
    return Output(text, [5, 6, 7], 4, "stop", stats, parts)


class Library:
    """Records the calls and answers each prompt with the next of `outputs`."""

    def __init__(self):
        self.calls = []
        self.outputs = [make_output()]

    def load(self, **kwargs):
        self.calls.append(("load", kwargs))
        return "pair"

    def generate(self, pair, prompts, params, **kwargs):
        self.calls.append(("generate", pair, prompts, params, kwargs))
        if kwargs["progress"]:
            kwargs["progress"](1, len(prompts))
        return self.outputs

    def stream(self, pair, prompt, params, **kwargs):
        self.calls.append(("stream", pair, prompt, params, kwargs))
        output = self.outputs.pop(0)
        for channel, text in [(p.channel, p.text) for p in output.parts] or [(None, output.text)]:
            yield from (Piece(word, channel) for word in text.split(" "))
        yield output


@pytest.fixture
def library(monkeypatch):
    stand_in = Library()
    monkeypatch.setattr(peagle_jax, "api", stand_in, raising=False)
    return stand_in


def test_defaults(library):
    assert cli.main(["generate", "Why?"]) == 0
    assert library.calls == [
        ("load", {"target": "smollm2", "drafter": "auto", "dtype": None, "weights": "full"}),
        (
            "generate",
            "pair",
            ["Why?"],
            SamplingParams(),
            {
                "method": None,
                "num_draft_tokens": None,
                "draft_sampling": "sample",
                "verify": "coupled",
                "raw": False,
                "batch_size": 8,
                "progress": None,
                "names": ["PROMPT"],
            },
        ),
    ]


def test_every_option_arrives(library):
    options = (
        "--model m --drafter d --dtype bfloat16 --weights int8 --method eagle3 "
        "--num-draft-tokens 3 --draft-sampling greedy --verify rejection "
        "--temperature 0.5 --top-k 9 --top-p 0.9 "
        "--min-p 0.1 --seed 3 --max-new-tokens 7 --stop END --stop FIN --batch-size 2 --raw"
    )
    assert cli.main(["generate", "Why?", *options.split()]) == 0
    (_, load), (_, _, _, params, kwargs) = library.calls
    assert load == {"target": "m", "drafter": "d", "dtype": "bfloat16", "weights": "int8"}
    assert params == SamplingParams(
        max_new_tokens=7,
        temperature=0.5,
        top_k=9,
        top_p=0.9,
        min_p=0.1,
        seed=3,
        stop=("END", "FIN"),
    )
    assert kwargs == {
        "method": "eagle3",
        "num_draft_tokens": 3,
        "draft_sampling": "greedy",
        "verify": "rejection",
        "raw": True,
        "batch_size": 2,
        "progress": None,
        "names": ["PROMPT"],
    }


def test_text_on_stdout_statistics_on_stderr(library, capsys):
    assert cli.main(["generate", "Why?"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "A sky.\n"
    assert captured.err == library.outputs[0].stats.line() + "\n"
    assert "acceptance length 2.00" in captured.err


def test_plain_decoding_loads_no_drafter(library, capsys):
    library.outputs = [make_output(num_drafts=0, accepted=())]
    assert cli.main(["generate", "Why?", "--method", "none"]) == 0
    assert library.calls[0] == (
        "load",
        {"target": "smollm2", "drafter": None, "dtype": None, "weights": "full"},
    )
    assert "acceptance" not in capsys.readouterr().err


def test_json_is_one_object_a_prompt(library, capsys, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('"one"\n{"prompt": "two"}\n')
    library.outputs = [make_output(text="é"), make_output(text="second")]
    assert cli.main(["generate", "--prompts", str(file), "--json"]) == 0
    captured = capsys.readouterr()
    first, second = (json.loads(line) for line in captured.out.splitlines())
    assert first == {
        "text": "é",
        "token_ids": [5, 6, 7],
        "prompt_tokens": 4,
        "finish_reason": "stop",
        "num_drafts": 20,
        "num_draft_tokens": 40,
        "num_accepted": 20,
        "accepted_per_position": [15, 5],
        "acceptance_length": 2.0,
        "tokens_per_second": 12.0,
        "compile_seconds": 1.25,
    }
    assert second["text"] == "second"
    assert captured.err == ""


def test_stream_prints_pieces_then_statistics(library, capsys):
    assert cli.main(["generate", "Why?", "--stream"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "Asky.\n"
    assert captured.err.startswith("3 tokens in 0.25 s, 12.0 tokens/s")
    (_, (name, _, prompt, _, kwargs)) = library.calls
    assert (name, prompt) == ("stream", "Why?")
    assert "batch_size" not in kwargs


def test_answers_in_channels_are_shown_as_such(library, capsys):
    parts = (Part("analysis", "Blue light."), Part("final", "It scatters."))
    library.outputs = [make_output("Blue light.\n\nIt scatters.", parts=parts)] * 3
    assert cli.main(["generate", "Why?", "--raw"]) == 0
    shown = capsys.readouterr().out
    assert shown == "[analysis]\nBlue light.\n[final]\nIt scatters.\n" * 3
    assert cli.main(["generate", "Why?", "--stream"]) == 0
    assert capsys.readouterr().out == "[analysis]\nBluelight.[final]\nItscatters.\n"
    assert cli.main(["generate", "Why?", "--json"]) == 0
    first = json.loads(capsys.readouterr().out.splitlines()[0])
    assert first["parts"] == [
        {"channel": "analysis", "text": "Blue light."},
        {"channel": "final", "text": "It scatters."},
    ]


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("lines", ['"one"', '"one"\n"two"'])
def test_progress_is_shown_on_a_terminal_for_many(library, monkeypatch, tmp_path, lines):
    file = tmp_path / "prompts.jsonl"
    file.write_text(lines)
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    assert cli.main(["generate", "--prompts", str(file), "--json"]) == 0
    progress = library.calls[1][-1]["progress"]
    assert (progress is not None) == ("two" in lines)
    assert ("1/2" in terminal.getvalue()) == ("two" in lines)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["x", "--num-draft-tokens", "0"], "num_draft_tokens: found 0, expected 1 to 32"),
        (["x", "--num-draft-tokens", "33"], "num_draft_tokens: found 33, expected 1 to 32"),
        (["x", "--temperature", "-1"], "temperature: found -1.0, expected 0 (greedy) or more"),
        (["x", "--top-p", "0"], "top_p: found 0.0, expected a number in (0, 1]"),
        (["x", "--top-p", "1.5"], "top_p: found 1.5, expected a number in (0, 1]"),
        (["x", "--min-p", "-0.5"], "min_p: found -0.5, expected a number in [0, 1]"),
        (["x", "--top-k", "-1"], "top_k: found -1, expected 0 (off) or more"),
        (["x", "--max-new-tokens", "0"], "max_new_tokens: found 0, expected 1 or more"),
        (["x", "--batch-size", "0"], "--batch-size: found 0, expected 1 or more"),
        (["x", "--stop", ""], "stop: found an empty string, expected non-empty strings"),
        ([], "PROMPT and --prompts: found neither, expected exactly one"),
        (["x", "--prompts", "y"], "PROMPT and --prompts: found both, expected exactly one"),
        (
            ["--prompts", "missing.jsonl"],
            "missing.jsonl: No such file or directory, expected a JSON Lines file",
        ),
    ],
)
def test_bad_input_is_refused_before_loading(library, capsys, argv, message):
    assert cli.main(["generate", *argv]) == 2
    assert capsys.readouterr().err == f"peagle: error: {message}\n"
    assert library.calls == []


def test_prompt_files_hold_every_kind(tmp_path):
    file = tmp_path / "prompts.jsonl"
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    lines = [
        json.dumps("a string with a \u2028 line separator", ensure_ascii=False),
        "",
        json.dumps({"id": 7, "prompt": "text"}),
        json.dumps({"messages": chat}),
        json.dumps({"token_ids": [1, 2]}),
    ]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert read_prompts(file)[0] == ["a string with a \u2028 line separator", "text", chat, [1, 2]]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "1: found invalid JSON (Expecting property name enclosed in double quotes)"),
        ("3", "1: found 3, expected a string or an object"),
        ("{}", "1: found none of them, expected exactly one of prompt, messages, token_ids"),
        (
            '{"prompt": "a", "token_ids": [1]}',
            "1: found prompt and token_ids, expected exactly one of prompt, messages, token_ids",
        ),
        ('{"prompt": 1}', "1: prompt: found 1, expected a string"),
        ('{"token_ids": [1, true]}', "1: token_ids: found [1, true], expected a list of integers"),
        ('{"token_ids": [-1]}', "1: token_ids: found [-1], expected a list of integers from 0"),
        ('{"messages": [{"role": "user"}]}', '1: messages: found [{"role": "user"}], expected'),
        ('""', "1: found an empty prompt, expected text"),
        ('{"token_ids": []}', "1: token_ids: found an empty list, expected a list of integers"),
        ('{"messages": []}', "1: messages: found an empty list, expected a list of"),
        ('"\\ud800"', "1: found half a character at 0 (U+D800), expected Unicode text"),
        ('{"prompt": "a\\udfff"}', "1: prompt: found half a character at 1 (U+DFFF)"),
        ("\n\n", " found no prompts, expected one a line"),
    ],
)
def test_bad_prompt_files_are_named_by_line(tmp_path, line, message):
    file = tmp_path / "prompts.jsonl"
    file.write_text(line)
    with pytest.raises(InputError) as error:
        read_prompts(file)
    assert f"{file}:{message}" in str(error.value)


def test_prompt_files_must_be_text(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(b'"\xff"')
    with pytest.raises(InputError, match="not UTF-8"):
        read_prompts(file)
