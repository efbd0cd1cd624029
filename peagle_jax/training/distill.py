"""Distilling: the target answers prompts, and its own words become training text.

A drafter learns to guess what its target says, so it is trained on the target's answers,
whatever the prompts' own answers are. An instruct model that is given only the header of a
user's turn goes on with a turn of its own making: prompts where there are none.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from peagle_jax import runner
from peagle_jax.batching import Request, check_prompt
from peagle_jax.config import SamplingParams
from peagle_jax.decoding.speculate import Speculator
from peagle_jax.errors import InputError
from peagle_jax.runner import Pair
from peagle_jax.text import Prompt, encode_prompt
from peagle_jax.training.answers import (
    Answer,
    AnswersMeta,
    AnswersWriter,
    tokenizer_sha256,
)

# Batches between two prompt-length sorts: enough to fill batches with prompts of like length.
BATCHES_A_ROUND = 16
SELF_PROMPT = "self-prompt"
TRIES = 8
# What the user's turn of a rendered chat is found by.
_PLACEHOLDER = "PEAGLE-USER-TURN"

# A prompt, as it was given and as token ids.
Asked = tuple[Prompt | None, tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class Question:
    """A prompt to be answered; None is one that the target is to invent."""

    id: str
    prompt: Prompt | None
    source: str = ""
    category: str = ""


@dataclasses.dataclass(frozen=True)
class Distilled:
    """What a run did. answered: now; present: were there before; tokens: answered now; given:
    nothing was decoded."""

    answered: int
    present: int
    tokens: int
    seconds: float
    given: bool = False

    def line(self) -> str:
        """One readable line."""
        if self.given:
            return (
                f"{self.answered} answers taken as they are, {self.present} were there before; "
                f"{self.tokens} tokens"
            )
        rate = self.tokens / self.seconds if self.seconds else 0.0
        return (
            f"{self.answered} prompts answered, {self.present} were there before; "
            f"{self.tokens} tokens in {self.seconds:.1f} s, {rate:.1f} tokens/s"
        )


def self_prompts(count: int) -> list[Question]:
    """`count` prompts for the target to invent, `self-000000` on."""
    return [Question(f"self-{i:06d}", None, SELF_PROMPT, SELF_PROMPT) for i in range(count)]


def distill(
    pair: Pair,
    questions: Sequence[Question],
    out: Path,
    *,
    model: str,
    params: SamplingParams,
    prompt_params: SamplingParams = SamplingParams(temperature=1.0, max_new_tokens=128),
    batch_size: int = 32,
    raw: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Distilled:
    """Answer every question that `out` does not hold yet; each batch is durable when done.

    Args:
      model: what meta.json names the target.
      params: how answers are drawn. Question i of the list samples with seed
        `params.seed + i`, so a run that was stopped goes on to the same answers.
      prompt_params: how invented prompts are drawn.

    Raises:
      InputError: a prompt that the target cannot take, two prompts of one id, or a folder
        that holds other answers; before anything is compiled.
    """
    seed = params.seed or 0
    speculator = Speculator(pair.target, dtype=pair.dtype)
    encoded = [
        None if q.prompt is None else _encode(pair, q.prompt, raw=raw, where=q.id)
        for q in questions
    ]
    header = _user_header(pair) if any(ids is None for ids in encoded) else ()
    check_ids(questions)
    begin = time.perf_counter()
    answered = tokens = 0
    with AnswersWriter(out, _meta(pair, model, params, prompt_params, raw)) as writer:
        missing = [i for i, q in enumerate(questions) if q.id not in writer.ids]
        present = len(questions) - len(missing)
        for turn in _turns(missing, encoded, batch_size):
            invented = [i for i in turn if encoded[i] is None]
            asked: dict[int, Asked] = {
                i: (questions[i].prompt, ids) for i in turn if (ids := encoded[i]) is not None
            }
            asked |= _invent(
                pair, speculator, invented, header, seed, prompt_params, batch_size, raw
            )
            order = sorted(asked, key=lambda i: len(asked[i][1]))
            for at in range(0, len(order), batch_size):
                batch = order[at : at + batch_size]
                requests = [
                    Request(i, asked[i][1], dataclasses.replace(params, seed=_seed(seed, i)))
                    for i in batch
                ]
                outputs, _ = runner.run_requests(pair, speculator, requests, batch_size)
                writer.append(
                    [
                        _answer(questions[i], asked[i], output)
                        for i, output in zip(batch, outputs, strict=True)
                    ]
                )
                answered += len(batch)
                tokens += sum(len(output.token_ids) for output in outputs)
                if progress:
                    progress(present + answered, len(questions))
    return Distilled(answered, present, tokens, time.perf_counter() - begin)


def _turns(
    places: Sequence[int], encoded: Sequence[tuple[int, ...] | None], batch_size: int
) -> Iterator[Sequence[int]]:
    """Places in the order of their turn: what is asked already in rounds that are sorted by
    length, what is to be invented a batch at a time, so that little is lost when a run is stopped
    between a prompt and its answer."""
    invented = [i for i in places if encoded[i] is None]
    asked = [i for i in places if encoded[i] is not None]
    for some, size in ((asked, BATCHES_A_ROUND * batch_size), (invented, batch_size)):
        yield from (some[first : first + size] for first in range(0, len(some), size))


def _invent(
    pair: Pair,
    speculator: Speculator,
    places: Sequence[int],
    header: tuple[int, ...],
    seed: int,
    params: SamplingParams,
    batch_size: int,
    raw: bool,
) -> dict[int, Asked]:
    """A user's turn for each place, in the target's own words.

    One that is empty, or too long to be answered, is drawn again from other seeds.
    """
    turns: dict[int, Asked] = {}
    for attempt in range(TRIES):
        left = [i for i in places if i not in turns]
        requests = [
            Request(i, header, dataclasses.replace(params, seed=_seed(seed ^ 0x5EED, i, attempt)))
            for i in left
        ]
        if not requests:
            break
        outputs, _ = runner.run_requests(pair, speculator, requests, batch_size)
        for i, output in zip(left, outputs, strict=True):
            text = output.text.strip()
            ids = encode_prompt(pair.tokenizer, text, raw=raw) if text else []
            if 0 < len(ids) < pair.target.max_positions:
                turns[i] = (text, tuple(ids))
    missing = [i for i in places if i not in turns]
    if missing:
        raise InputError(
            f"self-prompt: found no user's turn for {len(missing)} prompts in {TRIES} tries, "
            "expected text that fits the context: this target does not invent prompts"
        )
    return turns


def _user_header(pair: Pair) -> tuple[int, ...]:
    """Token ids of a chat up to where the user's first words would stand."""
    template = getattr(pair.tokenizer, "chat_template", None)
    if not template:
        raise InputError("self-prompt: found no chat template, expected an instruct model's")
    chat = [{"role": "user", "content": _PLACEHOLDER}]
    text = pair.tokenizer.apply_chat_template(chat, tokenize=False)
    before, found, _ = text.partition(_PLACEHOLDER)
    if not found or not before:
        raise InputError("self-prompt: found no header before the user's turn in the template")
    ids = pair.tokenizer(before, add_special_tokens=False)["input_ids"]
    return check_prompt(ids, pair.target, "self-prompt")


