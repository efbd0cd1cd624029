"""Distilling: the target's own answers, whatever the batch, whatever was interrupted."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from peagle_jax import api, runner
from peagle_jax.config import SamplingParams
from peagle_jax.errors import InputError
from peagle_jax.runner import Pair
from peagle_jax.training.answers import AnswersFile, AnswersWriter, read_meta
from peagle_jax.training.distill import Question, distill, self_prompts
from tests.training import tiny_model

GREEDY = SamplingParams(max_new_tokens=8)
SAMPLED = SamplingParams(max_new_tokens=8, temperature=1.0, seed=5)
QUESTIONS = [
    Question("text", "w5 w6 w7", "here", "words"),
    Question("ids", [3, 9, 12, 4, 5, 6]),
    Question("chat", [{"role": "user", "content": "w8"}]),
    *(Question(f"more-{i}", [3 + i, 5]) for i in range(5)),
]
# A user's turn between w10 and <eos>, the answer after w11.
TEMPLATE = (
    "{% for m in messages %}w10 {{ m.content }} <eos> {% endfor %}"
    "{% if add_generation_prompt %}w11{% endif %}"
)


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Pair:
    folder = tiny_model.write_target(tmp_path_factory.mktemp("models") / "target")
    pair = api.load(target=str(folder), drafter=None)
    pair.tokenizer.chat_template = TEMPLATE
    return pair


def run(pair, out, questions=QUESTIONS, params=GREEDY, **options):
    return distill(pair, questions, out, model="tiny", params=params, **options)


FEW = SamplingParams(temperature=1.0, max_new_tokens=4)


def answers(out):
    return {one.id: one for one in AnswersFile(out)}


def test_answers_are_plain_decodings(pair, tmp_path) -> None:
    done = run(pair, tmp_path / "D", batch_size=4)
    found = answers(tmp_path / "D")
    assert list(found) != [q.id for q in QUESTIONS]  # by length, so that batches are even
    assert set(found) == {q.id for q in QUESTIONS}
    for question in QUESTIONS:
        prompts: Any = [question.prompt]
        (expected,) = api.generate(pair, prompts, GREEDY, method="none")
        one = found[question.id]
        assert list(one.answer_ids) == expected.token_ids
        assert one.finish_reason == expected.finish_reason
        assert one.text == expected.text
    assert found["text"].prompt_ids == (10, 5, 6, 7, 1, 11)
    assert (found["text"].source, found["text"].category) == ("here", "words")
    assert found["text"].prompt == "w5 w6 w7"
    assert found["ids"].prompt is None
    assert found["chat"].prompt == [{"role": "user", "content": "w8"}]
    assert (done.answered, done.present) == (8, 0)
    assert done.tokens == sum(len(one.answer_ids) for one in found.values())
    assert "8 prompts answered" in done.line()


def test_an_interrupted_run_goes_on_to_the_same_answers(pair, tmp_path, monkeypatch) -> None:
    questions = [*QUESTIONS, *self_prompts(3)]
    options = {"questions": questions, "params": SAMPLED, "prompt_params": FEW}
    run(pair, tmp_path / "whole", batch_size=8, **options)

    kept = AnswersWriter.append
    batches: list[Any] = []

    def append(writer, batch):
        if len(batches) == 2:
            raise KeyboardInterrupt
        batches.append(batch)
        kept(writer, batch)

    monkeypatch.setattr(AnswersWriter, "append", append)
    with pytest.raises(KeyboardInterrupt):
        run(pair, tmp_path / "torn", batch_size=2, **options)
    monkeypatch.undo()
    with (tmp_path / "torn" / "answers.jsonl").open("ab") as file:
        file.write(b'{"id": "half a li')
    done = run(pair, tmp_path / "torn", batch_size=4, **options)
    assert (done.answered, done.present) == (len(questions) - 4, 4)
    assert answers(tmp_path / "torn") == answers(tmp_path / "whole")


def test_invented_prompts_differ_and_are_answered(pair, tmp_path) -> None:
    seen = []
    run(
        pair,
        tmp_path / "D",
        self_prompts(6),
        prompt_params=FEW,
        progress=lambda done, total: seen.append((done, total)),
    )
    found = answers(tmp_path / "D")
    assert set(found) == {f"self-{i:06d}" for i in range(6)}
    assert len({one.prompt for one in found.values()}) == 6
    for one in found.values():
        words = pair.tokenizer(one.prompt)["input_ids"]
        assert list(one.prompt_ids) == [10, *words, 1, 11]
        assert one.source == one.category == "self-prompt"
    assert seen == [(6, 6)]


def test_invented_prompts_are_answered_batch_by_batch(pair, tmp_path, monkeypatch) -> None:
    """What a stopped run can lose is one batch of prompts."""
    from peagle_jax.training import distill as module

    events: list[tuple[str, int]] = []
    invent = module._invent

    def spy(pair, speculator, places, *rest):
        events.append(("invented", len(places)))
        return invent(pair, speculator, places, *rest)

    def progress(done: int, total: int) -> None:
        events.append(("answered", done))

    monkeypatch.setattr(module, "_invent", spy)
    questions = [*self_prompts(3), *QUESTIONS[:2]]
    run(
        pair, tmp_path / "D", questions, SAMPLED, prompt_params=FEW, batch_size=2, progress=progress
    )
    assert [event for event in events if event != ("invented", 0)] == [
        ("answered", 2),
        ("invented", 2),
        ("answered", 4),
        ("invented", 1),
        ("answered", 5),
    ]


def test_invented_prompts_need_a_template(pair, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(pair.tokenizer, "chat_template", None)
    with pytest.raises(InputError, match="no chat template, expected an instruct model's"):
        run(pair, tmp_path / "D", self_prompts(1))


def test_a_target_that_says_nothing_as_a_user(pair, tmp_path, monkeypatch) -> None:
    class Silent:
        def __init__(self, request) -> None:
            self.text, self.token_ids = " ", [1]

    def silent(pair, speculator, requests, batch_size):
        return [Silent(request) for request in requests], None

    monkeypatch.setattr(runner, "run_requests", silent)
    with pytest.raises(InputError, match="found no user's turn for 2 prompts in 8 tries"):
        run(pair, tmp_path / "D", self_prompts(2))


def test_what_meta_says(pair, tmp_path) -> None:
    run(pair, tmp_path / "D", QUESTIONS[:1], SAMPLED)
    meta = read_meta(tmp_path / "D")
    assert meta.model == "tiny"
    assert meta.vocab_size == tiny_model.VOCAB
    assert meta.max_new_tokens == 8
    assert meta.sampling["temperature"] == 1.0
    assert meta.sampling["seed"] == 5
    with pytest.raises(InputError, match=r"sampling.temperature: found 1.0, expected 0.0"):
        run(pair, tmp_path / "D", QUESTIONS, dataclasses.replace(GREEDY, seed=5))


@pytest.mark.parametrize(
    ("questions", "words"),
    [
        ([Question("one", [3]), Question("one", [4])], "found 'one' twice"),
        ([Question("empty", "")], "empty: found an empty prompt"),
        ([Question("long", [3] * 200)], "long: found 200 tokens, expected at most 127"),
        ([Question("foreign", [3, 64])], "foreign: found token id 64, expected 0 to 63"),
    ],
)
def test_bad_questions_before_anything_is_written(pair, tmp_path, questions, words) -> None:
    with pytest.raises(InputError, match=words):
        run(pair, tmp_path / "D", questions)
    assert not (tmp_path / "D").exists()


def test_the_file_is_json_lines(pair, tmp_path) -> None:
    run(pair, tmp_path / "D", QUESTIONS[:3])
    lines = (tmp_path / "D" / "answers.jsonl").read_text().splitlines()
    assert {json.loads(line)["id"] for line in lines} == {"text", "ids", "chat"}
