"""The front door on a tiny model: prompts in, answers out, bad input refused before compilation."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jaxtyping
import pytest

import peagle_jax as pj
from peagle_jax import api
from peagle_jax.config import SamplingParams
from peagle_jax.errors import InputError
from peagle_jax.runner import Output, Pair
from tests.decoding import tiny

EOS = 21
NEW = 24
SAMPLED = SamplingParams(max_new_tokens=NEW, temperature=1.0, seed=3, ignore_eos=True)


class Letters:
    """Token i is the i-th letter, EOS is special. A chat is its contents between two marks."""

    chat_template = "there is one"

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [ord(c) - ord("a") for c in text]}

    def apply_chat_template(self, chat: list[dict[str, str]], **options: Any) -> list[int]:
        assert options == {"add_generation_prompt": True, "tokenize": True, "return_dict": False}
        return [t for m in chat for t in (20, *self(m["content"])["input_ids"], 19)]

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return "".join(chr(ord("a") + i) for i in ids if not (skip_special_tokens and i == EOS))


@pytest.fixture(scope="module")
def pair() -> Pair:
    models = tiny.make(draft_vocab_size=16, eos_token_ids=(EOS,), max_positions=80)
    drafter = models.drafters["p-eagle"]
    return Pair(models.target, drafter, models.params("p-eagle"), Letters(), "float32")


@pytest.fixture(scope="module")
def answer(pair: Pair) -> Callable[..., list[Output]]:
    """generate with K = 3 and four rows a batch, so that few programs are compiled."""

    def run(prompts: Any, *args: Any, **options: Any) -> list[Output]:
        return api.generate(
            pair, prompts, *args, **{"num_draft_tokens": 3, "batch_size": 4, **options}
        )

    return run


def with_seeds(count: int, **changes: Any) -> list[SamplingParams]:
    return [dataclasses.replace(SAMPLED, seed=i, **changes) for i in range(count)]


# --- answers ------------------------------------------------------------------------


def test_one_prompt_of_each_kind(answer) -> None:
    """Text goes through the chat template, ids do not; all give the same answer here."""
    chat = [{"role": "user", "content": "abc"}]
    kinds = ["abc", chat, [20, 0, 1, 2, 19]]
    alone = [answer(prompt, SAMPLED) for prompt in kinds]
    assert [len(outputs) for outputs in alone] == [1, 1, 1]
    together = answer(kinds, SAMPLED)
    ids = alone[0][0].token_ids
    for output in [*together, *(outputs[0] for outputs in alone)]:
        assert output.token_ids == ids
        assert output.text == Letters().decode(ids, skip_special_tokens=True)
        assert output.prompt_tokens == 5
    raw = answer("abc", SAMPLED, raw=True)[0]
    assert raw.prompt_tokens == 3
    assert raw.token_ids != ids


def test_order_is_kept_over_batches(answer) -> None:
    """Prompts of mixed lengths run shortest first; answers come back where they belong."""
    lengths = [70, 3, 30, 1, 65, 9]
    prompts = [[(7 * n + i) % 19 for i in range(n)] for n in lengths]
    params = with_seeds(len(prompts))
    outputs = answer(prompts, params)
    assert [output.prompt_tokens for output in outputs] == lengths
    for prompt, one, output in zip(prompts[1:4], params[1:4], outputs[1:4], strict=True):
        assert answer([prompt] * 3, one)[2].token_ids == output.token_ids
    # 80 positions: the longest prompts leave less than the asked-for tokens.
    assert [len(o.token_ids) for o in outputs] == [min(NEW, 80 - n) for n in lengths]


def test_parameters_for_each_prompt(answer) -> None:
    params = [
        SamplingParams(max_new_tokens=5, ignore_eos=True),
        dataclasses.replace(SAMPLED, max_new_tokens=9),
        dataclasses.replace(SAMPLED, max_new_tokens=9, seed=4),
    ]
    outputs = answer(["abc"] * 3, params)
    assert [len(output.token_ids) for output in outputs] == [5, 9, 9]
    assert outputs[1].token_ids != outputs[2].token_ids
    greedy = answer(["abc"] * 3, dataclasses.replace(params[0], max_new_tokens=9))
    assert greedy[0].token_ids[:5] == outputs[0].token_ids
    assert greedy[0].token_ids == greedy[1].token_ids


def test_plain_decoding_gives_the_same_tokens(answer) -> None:
    params = with_seeds(4)
    drafted = answer(["abc", "b", "qq", "dddd"], params)
    plain = answer(["abc", "b", "qq", "dddd"], params, method="none")
    assert [o.token_ids for o in drafted] == [o.token_ids for o in plain]
    for output in drafted:
        stats = output.stats
        assert stats.tokens == NEW == len(output.token_ids)
        assert stats.num_draft_tokens == 3 * stats.num_drafts > 0
        assert len(stats.accepted_per_position) == 3
        assert stats.num_drafts + stats.num_accepted + 1 >= NEW > stats.num_drafts
        assert stats.seconds > 0
    assert sum(output.stats.num_accepted for output in drafted) > 0
    for output in plain:
        assert (output.stats.num_drafts, output.stats.accepted_per_position) == (0, ())
        assert output.stats.acceptance_length == 1.0


def test_no_prompts(answer) -> None:
    assert answer([]) == []


def test_progress_counts_requests(answer) -> None:
    seen: list[tuple[int, int]] = []
    answer(["a"] * 6, SAMPLED, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(4, 6), (6, 6)]


def test_a_bucket_is_compiled_once(pair, answer) -> None:
    answer(["abc"] * 4, SAMPLED)
    programs = len(pair.compiled)
    again = answer(["b", "cc", "ddd", "eeee"], with_seeds(4, temperature=0.3, top_k=5))
    assert len(pair.compiled) == programs
    assert {output.stats.compile_seconds for output in again} == {0.0}


# --- ends ---------------------------------------------------------------------------


def test_finish_reasons(answer) -> None:
    params = [dataclasses.replace(p, ignore_eos=i == 0) for i, p in enumerate(with_seeds(40))]
    outputs = answer(["abc"] * 40, params)
    assert outputs[0].finish_reason == "length"
    stopped = [output for output in outputs if output.finish_reason == "stop"]
    assert 0 < len(stopped) < 40
    for output in outputs[1:]:
        assert (EOS in output.token_ids) == (output.finish_reason == "stop")
    for output in stopped:
        # The end of sequence is among the ids and is no text.
        assert output.token_ids.index(EOS) == len(output.token_ids) - 1
        assert len(output.text) == len(output.token_ids) - 1


def test_stop_strings(answer) -> None:
    """Each stop string is cut out of the middle of what would have come."""
    params = with_seeds(4)
    whole = answer(["abc"] * 4, params)
    stops = [output.text[8:11] for output in whole[:3]]
    limited = [
        dataclasses.replace(p, stop=(stop,)) for p, stop in zip(params, [*stops, "zz"], strict=True)
    ]
    outputs = answer(["abc"] * 4, limited)
    for before, output, stop in zip(whole[:3], outputs[:3], stops, strict=True):
        at = before.text.index(stop)
        assert output.text == before.text[:at]
        ids = before.token_ids
        end = next(n for n in range(len(ids)) if stop in Letters().decode(ids[:n], True))
        assert output.token_ids == ids[:end]
        assert output.finish_reason == "stop"
        assert output.stats.tokens == end
    # The row whose stop string never came is whole.
    assert outputs[3].token_ids == whole[3].token_ids
    assert outputs[3].finish_reason == "length"


def test_a_stop_string_and_an_end_of_sequence(answer) -> None:
    """Whichever comes first; an answer that ends at EOS keeps its held-back text."""
    params = with_seeds(40, ignore_eos=False)
    whole = answer(["abc"] * 40, params)
    seed = next(i for i, o in enumerate(whole) if o.finish_reason == "stop" and len(o.text) > 2)
    text = whole[seed].text
    for stop, expected in ((text[-1] + "a", text), (text[1:3], text[: text.index(text[1:3])])):
        one = dataclasses.replace(params[seed], stop=(stop,))
        output = answer(["abc"] * 3, one)[0]
        assert (output.text, output.finish_reason) == (expected, "stop")


@pytest.mark.parametrize("stop", [None, slice(8, 10)])
def test_stream(pair, answer, stop) -> None:
    params = SAMPLED
    if stop is not None:
        params = dataclasses.replace(SAMPLED, stop=(answer("abc", SAMPLED)[0].text[stop],))
    *parts, output = api.stream(pair, "abc", params, num_draft_tokens=3)
    assert isinstance(output, Output)
    assert all(isinstance(part, str) and part for part in parts)
    assert "".join(map(str, parts)) == output.text
    expected = answer("abc", params)[0]
    assert (output.text, output.token_ids) == (expected.text, expected.token_ids)
    assert output.finish_reason == expected.finish_reason
    assert len(parts) > len(output.text) // 4  # a piece a step, of at most 4 tokens


# --- a drafter that does not fit ----------------------------------------------------


def test_a_drafter_that_is_never_right_warns(pair) -> None:
    """With its head turned round it drafts what the target is least likely to say."""
    drafter = {**pair.params["drafter"]}
    drafter["lm_head"] = jax.tree.map(lambda kernel: -kernel, drafter["lm_head"])
    wrong = dataclasses.replace(pair, params={**pair.params, "drafter": drafter})
    greedy = SamplingParams(max_new_tokens=NEW, ignore_eos=True)
    with pytest.warns(UserWarning, match=r"none of 92 drafts was accepted"):
        outputs = api.generate(wrong, ["abc"] * 4, greedy, num_draft_tokens=3, batch_size=4)
    right = api.generate(pair, ["abc"] * 4, greedy, num_draft_tokens=3, batch_size=4)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in right]
    assert {o.stats.acceptance_length for o in outputs} == {1.0}


# --- bad input ----------------------------------------------------------------------


@contextlib.contextmanager
def refused(pair: Pair, *words: str) -> Iterator[None]:
    """One line that names `words`, before anything is compiled; types are not checked here,
    as in a user's run."""
    programs = len(pair.compiled)
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        with pytest.raises(InputError) as error:
            yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)
    message = str(error.value)
    assert "\n" not in message
    for word in (*words, "found"):
        assert word in message
    assert len(pair.compiled) == programs


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        ("", ("prompt 0", "empty")),
        (["a", ""], ("prompt 1", "empty")),
        ("a\ud800", ("prompt 0", "half a character at 1 (U+D800)")),
        ([[{"role": "user", "content": "\udcff"}]], ("prompt 0", "half a character at 0")),
        ([[]], ("prompt 0", "[]")),
        (["a", [1, 23]], ("prompt 1", "23", "0 to 22")),
        ([[-1]], ("prompt 0", "-1")),
        ([[1] * 80], ("prompt 0", "80 tokens", "79")),
        (["a" * 90], ("prompt 0", "92 tokens", "79")),
        ([[1, "a"]], ("prompt 0", "mixed")),
        ([[{"role": "user"}]], ("prompt 0", "role and content")),
        ([None], ("prompt 0", "None")),
    ],
)
def test_bad_prompts(pair, prompts, words) -> None:
    with refused(pair, *words):
        api.generate(pair, prompts)


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"temperature": -0.1}, ("temperature", "-0.1", "0 (greedy) or more")),
        ({"temperature": float("nan")}, ("temperature", "nan")),
        ({"temperature": float("inf")}, ("temperature", "inf")),
        ({"top_p": 0.0}, ("top_p", "0.0", "(0, 1]")),
        ({"top_p": 1.01}, ("top_p", "1.01", "(0, 1]")),
        ({"top_k": -1}, ("top_k", "-1")),
        ({"min_p": 1.5}, ("min_p", "1.5", "[0, 1]")),
        ({"min_p": -0.5}, ("min_p", "-0.5")),
        ({"max_new_tokens": 0}, ("max_new_tokens", "0", "1 or more")),
        ({"seed": -1}, ("seed", "-1")),
        ({"seed": 2**32}, ("seed", "4294967296")),
        ({"stop": ("a", "")}, ("stop", "empty")),
    ],
)
def test_bad_sampling_parameters(pair, params, words) -> None:
    with refused(pair, *words):
        SamplingParams(**params)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_draft_tokens": 0}, ("num_draft_tokens", "0", "1 to 32")),
        ({"num_draft_tokens": 33}, ("num_draft_tokens", "33", "1 to 32")),
        ({"method": "eagle3"}, ("method", "'eagle3'", "'p-eagle'")),
        (
            {"method": "medusa"},
            (
                "method",
                "'medusa'",
                "p-eagle, eagle3, p-eagle+lookup",
                "p-eagle+tree, p-eagle+tree+lookup, prompt-lookup, none",
            ),
        ),
        ({"draft_sampling": "beam"}, ("draft_sampling", "'beam'", "greedy, sample")),
        ({"verify": "strict"}, ("verify", "'strict'", "coupled, rejection")),
        ({"batch_size": 0}, ("batch_size", "0", "1 or more")),
    ],
)
def test_bad_options(pair, options, words) -> None:
    with refused(pair, *words):
        api.generate(pair, "abc", **options)


