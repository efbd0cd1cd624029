"""A request's answer as the line of an output file, in the format that the request has."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from peagle_jax.errors import InputError
from peagle_jax.json_values import found_under
from peagle_jax.metrics import GenerationStats
from peagle_jax.prompt_lines import parse_line
from peagle_jax.serving.openai_format import answer_body, batch_answer
from peagle_jax.serving.requests_file import BatchRequest


@dataclasses.dataclass(frozen=True)
class Result:
    """A request's answer. finish_reason: "stop" or "length".

    stats: its counters; the times in it are not written.
    """

    request: BatchRequest
    text: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    finish_reason: str
    stats: GenerationStats


def result_line(result: Result, *, model: str, created: int) -> bytes:
    """One line of JSON, its end included.

    Nothing in it depends on time but `created`, which lines in OpenAI's format have: seconds
    since 1970. model: what those lines name where the request names none.
    """
    request, stats = result.request, result.stats
    usage = {
        "prompt_tokens": result.prompt_tokens,
        "completion_tokens": len(result.token_ids),
        "total_tokens": result.prompt_tokens + len(result.token_ids),
    }
    acceptance = {
        "num_drafts": stats.num_drafts,
        "num_draft_tokens": stats.num_draft_tokens,
        "num_accepted": stats.num_accepted,
        "accepted_per_position": list(stats.accepted_per_position),
        "acceptance_length": stats.acceptance_length,
    }
    if request.call is None:
        return json_line(
            {
                "id": request.id,
                "text": result.text,
                "token_ids": list(result.token_ids),
                "finish_reason": result.finish_reason,
                "usage": usage,
                "acceptance": acceptance,
            }
        )
    body = answer_body(
        request.call,
        request.key,
        result.text,
        result.finish_reason,
        usage,
        model=model,
        created=created,
    )
    return json_line(batch_answer(request.key, {**body, "acceptance": acceptance}))


def json_line(value: dict[str, Any]) -> bytes:
    """A value as a line of UTF-8; in ASCII where a string has half of a surrogate pair."""
    try:
        return f"{json.dumps(value, ensure_ascii=False)}\n".encode()
    except UnicodeEncodeError:
        return f"{json.dumps(value)}\n".encode()


def read_key(line: bytes, where: str) -> str:
    """The key of the request that a line of results answers. Raises InputError."""
    value = parse_line(line, where)
    name = "custom_id" if isinstance(value, dict) and "custom_id" in value else "id"
    if not isinstance(value, dict) or type(value.get(name)) not in (str, int):
        found = found_under(value, name) if isinstance(value, dict) else "found no object"
        raise InputError(f"{where}: {name}: {found}, expected a result's id")
    return str(value[name])
