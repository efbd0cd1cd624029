"""Requests from the lines of files: this project's own format, and OpenAI's batch format.

An own line is a JSON string, or an object with one of `prompt`, `messages` and `token_ids`
(prompt_lines.py), perhaps an `id`, and any field of SamplingParams under its own name. Other
keys are left alone, unless they look like a sampling parameter that would be missed.
A line with a `custom_id` is one of OpenAI's (openai_format.py). A file may have both.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

from peagle_jax.config import SamplingParams
from peagle_jax.errors import InputError
from peagle_jax.json_values import shown
from peagle_jax.prompt_lines import JsonPrompt, find_prompt, parse_line
from peagle_jax.serving.id_set import IdSet
from peagle_jax.serving.input_lines import InputLine
from peagle_jax.serving.openai_format import Call, is_batch_line, read_batch_line
from peagle_jax.serving.sampling_fields import OWN_NAMES, read_sampling

# Names that other formats have for sampling parameters -> this format's name, or None where
# there is no such thing. Left alone, they would be missed without a word.
_OTHER_NAMES: dict[str, str | None] = {
    "best_of": None,
    "frequency_penalty": None,
    "logit_bias": None,
    "logprobs": None,
    "max_completion_tokens": "max_new_tokens",
    "max_length": "max_new_tokens",
    "max_tokens": "max_new_tokens",
    "n": None,
    "presence_penalty": None,
    "repetition_penalty": None,
    "response_format": None,
    "stop_token_ids": None,
    "tools": None,
}


@dataclasses.dataclass(frozen=True)
class BatchRequest:
    """One request of a batch.

    id: as it was given, or made of the line's place. params.seed is an integer.
    raw: text goes to the model as it is, None = as the run does it.
    call: of a line in OpenAI's format, whose answer has that format too.
    """

    id: str | int
    prompt: JsonPrompt
    params: SamplingParams
    file: str
    line: int
    raw: bool | None = None
    call: Call | None = None

    @property
    def key(self) -> str:
        """The id as text: what tells requests apart."""
        return str(self.id)

    @property
    def where(self) -> str:
        """File and line, as error messages name them."""
        return f"{self.file}:{self.line}"


@dataclasses.dataclass(frozen=True)
class BadLine:
    """A line that is no request. id: where it has one that could be read."""

    file: str
    line: int
    reason: str
    id: str | int | None = None


def read_requests(
    lines: Iterable[InputLine], defaults: SamplingParams, run_seed: int = 0
) -> Iterator[BatchRequest | BadLine]:
    """What every line asks for, in order. A line of an id that came before is a bad line.

    Ids are remembered as an IdSet does. defaults: for what a line leaves open; its seed is
    not looked at. run_seed: from it and the id comes the seed of a request that has none, so
    that neither order nor restarts change an answer.
    """
    seen = IdSet()
    for line in lines:
        where = f"{line.file}:{line.number}"
        found: str | int | None = None
        try:
            if line.problem is not None:
                raise InputError(f"{where}: {line.problem}")
            value = parse_line(line.text, where)
            found = _given_id(value)
            request = _read(value, line, dataclasses.replace(defaults, seed=None), where)
            if not seen.add(request.key):
                raise InputError(f"{where}: id: found {shown(request.id)} again, expected it once")
        except InputError as error:
            reason = str(error).removeprefix(f"{where}: ")
            yield BadLine(line.file, line.number, reason, found)
            continue
        if request.params.seed is None:
            seed = request_seed(run_seed, request.key)
            params = dataclasses.replace(request.params, seed=seed)
            request = dataclasses.replace(request, params=params)
        yield request


def request_seed(run_seed: int, key: str) -> int:
    """A request's seed in a run: 0 .. 2**32 - 1, different for different ids."""
    data = f"{run_seed}\n{key}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(data, digest_size=4).digest(), "little")


def _given_id(value: Any) -> str | int | None:
    """The id of a line, if it has one that can be shown."""
    if not isinstance(value, dict):
        return None
    found = value.get("custom_id", value.get("id"))
    return found if type(found) in (str, int) else None


def _read(value: Any, line: InputLine, defaults: SamplingParams, where: str) -> BatchRequest:
    if is_batch_line(value):
        name, call = read_batch_line(value, defaults, where)
        return BatchRequest(name, call.prompt, call.params, line.file, line.number, call.raw, call)
    prompt = find_prompt(value, where)
    fields = value if isinstance(value, dict) else {}
    given = fields.get("id")
    if given is not None and (type(given) not in (str, int) or given == ""):
        raise InputError(f"{where}: id: found {shown(given)}, expected a string or an integer")
    for key in fields.keys() - OWN_NAMES.keys():
        if (hint := _missed(key)) is not None:
            raise InputError(f"{where}: {key}: found {shown(fields[key])}, expected {hint}")
    params = read_sampling(fields, OWN_NAMES, defaults, where)
    name = line.place if given is None else given
    return BatchRequest(name, prompt, params, line.file, line.number)


@functools.lru_cache(maxsize=1024)
def _missed(key: str) -> str | None:
    """What to expect in place of a key that looks like a sampling parameter; else None."""
    if key in _OTHER_NAMES:
        name = _OTHER_NAMES[key]
    else:
        close = difflib.get_close_matches(key, OWN_NAMES, n=1, cutoff=0.8)
        if not close:
            return None
        name = close[0]
    return f"{name} in its place" if name else "no such key: it is not supported"
