"""Prompt lookup against a search in plain Python."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from peagle_jax.decoding.prompt_lookup import look_up


def searched(text: list[int], num_draft_tokens: int, max_ngram: int) -> list[int]:
    """The definition: longest shared end first, then the latest place."""
    for length in range(min(max_ngram, len(text) - 1), 0, -1):
        for end in range(len(text) - 2, length - 2, -1):
            if text[end - length + 1 : end + 1] == text[len(text) - length :]:
                after = text[end + 1 :]
                return [after[i % len(after)] for i in range(num_draft_tokens)]
    return [text[-1]] * num_draft_tokens


def longest(text: list[int], max_ngram: int) -> int:
    """How many of the newest tokens stand together before."""
    joined = [text[i:j] for i in range(len(text) - 1) for j in range(i + 1, len(text))]
    return max(n for n in range(max_ngram + 1) if n == 0 or (n < len(text) and text[-n:] in joined))


@pytest.mark.parametrize("max_ngram", [1, 2, 3, 5])
def test_finds_what_a_search_finds(max_ngram: int) -> None:
    rng = np.random.default_rng(max_ngram)
    size = 24
    lengths = np.concatenate([np.arange(1, size + 1), rng.integers(1, size + 1, 200)])
    history = rng.integers(0, 4, (len(lengths), size))
    found, shared = look_up(jnp.asarray(history), jnp.asarray(lengths - 1), 5, max_ngram)
    drafts = np.asarray(found)
    for row, length in enumerate(lengths):
        text = history[row, :length].tolist()
        assert drafts[row].tolist() == searched(text, 5, max_ngram), text
        assert shared[row] == longest(text, max_ngram), text


def test_a_loop_is_drafted_on() -> None:
    """The draft reaches past the newest token: the text's period goes on."""
    text = jnp.array([[9, 1, 2, 3, 1, 2, 3, 1, 0, 0]])
    drafts, shared = look_up(text, jnp.array([7]), 5)
    assert shared.tolist() == [3]
    assert drafts[0].tolist() == [2, 3, 1, 2, 3]


def test_a_new_word_is_repeated() -> None:
    text = jnp.array([[4, 5, 6, 7, 7]])
    drafts, shared = look_up(text, jnp.array([2]), 3)
    assert (drafts[0].tolist(), shared.tolist()) == ([6, 6, 6], [0])
