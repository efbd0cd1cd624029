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


@pytest.mark.parametrize("max_ngram", [1, 2, 3, 5])
def test_finds_what_a_search_finds(max_ngram: int) -> None:
    rng = np.random.default_rng(max_ngram)
    size = 24
    lengths = np.concatenate([np.arange(1, size + 1), rng.integers(1, size + 1, 200)])
    history = rng.integers(0, 4, (len(lengths), size))
    drafts = np.asarray(look_up(jnp.asarray(history), jnp.asarray(lengths - 1), 5, max_ngram))
    for row, length in enumerate(lengths):
        text = history[row, :length].tolist()
        assert drafts[row].tolist() == searched(text, 5, max_ngram), text


def test_a_loop_is_drafted_on() -> None:
    """The draft reaches past the newest token: the text's period goes on."""
    text = jnp.array([[9, 1, 2, 3, 1, 2, 3, 1, 0, 0]])
    assert look_up(text, jnp.array([7]), 5)[0].tolist() == [2, 3, 1, 2, 3]


def test_a_new_word_is_repeated() -> None:
    text = jnp.array([[4, 5, 6, 7, 7]])
    assert look_up(text, jnp.array([2]), 3)[0].tolist() == [6, 6, 6]
