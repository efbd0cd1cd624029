"""Requests -> fixed-size arrays: sizes are bucketed so that few programs are compiled."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from peagle_jax.config import ModelConfig, SamplingParams
from peagle_jax.decoding.generate import PREFILL_CHUNK
from peagle_jax.decoding.sampling import RequestArrays
from peagle_jax.errors import InputError
from peagle_jax.text import Prompt, encode_prompt

MIN_PROMPT_SIZE = 64
MIN_NEW_TOKENS = 32


@dataclasses.dataclass(frozen=True)
class Request:
    """One prompt as token ids with its parameters; `index` is its place in the input."""

    index: int
    token_ids: tuple[int, ...]
    params: SamplingParams

    @property
    def prompt_size(self) -> int:
        """The padded size that this prompt compiles for."""
        return prompt_bucket(len(self.token_ids))


@dataclasses.dataclass(frozen=True)
class Batch:
    """Requests that run together, and the sizes they share."""

    requests: tuple[Request, ...]
    rows: int
    prompt_size: int
    max_new_tokens: int

    def arrays(self) -> tuple[Array, Array, RequestArrays]:
        """prompts int32 `[rows, prompt_size]`, lengths int32 `[rows]`, parameters.

        Rows without a request are one token long and have no tokens to generate, so
        they are finished from the start.
        """
        prompts = np.zeros((self.rows, self.prompt_size), np.int32)
        lengths = np.ones(self.rows, np.int32)
        table = {
            "temperature": np.zeros(self.rows, np.float32),
            "top_k": np.zeros(self.rows, np.int32),
            "top_p": np.ones(self.rows, np.float32),
            "min_p": np.zeros(self.rows, np.float32),
            "seed": np.zeros(self.rows, np.uint32),
            "max_new_tokens": np.zeros(self.rows, np.int32),
            "ignore_eos": np.zeros(self.rows, bool),
        }
        for row, request in enumerate(self.requests):
            lengths[row] = len(request.token_ids)
            prompts[row, : lengths[row]] = request.token_ids
            for name, column in table.items():
                value = getattr(request.params, name)
                column[row] = secrets.randbits(32) if value is None else value
        requests = RequestArrays(**{name: jnp.asarray(column) for name, column in table.items()})
        return jnp.asarray(prompts), jnp.asarray(lengths), requests


def prompt_bucket(length: int) -> int:
    """Powers of two from 64 to the prefill chunk, then chunks doubling in number."""
    return max(MIN_PROMPT_SIZE, _power_of_two(length))


def fine_bucket(length: int) -> int:
    """For less padding and more programs: eighths of a power of two, at least 32 apart."""
    unit = max(32, _power_of_two(length) // 8)
    return -(-length // unit) * unit


def new_tokens_bucket(count: int) -> int:
    """Powers of two from 32 up."""
    return max(MIN_NEW_TOKENS, _power_of_two(count))


def _power_of_two(count: int) -> int:
    return 1 << max(count - 1, 0).bit_length()


assert _power_of_two(PREFILL_CHUNK) == PREFILL_CHUNK, "larger buckets are whole chunks"


def check_prompt(token_ids: Sequence[int], model: ModelConfig, where: str) -> tuple[int, ...]:
    """The ids, once they are known to fit the target; raises InputError."""
    if not token_ids:
        raise InputError(f"{where}: found no tokens, expected at least one")
    bad = next((t for t in token_ids if not 0 <= t < model.vocab_size), None)
    if bad is not None:
        raise InputError(
            f"{where}: found token id {bad}, expected 0 to {model.vocab_size - 1} "
            "(the target's vocabulary)"
        )
    if len(token_ids) >= model.max_positions:
        raise InputError(
            f"{where}: found {len(token_ids)} tokens, expected at most "
            f"{model.max_positions - 1} (the target's context less one token of answer)"
        )
    return tuple(token_ids)


def make_requests(
    tokenizer: Any,
    model: ModelConfig,
    prompts: Sequence[Prompt],
    params: Sequence[SamplingParams],
    *,
    raw: bool = False,
    names: Sequence[str] | None = None,
) -> list[Request]:
    """Prompts as token ids, each with its own parameters; raises InputError naming the prompt,
    as in `names` or by its number.

    `raw` gives strings to the model without the chat template.
    """
    requests = []
    for index, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
        where = names[index] if names else f"prompt {index}"
        ids = encode_prompt(tokenizer, prompt, raw=raw, where=where)
        if one.stop and tokenizer is None:
            raise InputError(f"{where}: found stop strings, but no tokenizer is loaded")
        requests.append(Request(index, check_prompt(ids, model, where), one))
    return requests


def make_batches(requests: Sequence[Request], batch_size: int) -> list[Batch]:
    """Group requests of like prompt size, `batch_size` at most in each.

    A request's tokens do not depend on its batch, so the order is free.
    """
    if batch_size < 1:
        raise InputError(f"batch_size: found {batch_size}, expected 1 or more")
    ordered = sorted(requests, key=lambda r: (r.prompt_size, len(r.token_ids)))
    groups = [ordered[i : i + batch_size] for i in range(0, len(ordered), batch_size)]
    rows = min(batch_size, _power_of_two(len(ordered)))
    return [
        Batch(
            requests=tuple(group),
            rows=rows,
            prompt_size=max(r.prompt_size for r in group),
            max_new_tokens=new_tokens_bucket(max(r.params.max_new_tokens for r in group)),
        )
        for group in groups
    ]
