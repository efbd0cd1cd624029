"""What lines ask for: own lines, OpenAI's batch lines, and what is wrong with either."""

from __future__ import annotations

import json
from typing import Any

import pytest

from peagle_jax.config import SamplingParams
from peagle_jax.serving.input_lines import InputLine
from peagle_jax.serving.requests_file import BadLine, BatchRequest, read_requests, request_seed

DEFAULTS = SamplingParams(max_new_tokens=64, temperature=0.5, stop=("END",))


def read(*values: Any) -> list[BatchRequest | BadLine]:
    """Values as the lines of a file; bytes are taken as they are."""
    lines = [
        InputLine("in.jsonl", n, v if isinstance(v, bytes) else json.dumps(v).encode())
        for n, v in enumerate(values, start=1)
    ]
    return list(read_requests(lines, DEFAULTS, run_seed=3))


def good(value: Any) -> BatchRequest:
    (found,) = read(value)
    assert isinstance(found, BatchRequest), found
    return found


def bad(value: Any) -> str:
    (found,) = read(value)
    assert isinstance(found, BadLine), found
    assert (found.file, found.line) == ("in.jsonl", 1)
    assert "\n" not in found.reason
    return found.reason


def chat(body: Any = None, **changes: Any) -> dict[str, Any]:
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], **(body or {})}
    line = {"custom_id": "c", "method": "POST", "url": "/v1/chat/completions", "body": body}
    return {key: value for key, value in {**line, **changes}.items() if value is not ...}


def completion(body: Any) -> dict[str, Any]:
    return {"custom_id": "c", "url": "/v1/completions", "body": body}


def test_own_lines() -> None:
    found = read(
        "text",
        {"prompt": "a", "id": "x"},
        {"messages": [{"role": "user", "content": "b"}], "id": 7, "category": "kept out"},
        {"token_ids": [1, 2], "max_new_tokens": 5, "temperature": 0, "seed": 11, "stop": "."},
    )
    assert all(isinstance(one, BatchRequest) for one in found)
    assert [one.id for one in found] == ["in.jsonl:1", "x", 7, "in.jsonl:4"]
    assert [one.prompt for one in found if isinstance(one, BatchRequest)] == [
        "text",
        "a",
        [{"role": "user", "content": "b"}],
        [1, 2],
    ]
    first, last = found[0], found[3]
    assert isinstance(first, BatchRequest)
    assert isinstance(last, BatchRequest)
    seed = request_seed(3, "in.jsonl:1")
    assert first.params == SamplingParams(64, 0.5, stop=("END",), seed=seed)
    assert last.params == SamplingParams(5, 0.0, seed=11, stop=(".",))
    assert (first.key, first.where, first.raw, first.call) == ("in.jsonl:1",) * 2 + (None, None)


def test_every_sampling_parameter_can_be_given() -> None:
    fields = {
        "max_new_tokens": 2,
        "temperature": 1.5,
        "top_k": 3,
        "top_p": 0.5,
        "min_p": 0.1,
        "seed": 4,
        "stop": ["a", "b"],
        "ignore_eos": True,
    }
    expected = SamplingParams(**{**fields, "stop": ("a", "b")})  # type: ignore[arg-type]
    assert good({"prompt": "p", **fields}).params == expected
    nothing = dict.fromkeys(fields)
    assert (
        good({"prompt": "p", "id": "x", **nothing}).params
        == good({"prompt": "p", "id": "x"}).params
    )


