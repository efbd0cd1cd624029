"""Prompts to ids, ids to text piece by piece, stop strings."""

from __future__ import annotations

from typing import Any

import jaxtyping
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from peagle_jax.channels import Part
from peagle_jax.errors import InputError
from peagle_jax.text import TextStream, encode_prompt
from peagle_jax.tokenizer import load_tokenizer

# Accents, three- and four-byte characters, a family of joined emoji, leading spaces, newlines.
SAMPLES = [
    "Hello, world! It's  a   test.\n\n  def f(x):\n\treturn x",
    "naïve café, “quotes” … Ünïcödé",
    "日本語の文章と中文。한국어 그리고 العربية हिन्दी",
    "🙂🚀 👩‍👩‍👧‍👦 ok 🇫🇷!",
    "\N{REPLACEMENT CHARACTER} is a character too \N{REPLACEMENT CHARACTER}",
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer("smollm2")


class Letters:
    """Token i is the i-th letter; no chat template, nothing special."""

    chat_template = None

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [ord(c) - ord("a") for c in text]}

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return "".join(chr(ord("a") + i) for i in ids)


def pieces(stream: TextStream, ids: list[int]) -> list[str]:
    """What a reader is shown after each id, then at the end."""
    shown, out = 0, []
    for token in ids:
        stream.push([token])
        upto = stream.safe_length()
        assert upto >= shown, "text was shown that may not be part of the answer"
        out.append(stream.text[shown:upto])
        shown = upto
    stream.finish()
    out.append(stream.text[shown:])
    return out


# --- encoding -----------------------------------------------------------------------


def test_text_goes_through_the_chat_template(tokenizer) -> None:
    message = [{"role": "user", "content": "Hi"}]
    ids = encode_prompt(tokenizer, "Hi", raw=False)
    text = tokenizer.decode(ids)
    assert ids == encode_prompt(tokenizer, message, raw=False)
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    # SmolLM2's template adds its system message.
    assert text.startswith("<|im_start|>system\n")


def test_raw_text_is_tokens_alone(tokenizer) -> None:
    ids = encode_prompt(tokenizer, "Hi there", raw=True)
    assert tokenizer.decode(ids) == "Hi there"
    assert len(ids) == 2


def test_a_whole_chat_is_kept(tokenizer) -> None:
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "Two."},
        {"role": "user", "content": "Three?"},
    ]
    text = tokenizer.decode(encode_prompt(tokenizer, chat, raw=True))
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nOne?<|im_end|>\n"
        "<|im_start|>assistant\nTwo.<|im_end|>\n<|im_start|>user\nThree?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_token_ids_need_no_tokenizer() -> None:
    assert encode_prompt(None, (5, 0, 7), raw=False) == [5, 0, 7]


@pytest.mark.parametrize("ids", [np.array([3, 1, 2]), list(np.array([3, 1, 2], np.uint16))])
def test_numpy_token_ids_become_plain_ones(ids) -> None:
    found = encode_prompt(None, ids, raw=False)
    assert found == [3, 1, 2]
    assert all(type(one) is int for one in found)


def test_a_tokenizer_without_template_takes_text_as_it_is() -> None:
    assert encode_prompt(Letters(), "abd", raw=False) == [0, 1, 3]


@pytest.mark.parametrize(
    ("tokenizer_class", "prompt", "words"),
    [
        (Letters, "", "empty prompt"),
        (Letters, [], "found []"),
        (Letters, None, "found None"),
        (Letters, 7, "found 7"),
        (Letters, [1, "a"], "mixed"),
        (Letters, [True, False], "mixed"),
        (Letters, [1.5], "mixed"),
        (Letters, [{"role": "user", "content": "a"}], "no chat template"),
        (Letters, [{"role": "user"}], "role and content"),
        (None, "text", "no tokenizer"),
        (None, [{"role": "user", "content": "a"}], "no tokenizer"),
    ],
)
def test_bad_prompts(tokenizer_class, prompt, words) -> None:
    tokenizer = tokenizer_class and tokenizer_class()
    jaxtyping.config.update("jaxtyping_disable", True)  # a user's run checks no types
    try:
        with pytest.raises(InputError) as error:
            encode_prompt(tokenizer, prompt, raw=False, where="prompt 4")
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)
    message = str(error.value)
    assert message.startswith("prompt 4: ")
    assert words in message
    assert "\n" not in message


# --- decoding -----------------------------------------------------------------------


@pytest.mark.parametrize("text", SAMPLES)
def test_pieces_join_to_the_whole_text(tokenizer, text) -> None:
    ids = tokenizer(text)["input_ids"]
    parts = pieces(TextStream(tokenizer), ids)
    assert "".join(parts) == tokenizer.decode(ids) == text
    # It is a stream: not everything at the end.
    assert sum(map(bool, parts[:-1])) > len(ids) // 6
    if "\N{REPLACEMENT CHARACTER}" not in text:
        assert not any("\N{REPLACEMENT CHARACTER}" in part for part in parts)


def test_half_a_character_waits(tokenizer) -> None:
    ids = tokenizer("🚀")["input_ids"]
    assert len(ids) > 1
    stream = TextStream(tokenizer)
    stream.push(ids[:-1])
    assert stream.text == ""
    stream.push(ids[-1:])
    assert stream.text == "🚀"
    cut = TextStream(tokenizer)
    cut.push(ids[:-1])
    cut.finish()
    assert set(cut.text) == {"\N{REPLACEMENT CHARACTER}"}


