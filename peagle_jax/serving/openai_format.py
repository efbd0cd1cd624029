"""Requests and answers as OpenAI's API has them: bodies, and the lines of its batch files.

An option that would change the answer and cannot be honoured is refused, unless it has the
value that changes nothing.
"""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any, Literal

from peagle_jax.config import SamplingParams
from peagle_jax.errors import InputError
from peagle_jax.json_values import found_under, shown
from peagle_jax.prompt_lines import JsonPrompt, is_token_ids
from peagle_jax.serving.sampling_fields import read_sampling

Url = Literal["/v1/chat/completions", "/v1/completions"]
CHAT: Url = "/v1/chat/completions"
COMPLETIONS: Url = "/v1/completions"

# Key of a body -> field of SamplingParams. The last three are not OpenAI's own; servers that
# speak its API take them so.
_SAMPLING = {
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "seed": "seed",
    "stop": "stop",
    "top_k": "top_k",
    "min_p": "min_p",
    "ignore_eos": "ignore_eos",
}
# Options that are not there, each with the value that asks for nothing.
_WITHOUT_EFFECT: dict[str, Any] = {
    "best_of": 1,
    "echo": False,
    "frequency_penalty": 0,
    "functions": [],
    "logit_bias": {},
    "logprobs": False,
    "modalities": ["text"],
    "n": 1,
    "presence_penalty": 0,
    "repetition_penalty": 1,
    "response_format": {"type": "text"},
    "stream": False,
    "suffix": "",
    "tool_choice": "none",
    "tools": [],
    "top_logprobs": 0,
}
# What says something of the request and nothing of the answer.
_LABELS = {
    "metadata",
    "model",
    "parallel_tool_calls",
    "prompt_cache_key",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
}


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of the API. model: as the body names it, for the answer's body."""

    url: Url
    model: str | None
    prompt: JsonPrompt
    params: SamplingParams

    @property
    def raw(self) -> bool:
        """Whether text goes to the model as it is, without the chat template."""
        return self.url == COMPLETIONS


def is_batch_line(value: Any) -> bool:
    """Whether the value of a line is a request of OpenAI's batch format."""
    return isinstance(value, dict) and ("custom_id" in value or {"url", "body"} <= value.keys())


def read_batch_line(
    value: dict[str, Any], defaults: SamplingParams, where: str
) -> tuple[str, Call]:
    """(custom_id, call) of a batch line. Raises InputError that begins with `where`."""
    name, url, body = value.get("custom_id"), value.get("url"), value.get("body")
    if not isinstance(name, str) or not name:
        raise InputError(
            f"{where}: custom_id: {found_under(value, 'custom_id')}, expected a string"
        )
    if value.get("method", "POST") != "POST":
        raise InputError(f'{where}: method: {found_under(value, "method")}, expected "POST"')
    if url not in (CHAT, COMPLETIONS):
        raise InputError(
            f"{where}: url: {found_under(value, 'url')}, expected {CHAT} or {COMPLETIONS}"
        )
    if not isinstance(body, dict):
        raise InputError(f"{where}: body: {found_under(value, 'body')}, expected an object")
    return name, read_body(url, body, defaults, f"{where}: body")


def read_body(url: Url, body: dict[str, Any], defaults: SamplingParams, where: str) -> Call:
    """What the body of a call asks for. Raises InputError that begins with `where`.

    `defaults` stand for what the body leaves open.
    """
    prompt_key = "messages" if url == CHAT else "prompt"
    for key, value in body.items():
        if value is None or key in _SAMPLING or key in _LABELS or key == prompt_key:
            continue
        if key not in _WITHOUT_EFFECT:
            raise InputError(f"{where}: {key}: found {shown(value)}, expected no such key")
        nothing = _WITHOUT_EFFECT[key]
        if value != nothing or isinstance(value, bool) != isinstance(nothing, bool):
            raise InputError(
                f"{where}: {key}: found {shown(value)}, expected {shown(nothing)} or none: "
                "it is not supported"
            )
    model = body.get("model")
    if model is not None and not isinstance(model, str):
        raise InputError(f"{where}: model: found {shown(model)}, expected a string")
    if url == CHAT:
        prompt: JsonPrompt = _messages(body, where)
    else:
        prompt = _prompt(body, where)
    return Call(url, model, prompt, read_sampling(body, _SAMPLING, defaults, where))


def _messages(body: dict[str, Any], where: str) -> list[dict[str, str]]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise InputError(f"{where}: messages: {found_under(body, 'messages')}, expected a list")
    return [_message(one, f"{where}: messages[{place}]") for place, one in enumerate(messages)]


def _message(message: Any, where: str) -> dict[str, str]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise InputError(f"{where}: found {shown(message)}, expected an object with a role")
    for key, value in message.items():
        if key not in ("role", "content") and value is not None:
            raise InputError(f"{where}: {key}: found {shown(value)}, expected role and content")
    content = message.get("content")
    if isinstance(content, list):
        texts: list[Any] = [
            part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
            for part in content
        ]
        if all(isinstance(text, str) for text in texts):
            content = "".join(texts)
    if not isinstance(content, str):
        raise InputError(
            f"{where}: content: {found_under(message, 'content')}, expected text or parts of text"
        )
    return {"role": message["role"], "content": content}


def _prompt(body: dict[str, Any], where: str) -> JsonPrompt:
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and not is_token_ids(prompt):
        (prompt,) = prompt  # a list of prompts
    if (isinstance(prompt, str) or is_token_ids(prompt)) and prompt:
        return prompt
    raise InputError(
        f"{where}: prompt: {found_under(body, 'prompt')}, expected one string or list of token ids"
    )


def answer_body(
    call: Call,
    key: str,
    text: str,
    finish_reason: str,
    usage: dict[str, int],
    *,
    model: str,
    created: int,
) -> dict[str, Any]:
    """The body that answers a call.

    key: what the id is made of. model: named where the call names none. created: seconds
    since 1970.
    """
    if call.url == CHAT:
        kind, prefix = "chat.completion", "chatcmpl"
        choice: dict[str, Any] = {"message": {"role": "assistant", "content": text}}
    else:
        kind, prefix = "text_completion", "cmpl"
        choice = {"text": text}
    return {
        "id": _made_id(prefix, key),
        "object": kind,
        "created": created,
        "model": call.model or model,
        "choices": [{"index": 0, **choice, "logprobs": None, "finish_reason": finish_reason}],
        "usage": usage,
    }


def batch_answer(custom_id: str, body: dict[str, Any]) -> dict[str, Any]:
    """The line of a batch's output that carries a body."""
    return {
        "id": _made_id("batch_req", custom_id),
        "custom_id": custom_id,
        "response": {
            "status_code": 200,
            "request_id": _made_id("req", custom_id),
            "body": body,
        },
        "error": None,
    }


def _made_id(prefix: str, key: str) -> str:
    """The same id for the same request, in every run."""
    data = key.encode("utf-8", "surrogatepass")
    return f"{prefix}-{hashlib.blake2b(data, digest_size=12).hexdigest()}"