def test_parameters_that_do_not_match_the_prompts(pair) -> None:
    with refused(pair, "params", "2 entries", "3 prompts"):
        api.generate(pair, ["a", "b", "c"], [SAMPLED, SAMPLED])


def test_a_method_without_its_drafter(pair) -> None:
    plain = dataclasses.replace(pair, drafter=None)
    assert api.make_speculator(plain).method == "none"
    assert api.make_speculator(pair).method == "p-eagle"
    assert api.make_speculator(plain).num_draft_tokens == 0
    with refused(plain, "method", "no drafter", "'none'"):
        api.generate(plain, "abc", method="p-eagle")


@pytest.mark.parametrize(
    ("trained", "method", "drafts"),
    [
        (None, None, 5),
        (3, None, 3),
        (7, "p-eagle+tree+lookup", 7),
        (7, "prompt-lookup", 5),
        (40, None, 32),
    ],
)
def test_the_drafter_says_how_many(pair, trained, method, drafts) -> None:
    trained_for = dataclasses.replace(pair.drafter, trained_num_draft_tokens=trained)
    speculator = api.make_speculator(dataclasses.replace(pair, drafter=trained_for), method)
    assert speculator.num_draft_tokens == drafts


@pytest.mark.parametrize("run", [api.generate, api.stream])
def test_text_without_a_tokenizer(pair, run) -> None:
    """`stream` refuses when called, not when first read."""
    silent = dataclasses.replace(pair, tokenizer=None)
    with refused(silent, "prompt 0", "no tokenizer"):
        run(silent, "abc")
    with refused(silent, "prompt 0", "stop", "no tokenizer"):
        run(silent, [1, 2], dataclasses.replace(SAMPLED, stop=("a",)))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"target": "/nowhere/model"}, ("/nowhere/model",)),
        ({"target": "smollm2", "drafter": "/nowhere/drafter"}, ("/nowhere/drafter",)),
        ({"target": "smollm2", "dtype": "float16"}, ("dtype", "'float16'", "bfloat16")),
    ],
)
def test_bad_sources(pair, options, words, monkeypatch) -> None:
    if "drafter" in options:
        from peagle_jax.convert import checkpoint

        target = (pair.target, pair.params["target"])
        monkeypatch.setattr(checkpoint, "load_target", lambda *_, **__: target)
    with refused(pair, *words):
        pj.load(**options)