def _encode(pair: Pair, prompt: Prompt, *, raw: bool, where: str) -> tuple[int, ...]:
    ids = encode_prompt(pair.tokenizer, prompt, raw=raw, where=where)
    return check_prompt(ids, pair.target, where)


def _seed(seed: int, index: int, attempt: int = 0) -> int:
    return (seed + index + 7_919_777 * attempt) % 2**32


def check_ids(questions: Sequence[Question]) -> None:
    """Raises InputError where two questions have one id."""
    seen: set[str] = set()
    for question in questions:
        if question.id in seen:
            raise InputError(f"id: found {question.id!r} twice, expected ids to differ")
        seen.add(question.id)


def _meta(
    pair: Pair, model: str, params: SamplingParams, prompt_params: SamplingParams, raw: bool
) -> AnswersMeta:
    def drawn(one: SamplingParams) -> dict[str, Any]:
        names = ("temperature", "top_k", "top_p", "min_p")
        return {name: getattr(one, name) for name in names}

    sampling = {
        **drawn(params),
        "seed": params.seed or 0,
        "raw": raw,
        "prompts": {**drawn(prompt_params), "max_new_tokens": prompt_params.max_new_tokens},
    }
    return AnswersMeta(
        model=model,
        tokenizer_sha256=tokenizer_sha256(pair.tokenizer),
        vocab_size=pair.target.vocab_size,
        sampling=sampling,
        max_new_tokens=params.max_new_tokens,
    )


def _answer(question: Question, asked: Asked, output: runner.Output) -> Answer:
    prompt, ids = asked
    words: Any = prompt
    if prompt is not None and not isinstance(prompt, str):
        words = [dict(turn) for turn in prompt if isinstance(turn, Mapping)] or None
    return Answer(
        id=question.id,
        prompt_ids=ids,
        answer_ids=tuple(output.token_ids),
        finish_reason="stop" if output.finish_reason == "stop" else "length",
        source=question.source,
        category=question.category,
        prompt=words,
        text=output.text,
    )