@settings(max_examples=60, deadline=None, derandomize=True)
@given(ids=st.lists(st.integers(0, 49_151), max_size=24), cuts=st.lists(st.integers(1, 5)))
def test_any_ids_in_any_portions(tokenizer, ids, cuts) -> None:
    """Broken characters and special tokens among them, handed over one or several at a time."""
    stream, at = TextStream(tokenizer), 0
    for size in [*cuts, len(ids)]:
        stream.push(ids[at : at + size])
        at += size
    stream.finish()
    assert stream.text == tokenizer.decode(ids, skip_special_tokens=True)
    assert stream.num_ids == len(ids)


def test_special_tokens_are_no_text(tokenizer) -> None:
    ids = [*tokenizer("yes")["input_ids"], *tokenizer.convert_tokens_to_ids(["<|im_end|>"])]
    assert "".join(pieces(TextStream(tokenizer), ids)) == "yes"


def test_without_a_tokenizer_there_is_no_text() -> None:
    assert pieces(TextStream(None), [1, 2]) == ["", "", ""]


# --- stop strings -------------------------------------------------------------------


def test_a_stop_string_over_several_tokens(tokenizer) -> None:
    ids = tokenizer("Count: one, two, three, four")["input_ids"]
    stream = TextStream(tokenizer, stop=("wo, thr",))
    parts = pieces(stream, ids)
    assert "".join(parts) == stream.text == "Count: one, t"
    assert stream.stopped
    # The ids end with the token that completed it; what follows is ignored.
    assert tokenizer.decode(ids[: stream.num_ids]) == "Count: one, two, three"
    assert stream.num_ids < len(ids)


def test_the_first_of_several_stop_strings_counts() -> None:
    stream = TextStream(Letters(), stop=("gh", "ef", "fgh"))
    stream.push(Letters()("abcdefgh")["input_ids"])
    assert (stream.text, stream.num_ids, stream.stopped) == ("abcd", 6, True)


def test_the_earliest_of_those_that_one_token_completes(tokenizer) -> None:
    ids = tokenizer("hello there")["input_ids"]
    stream = TextStream(tokenizer, stop=("ere", "the", "her"))
    stream.push(ids)
    assert stream.text == "hello "


def test_the_start_of_a_stop_string_is_held_back() -> None:
    stream = TextStream(Letters(), stop=("cdx", "dey"))
    shown = []
    for letter in "abcdez":
        stream.push(Letters()(letter)["input_ids"])
        shown.append(stream.text[: stream.safe_length()])
    # "c" and "cd" may become "cdx", "de" may become "dey"; "dez" is free again.
    assert shown == ["a", "ab", "ab", "ab", "abc", "abcdez"]
    stream.finish()
    assert not stream.stopped
    assert stream.text == "abcdez"


def test_a_held_back_end_is_given_out_at_the_end() -> None:
    assert pieces(TextStream(Letters(), stop=("cd",)), [0, 1, 2]) == ["a", "b", "", "c"]


def test_a_repeated_beginning_is_found() -> None:
    stream = TextStream(Letters(), stop=("aab",))
    assert "".join(pieces(stream, Letters()("aaab")["input_ids"])) == "a"
    assert stream.stopped


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    text=st.text("ab", max_size=20),
    stop=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_stops_where_a_search_of_the_whole_text_stops(text, stop) -> None:
    """The token that first completes a stop string decides, then its earliest beginning."""
    stream = TextStream(Letters(), stop=tuple(stop))
    shown = "".join(pieces(stream, Letters()(text)["input_ids"]))
    done = next((n for n in range(len(text) + 1) if any(s in text[:n] for s in stop)), None)
    if done is None:
        assert shown == text
        assert not stream.stopped
    else:
        assert shown == text[: min(text.find(s) for s in stop if s in text[:done])]
        assert stream.num_ids == done


# --- answers in channels -------------------------------------------------------------

WORDS = ["analysis", "final", "assistant", "We", "add", "Four", "!", "to=f", "commentary", "x"]
FRAMES = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>"]


@pytest.fixture(scope="module")
def harmony() -> Any:
    vocabulary = {word: i for i, word in enumerate(["<unk>", *WORDS])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(FRAMES)
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


def framed(tokenizer, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


ANSWER = (
    "<|channel|> analysis <|message|> We add <|end|> <|start|> assistant "
    "<|channel|> commentary to=f <|message|> x <|call|> <|start|> assistant "
    "<|channel|> final <|message|> Four ! <|return|>"
)


@pytest.mark.parametrize("size", [1, 3, 100])
def test_channels_are_told_apart(harmony, size) -> None:
    ids = framed(harmony, ANSWER)
    stream = TextStream(harmony)
    for first in range(0, len(ids), size):
        stream.push(ids[first : first + size])
    stream.finish()
    assert stream.parts == (
        Part("analysis", "We add"),
        Part("commentary", "x"),
        Part("final", "Four !"),
    )
    assert stream.text == "We add\n\nx\n\nFour !"
    assert stream.num_ids == len(ids)
    assert stream.channel_ends() == [("analysis", 8), ("commentary", 11), ("final", 17)]


def test_an_answer_that_was_cut_in_a_header(harmony) -> None:
    stream = TextStream(harmony)
    stream.push(framed(harmony, "<|channel|> analysis <|message|> We <|end|> <|start|> assistant"))
    stream.finish()
    assert stream.parts == (Part("analysis", "We"),)
    assert stream.text == "We"


def test_a_stop_string_ends_a_part(harmony) -> None:
    stream = TextStream(harmony, ["Four"])
    stream.push(framed(harmony, ANSWER))
    assert stream.stopped
    assert stream.parts[0] == Part("analysis", "We add")
    assert stream.parts[-1] == Part("final", "")


def test_other_tokenizers_have_no_channels(harmony) -> None:
    plain = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
    )
    stream = TextStream(plain)
    stream.push([1])
    assert stream.parts == ()
    assert stream.channel_ends() == [(None, 1)]
