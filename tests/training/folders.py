"""Small folders of distilled answers for tests of what reads them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from peagle_jax.training.answers import Answer, AnswersMeta, AnswersWriter

VOCAB = 4096
TOKENIZER = "ab" * 32


def write_folder(
    folder: Path,
    answers: Sequence[tuple[Sequence[int], Sequence[int]]],
    vocab_size: int = VOCAB,
    tokenizer_sha256: str = TOKENIZER,
    **changes: Any,
) -> Path:
    """A folder of (prompt ids, answer ids); ids are "0", "1", .. after what is there."""
    meta = AnswersMeta(
        model="tiny",
        tokenizer_sha256=tokenizer_sha256,
        vocab_size=vocab_size,
        sampling={"temperature": 0.0},
        max_new_tokens=64,
    )
    with AnswersWriter(folder, meta) as writer:
        first = len(writer.ids)
        writer.append(
            [
                Answer(str(first + i), tuple(prompt), tuple(answer), "stop", **changes)
                for i, (prompt, answer) in enumerate(answers)
            ]
        )
    return folder


def numbered(sizes: Sequence[tuple[int, int]], start: int = 1) -> list[tuple[range, range]]:
    """Documents of (prompt, answer) sizes whose tokens are all different: `start`, ..."""
    documents = []
    for prompt, answer in sizes:
        documents.append(
            (range(start, start + prompt), range(start + prompt, start + prompt + answer))
        )
        start += prompt + answer
    return documents


def random_sizes(count: int, longest: int, seed: int = 0) -> list[tuple[int, int]]:
    """Sizes of which prompt and answer together are at most `longest`."""
    rng = np.random.default_rng(seed)
    prompts = rng.integers(1, longest // 2, count)
    answers = rng.integers(1, longest - longest // 2 + 1, count)
    return [(int(p), int(a)) for p, a in zip(prompts, answers, strict=True)]
