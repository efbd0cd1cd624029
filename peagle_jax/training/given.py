"""Answers that are there already: a dataset's own, taken as training text as they stand.

The target still says what a drafter learns, since its features and distributions are made while
it trains; only the words are not its own. That costs a tokenizer instead of hours of decoding, and
covers text that the target would not write by itself. The target's own answers (distill.py) are
nearer to what decoding meets: train on them last.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from peagle_jax.batching import check_prompt
from peagle_jax.errors import InputError
from peagle_jax.runner import Pair
from peagle_jax.text import encode_prompt
from peagle_jax.training.answers import Answer, AnswersMeta, AnswersWriter, tokenizer_sha256
from peagle_jax.training.distill import Distilled, Question, check_ids

BATCH = 256  # answers that become durable together


def take_answers(
    pair: Pair,
    questions: Sequence[Question],
    given: Sequence[str],
    out: Path,
    *,
    model: str,
    raw: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Distilled:
    """Writes the answers that `out` does not hold yet, in the questions' order.

    Args:
      given: the answer to each question; with a chat template it is the assistant's turn.
      model: what meta.json names the target.

    Raises:
      InputError: a prompt that the target cannot take, an empty answer, a template that writes
        an answered chat other than as prompt and answer, two prompts of one id, or a folder
        that holds other answers; before anything is written.
    """
    begin = time.perf_counter()
    check_ids(questions)
    pieces = [
        _encode(pair, question, answer, raw=raw)
        for question, answer in zip(questions, given, strict=True)
    ]
    meta = AnswersMeta(
        model=model,
        tokenizer_sha256=tokenizer_sha256(pair.tokenizer),
        vocab_size=pair.target.vocab_size,
        sampling={"given": True, "raw": raw},
        max_new_tokens=pair.target.max_positions,
    )
    answered = tokens = 0
    with AnswersWriter(out, meta) as writer:
        missing = [piece for piece in pieces if piece.id not in writer.ids]
        present = len(pieces) - len(missing)
        for at in range(0, len(missing), BATCH):
            some = missing[at : at + BATCH]
            writer.append(some)
            answered += len(some)
            tokens += sum(len(piece.answer_ids) for piece in some)
            if progress:
                progress(present + answered, len(pieces))
    return Distilled(answered, present, tokens, time.perf_counter() - begin, given=True)


def _encode(pair: Pair, question: Question, answer: str, *, raw: bool) -> Answer:
    """Prompt and answer as decoding would leave them: up to the end-of-sequence token."""
    prompt, where = question.prompt, question.id
    assert prompt is not None
    if not answer.strip():
        raise InputError(f"{where}: answer: found an empty one, expected text")
    prompt_ids = encode_prompt(pair.tokenizer, prompt, raw=raw, where=where)
    check_prompt(prompt_ids, pair.target, where)
    eos = pair.target.eos_token_ids
    ids = _after(pair, prompt, prompt_ids, answer, raw=raw, where=where)
    ends = [place for place, token in enumerate(ids) if token in eos]
    ids = ids[: ends[0] + 1] if ends else [*ids, *eos[:1]]
    words: Any = prompt
    if not isinstance(prompt, str):
        words = [dict(turn) for turn in prompt if isinstance(turn, Mapping)] or None
    return Answer(
        id=question.id,
        prompt_ids=tuple(prompt_ids),
        answer_ids=tuple(ids),
        finish_reason="stop" if eos else "length",
        source=question.source,
        category=question.category,
        prompt=words,
        text=answer,
    )


def _after(
    pair: Pair, prompt: Any, prompt_ids: list[int], answer: str, *, raw: bool, where: str
) -> list[int]:
    """Token ids of the answer behind its prompt."""
    chat = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    plain = raw and isinstance(prompt, str)
    if plain or isinstance(chat[0], int) or not getattr(pair.tokenizer, "chat_template", None):
        found: list[int] = pair.tokenizer(answer, add_special_tokens=False)["input_ids"]
        return found
    turns = [*chat, {"role": "assistant", "content": answer}]
    whole = pair.tokenizer.apply_chat_template(turns, tokenize=True, return_dict=False)
    if whole[: len(prompt_ids)] != prompt_ids:
        raise InputError(
            f"{where}: found a chat template that writes an answered chat otherwise than the "
            "prompt and the answer behind it, expected one that does; --raw leaves it out"
        )
    return list(whole[len(prompt_ids) :])
