"""Draft vocabulary and mask token: which tokens are taken, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle_jax.errors import InputError
from peagle_jax.tokenizer import load_tokenizer
from peagle_jax.training.answers import AnswersFile
from peagle_jax.training.survey import Survey, survey_answers
from peagle_jax.training.vocabulary import (
    check_mask_token_id,
    choose_mask_token_id,
    draft_vocabulary,
)
from tests.training.folders import write_folder

SMOLLM2_VOCAB = 49152


class TestDraftVocabulary:
    COUNTS = np.array([0, 5, 2, 9, 2, 0, 2, 0])

    @pytest.mark.parametrize(
        ("size", "eos", "excluded", "ids", "inside"),
        [
            (2, (), (), [1, 3], 14),
            (3, (), (), [1, 2, 3], 16),  # of the three seen twice the lowest id
            (3, (7,), (), [1, 3, 7], 14),  # an EOS that no answer holds
            (2, (7, 0), (), [0, 7], 0),
            (6, (), (), [0, 1, 2, 3, 4, 6], 20),  # filled with a low id
            (6, (), (0,), [1, 2, 3, 4, 5, 6], 20),  # .. but not the mask token
            (8, (), (0,), [0, 1, 2, 3, 4, 5, 6, 7], 20),  # all: draft ids are target ids
        ],
    )
    def test_which_tokens(
        self,
        size: int,
        eos: tuple[int, ...],
        excluded: tuple[int, ...],
        ids: list[int],
        inside: int,
    ) -> None:
        found = draft_vocabulary(self.COUNTS, size, eos, excluded)
        assert found.draft_to_target.tolist() == ids
        assert found.draft_to_target.dtype == np.int32
        assert found.coverage == inside / 20

    @settings(max_examples=50, deadline=None)
    @given(counts=st.lists(st.integers(0, 5), min_size=2, max_size=40), data=st.data())
    def test_none_left_out_is_more_frequent(self, counts: list[int], data: st.DataObject) -> None:
        size = data.draw(st.integers(1, len(counts)))
        eos = data.draw(st.integers(0, len(counts) - 1))
        taken = set(draft_vocabulary(np.array(counts), size, (eos,)).draft_to_target.tolist())
        assert len(taken) == size
        assert eos in taken
        rest = set(range(len(counts))) - taken
        least = min(((counts[one], -one) for one in taken - {eos}), default=None)
        most = max(((counts[one], -one) for one in rest), default=None)
        assert least is None or most is None or least > most

    def test_nothing_counted(self) -> None:
        found = draft_vocabulary(np.zeros(8, np.int64), 3, (5,))
        assert (found.draft_to_target.tolist(), found.coverage) == ([0, 1, 5], 0.0)

    @pytest.mark.parametrize(
        ("size", "eos", "excluded", "message"),
        [
            (0, (), (), "draft_vocab_size: found 0, expected 1 to 8"),
            (9, (), (), "draft_vocab_size: found 9, expected 1 to 8"),
            (1, (0, 1), (), "draft_vocab_size: found 1, expected 2 to 8"),
            (7, (), (0, 1), "draft_vocab_size: found 7, expected 1 to 6"),
            (3, (8,), (), "eos token id: found 8, expected one below 8"),
            (3, (), (-1,), "excluded token id: found -1"),
            (3, (4,), (4,), "mask token id: found 4, expected one that ends no answer"),
        ],
    )
    def test_bad_input(
        self, size: int, eos: tuple[int, ...], excluded: tuple[int, ...], message: str
    ) -> None:
        with pytest.raises(InputError, match=message):
            draft_vocabulary(self.COUNTS, size, eos, excluded)


@pytest.fixture(scope="module")
def smollm2() -> Any:
    return load_tokenizer("smollm2")


def surveyed(folder: Path, prompt: list[int], answer: list[int]) -> list[Survey]:
    write_folder(folder, [(prompt, answer)], vocab_size=SMOLLM2_VOCAB)
    return [survey_answers(AnswersFile(folder))]


class TestMaskToken:
    def test_the_first_free_special_token(self, smollm2: Any, tmp_path: Path) -> None:
        """0 to 2 have their parts in the chat format; 3 onwards are of pretraining on code."""
        surveys = surveyed(tmp_path, [1, 19556, 2], [905, 2])
        assert choose_mask_token_id(smollm2, surveys, SMOLLM2_VOCAB) == 3

    def test_one_that_occurs_is_passed_over(self, smollm2: Any, tmp_path: Path) -> None:
        surveys = [
            *surveyed(tmp_path / "a", [1, 3], [905]),
            *surveyed(tmp_path / "b", [1], [4, 905]),
        ]
        assert choose_mask_token_id(smollm2, surveys, SMOLLM2_VOCAB) == 5
        assert choose_mask_token_id(smollm2, surveys, SMOLLM2_VOCAB, eos_token_ids=[5]) == 6

    def test_free_names_and_free_ids_come_first(self) -> None:
        tokenizer = load_tokenizer("smollm2")
        tokenizer.add_special_tokens({"additional_special_tokens": ["<|reserved_1|>"]})
        # The embedding has rows that no token has.
        assert choose_mask_token_id(tokenizer, [], SMOLLM2_VOCAB + 64) == SMOLLM2_VOCAB
        assert choose_mask_token_id(load_tokenizer("smollm2"), [], SMOLLM2_VOCAB + 64) == (
            SMOLLM2_VOCAB
        )
        # A reserved token that the chat template uses is not free, whatever its name.
        tokenizer.chat_template = "{% if tools %}<|reserved_1|>{% endif %}{{ messages }}"
        assert choose_mask_token_id(tokenizer, [], SMOLLM2_VOCAB + 64) == SMOLLM2_VOCAB + 1
        assert choose_mask_token_id(tokenizer, [], SMOLLM2_VOCAB + 1) == 3
        tokenizer.chat_template = {"default": "{{ x }}", "tool_use": "<repo_name>{{ x }}"}
        assert choose_mask_token_id(tokenizer, [], SMOLLM2_VOCAB + 1) == SMOLLM2_VOCAB
        with pytest.raises(InputError, match="found 3, '<repo_name>', which the chat template"):
            check_mask_token_id(3, tokenizer, [], SMOLLM2_VOCAB + 1)
        tokenizer.chat_template = None
        assert choose_mask_token_id(tokenizer, [], SMOLLM2_VOCAB + 1) == SMOLLM2_VOCAB

    def test_none_is_free(self, smollm2: Any, tmp_path: Path) -> None:
        surveys = surveyed(tmp_path, list(range(17)), [2])
        with pytest.raises(InputError, match="mask token id: found no special token"):
            choose_mask_token_id(smollm2, surveys, SMOLLM2_VOCAB)
        # An ordinary token serves where the user names it.
        check_mask_token_id(40000, smollm2, surveys, SMOLLM2_VOCAB)

    @pytest.mark.parametrize(
        ("token", "message"),
        [
            (49152, "found 49152, expected one below the vocabulary's 49152"),
            (-1, "found -1, expected one below"),
            (905, r"found 905 3 times in the text, expected a token that never occurs"),
            (7, r"found 7 1 times in the text"),  # in a prompt alone
            (2, "found 2, the tokenizer's eos token, expected an unused token"),
            (0, "found 0, the tokenizer's unk token"),
            (6, "found 6, which ends answers, expected an unused token"),
        ],
    )
    def test_refused(self, smollm2: Any, tmp_path: Path, token: int, message: str) -> None:
        surveys = surveyed(tmp_path, [7, 905], [905, 905, 11])
        with pytest.raises(InputError, match=f"mask token id: {message}") as info:
            check_mask_token_id(token, smollm2, surveys, SMOLLM2_VOCAB, eos_token_ids=[6])
        assert str(info.value).startswith(
            f"{surveys[0].path}: " if "in the text" in message else "mask token id"
        )

    def test_the_shipped_drafters_serves(self, smollm2: Any, tmp_path: Path) -> None:
        surveys = surveyed(tmp_path, [1, 19556, 2], [905, 2])
        check_mask_token_id(5, smollm2, surveys, SMOLLM2_VOCAB, eos_token_ids=[2])