def test_seeds_depend_on_the_id_and_the_run_alone() -> None:
    first, second = read({"prompt": "p", "id": "a"}, {"prompt": "p", "id": "b"})
    (alone,) = read({"prompt": "other", "id": "b"})
    assert isinstance(first, BatchRequest)
    assert isinstance(second, BatchRequest)
    assert isinstance(alone, BatchRequest)
    assert first.params.seed != second.params.seed == alone.params.seed
    assert request_seed(0, "a") != request_seed(1, "a")
    assert len({request_seed(0, str(n)) for n in range(1000)}) == 1000


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (b"{", "found invalid JSON (Expecting property name"),
        (b"\xff\xfe\xfd\n", "found bytes that are not UTF-8"),
        (b"[" * 100_000, "found invalid JSON (maximum recursion"),
        (b"1" * 5000, "found invalid JSON (Exceeds the limit"),
        (3, "found 3, expected a string or an object"),
        ("", "found an empty prompt"),
        ({"token_ids": []}, "token_ids: found an empty list"),
        ({"id": "a"}, "found none of them, expected exactly one of prompt, messages, token_ids"),
        ({"prompt": "a", "token_ids": [1]}, "found prompt and token_ids, expected exactly one"),
        ({"prompt": 3}, "prompt: found 3, expected a string"),
        ({"prompt": "a", "id": [1]}, "id: found [1], expected a string or an integer"),
        ({"prompt": "a", "id": ""}, 'id: found "", expected a string'),
        ({"prompt": "a", "id": True}, "id: found true"),
        ({"prompt": "a", "temperature": "hot"}, 'temperature: found "hot", expected a number'),
        ({"prompt": "a", "temperature": True}, "temperature: found true, expected a number"),
        ({"prompt": "a", "temperature": 10**400}, "temperature: found 1000"),
        (
            {"prompt": "a", "temperature": -1},
            "temperature: found -1.0, expected 0 (greedy) or more",
        ),
        (b'{"prompt": "a", "temperature": 1e999}', "temperature: found inf, expected 0"),
        (b'{"prompt": "a", "top_p": NaN}', "top_p: found nan, expected a number in (0, 1]"),
        ({"prompt": "a", "max_new_tokens": 0}, "max_new_tokens: found 0, expected 1 or more"),
        ({"prompt": "a", "top_k": 1.5}, "top_k: found 1.5, expected an integer"),
        ({"prompt": "a", "seed": 2**32}, "seed: found 4294967296, expected 0 to 2**32 - 1"),
        ({"prompt": "a", "stop": [1]}, "stop: found [1], expected a string or a list of strings"),
        ({"prompt": "a", "stop": ""}, "stop: found an empty string"),
        ({"prompt": "a", "ignore_eos": 1}, "ignore_eos: found 1, expected true or false"),
        ({"prompt": "a", "max_tokens": 9}, "max_tokens: found 9, expected max_new_tokens in its"),
        ({"prompt": "a", "temprature": 1}, "temprature: found 1, expected temperature in its"),
        ({"prompt": "a", "n": 2}, "n: found 2, expected no such key: it is not supported"),
    ],
)
def test_bad_own_lines(value, reason) -> None:
    assert reason in bad(value)


def test_a_bad_line_does_not_end_the_run() -> None:
    found = read({"prompt": "a", "id": "x"}, {"id": "y"}, {"prompt": "b", "id": "z"})
    assert [type(one) for one in found] == [BatchRequest, BadLine, BatchRequest]
    assert found[1] == BadLine(
        "in.jsonl",
        2,
        "found none of them, expected exactly one of prompt, messages, token_ids",
        "y",
    )


def test_an_id_comes_once() -> None:
    found = read(
        {"prompt": "a", "id": 7},
        {"prompt": "b", "id": "7"},
        {"prompt": "c", "temperature": "bad", "id": "z"},
        {"prompt": "d", "id": "z"},  # the line before was no request
        chat(custom_id="7"),
        {"prompt": "e", "id": "in.jsonl:7"},
        {"prompt": "f"},
        {"prompt": "g", "id": "\ud800"},
    )
    kinds = [isinstance(one, BatchRequest) for one in found]
    assert kinds == [True, False, False, True, False, True, False, True]
    assert found[1] == BadLine("in.jsonl", 2, 'id: found "7" again, expected it once', "7")


