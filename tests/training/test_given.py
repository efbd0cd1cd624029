"""Answers that are given: the very tokens that decoding would have left."""

from __future__ import annotations

import json

import pytest

from peagle_jax import api, cli
from peagle_jax.errors import InputError
from peagle_jax.runner import Pair
from peagle_jax.training.answers import AnswersFile, read_meta
from peagle_jax.training.distill import Question
from peagle_jax.training.given import take_answers
from tests.training import tiny_model

# A turn is its role's word, what was said and <eos>.
TEMPLATE = (
    "{% for m in messages %}{{ 'w10' if m.role == 'user' else 'w11' }} {{ m.content }} <eos> "
    "{% endfor %}{% if add_generation_prompt %}w11{% endif %}"
)
QUESTIONS = [
    Question("text", "w5 w6", "here", "words"),
    Question("chat", [{"role": "user", "content": "w8"}]),
    Question("ids", [3, 9]),
]
GIVEN = ["w7 w8", "w9", "w4 w5 w6"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Pair:
    folder = tiny_model.write_target(tmp_path_factory.mktemp("models") / "target")
    pair = api.load(target=str(folder), drafter=None)
    pair.tokenizer.chat_template = TEMPLATE
    return pair


def test_an_answer_ends_as_the_target_would_end_it(pair, tmp_path) -> None:
    (eos,) = pair.target.eos_token_ids
    done = take_answers(pair, QUESTIONS, GIVEN, tmp_path / "D", model="tiny")
    found = {one.id: one for one in AnswersFile(tmp_path / "D")}
    assert (done.answered, done.present, done.tokens) == (3, 0, 9)
    assert done.line() == "3 answers taken as they are, 0 were there before; 9 tokens"
    text, chat, ids = (found[q.id] for q in QUESTIONS)
    assert (text.prompt_ids, text.answer_ids) == ((10, 5, 6, eos, 11), (7, 8, eos))
    assert (chat.prompt_ids, chat.answer_ids) == ((10, 8, eos, 11), (9, eos))
    assert (ids.prompt_ids, ids.answer_ids) == ((3, 9), (4, 5, 6, eos))
    assert (text.source, text.category, text.prompt, text.text) == (
        "here", "words", "w5 w6", "w7 w8",
    )  # fmt: skip
    assert read_meta(tmp_path / "D").sampling == {"given": True, "raw": False}
    again = take_answers(pair, QUESTIONS, GIVEN, tmp_path / "D", model="tiny")
    assert (again.answered, again.present) == (0, 3)


def test_a_template_that_rewrites_the_past_is_refused(pair, tmp_path, monkeypatch) -> None:
    rewriting = "{% if messages | length > 1 %}w3 {% endif %}" + TEMPLATE
    monkeypatch.setattr(pair.tokenizer, "chat_template", rewriting)
    with pytest.raises(InputError, match="text: found a chat template that writes an answered"):
        take_answers(pair, QUESTIONS, GIVEN, tmp_path / "D", model="tiny")
    assert not (tmp_path / "D").exists()


@pytest.mark.parametrize(
    ("lines", "options", "message"),
    [
        ([{"prompt": "w5"}], [], "prompt 1: answer: found none"),
        ([{"prompt": "w5", "answer": "w6"}, {"prompt": "w5", "answer": " "}], [], "prompt 2: ans"),
        ([{"prompt": "w5", "answer": 3}], [], "answer: found 3, expected a string"),
        ([{"prompt": "w5", "answer": "w6"}], ["--self-prompt", "2"], "--given: found no --prompts"),
    ],
)
def test_bad_input_is_refused_before_loading(
    lines, options, message, tmp_path, capsys, monkeypatch
) -> None:
    monkeypatch.setattr(api, "load", None)
    path = tmp_path / "texts.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    arguments = ["distill", "--prompts", str(path), "--given", "--out", str(tmp_path / "D")]
    assert cli.main([*arguments, *options]) == 2
    assert message in capsys.readouterr().err