def test_a_line_that_could_not_be_read() -> None:
    (found,) = read_requests([InputLine("f", 4, b"", "found a line too long")], DEFAULTS)
    assert found == BadLine("f", 4, "found a line too long")


def test_chat_lines() -> None:
    found = good(
        chat(
            {
                "messages": [
                    {"role": "system", "content": "Be brief.", "name": None},
                    {"role": "user", "content": [{"type": "text", "text": t} for t in ("a", "b")]},
                ],
                "max_completion_tokens": 5,
                "temperature": 1,
                "stop": ["x"],
                "n": 1,
                "stream": False,
                "presence_penalty": 0.0,
                "logit_bias": {},
                "tools": None,
                "user": "somebody",
                "top_k": 4,
            }
        )
    )
    assert found.prompt == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "ab"},
    ]
    assert (found.id, found.raw) == ("c", False)
    assert found.params == SamplingParams(5, 1.0, top_k=4, stop=("x",), seed=request_seed(3, "c"))
    assert found.call is not None
    assert (found.call.url, found.call.model) == ("/v1/chat/completions", "m")
    assert good(chat(method=...)).params.max_new_tokens == DEFAULTS.max_new_tokens


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("a", "a"), (["a"], "a"), ([1, 2], [1, 2]), ([[1, 2]], [1, 2]), ([5], [5])],
)
def test_completion_lines(prompt, expected) -> None:
    found = good(completion({"prompt": prompt, "max_tokens": 3}))
    assert (found.prompt, found.raw, found.params.max_new_tokens) == (expected, True, 3)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (chat(custom_id=...), "custom_id: found none, expected a string"),
        (chat(custom_id=""), 'custom_id: found "", expected a string'),
        (chat(method="GET"), 'method: found "GET", expected "POST"'),
        (chat(url="/v1/embeddings"), 'url: found "/v1/embeddings", expected /v1/chat/completions'),
        (chat(url=["a"]), 'url: found ["a"]'),
        (chat() | {"body": "x"}, 'body: found "x", expected an object'),
        (chat({"messages": []}), "body: messages: found [], expected a list"),
        (chat({"messages": None}), "body: messages: found null, expected a list"),
        (chat({"messages": [{"content": "a"}]}), "body: messages[0]: found"),
        (chat({"messages": [{"role": "user"}]}), "messages[0]: content: found none, expected text"),
        (
            chat({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
            "messages[0]: content: found",
        ),
        (
            chat({"messages": [{"role": "user", "content": "a", "name": "Bo"}]}),
            'messages[0]: name: found "Bo", expected role and content',
        ),
        (chat({"n": 2}), "body: n: found 2, expected 1 or none: it is not supported"),
        (chat({"n": True}), "body: n: found true, expected 1"),
        (chat({"stream": True}), "body: stream: found true, expected false"),
        (chat({"presence_penalty": 0.5}), "body: presence_penalty: found 0.5, expected 0"),
        (chat({"logprobs": 0}), "body: logprobs: found 0, expected false"),
        (chat({"temprature": 1}), "body: temprature: found 1, expected no such key"),
        (chat({"model": 3}), "body: model: found 3, expected a string"),
        (chat({"max_tokens": 1, "max_completion_tokens": 2}), "another key for max_new_tokens too"),
        (chat({"top_p": 2}), "body: top_p: found 2.0, expected a number in (0, 1]"),
        (completion({}), "body: prompt: found none, expected one string or list of token ids"),
        (completion({"prompt": ["a", "b"]}), 'body: prompt: found ["a", "b"], expected one'),
        (completion({"prompt": [[1], [2]]}), "body: prompt: found [[1], [2]], expected one"),
        (completion({"prompt": ""}), 'body: prompt: found "", expected one'),
        (completion({"prompt": []}), "body: prompt: found [], expected one"),
        (completion({"prompt": "a", "messages": []}), "body: messages: found [], expected no such"),
    ],
)
def test_bad_batch_lines(value, reason) -> None:
    assert reason in bad(value)
