"""The library's front door: `load` a pair, `generate` or `stream` with it."""

from __future__ import annotations

import concurrent.futures
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh

from peagle_jax import batching, compile_cache, runner
from peagle_jax.batching import Request
from peagle_jax.config import (
    MAX_DRAFT_TOKENS,
    METHODS,
    DrafterConfig,
    DraftSampling,
    Method,
    SamplingParams,
    Verification,
    WeightForm,
    check_num_draft_tokens,
    drafts_tree,
    looks_up,
    needs_drafter,
    network_method,
)
from peagle_jax.decoding import placement
from peagle_jax.decoding.speculate import Speculator
from peagle_jax.errors import InputError
from peagle_jax.models import kernel_forms
from peagle_jax.runner import Output, Pair
from peagle_jax.text import Prompt

DEFAULT_DRAFT_TOKENS = 5
# Draft lengths that "auto" chooses from, as far as the drafter's own goes.
AUTO_LENGTHS = (0, 1, 3, 5, 8)
# Of trees: with the newest token they fill half a tile of a matrix product, or a whole one.
TREE_LENGTHS = (0, 3, 7)
# Target aliases whose drafter ships with the package, under the same name.
SHIPPED_DRAFTERS = ("smollm2",)
# Drafts after which an acceptance of nothing at all means a fault, not bad luck.
SUSPICIOUS_DRAFTS = 64


def load(
    target: str = "smollm2",
    drafter: str | None = "auto",
    *,
    dtype: str | None = None,
    tokenizer: str | None = None,
    mesh: Mesh | None = None,
    weights: WeightForm = "full",
) -> Pair:
    """Load a target and its drafter.

    Args:
      target: an alias ("smollm2"), a folder or file (Hugging Face layout, GGUF,
        safetensors, Orbax written by `peagle convert`), or a hub repository.
      drafter: the same kinds of source; None for plain decoding only; "auto" takes the
        drafter that ships with an alias, and none for anything else.
      dtype: "float32" or "bfloat16"; by default float32 on CPU, bfloat16 elsewhere.
      tokenizer: where to take it from, if not from the target.
      mesh: where the parameters go (`sharding.make_inference_mesh`), each device being sent its
        part alone as it is read; None = the default device.
      weights: of the target, in memory: "full", all in `dtype`; "mxfp4", gpt-oss's packed
        experts as they are, 4.25 bits a weight and the same values; "int8", linear layers
        rounded to 8 bits, which is another, slightly worse target (docs/generate.md).

    Raises:
      InputError: anything wrong with the files, a drafter for another target, or "mxfp4" for a
        target without packed experts.
    """
    from peagle_jax.convert import checkpoint
    from peagle_jax.tokenizer import load_tokenizer

    compile_cache.enable()
    dtype = dtype or default_dtype()
    if dtype not in ("float32", "bfloat16"):
        raise InputError(f"dtype: found {dtype!r}, expected 'float32' or 'bfloat16'")
    if drafter == "auto":
        drafter = target if target in SHIPPED_DRAFTERS else None
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        words = pool.submit(load_tokenizer, tokenizer or target)
        split = whole = None
        if mesh is not None:
            split = functools.partial(placement.target_shardings, mesh=mesh)
            whole = functools.partial(placement.drafter_sharding, mesh=mesh)
        config, params = checkpoint.load_target(target, dtype, split, weights)
        trees = {"target": params}
        drafter_config = None
        if drafter is not None:
            drafter_config, trees["drafter"] = checkpoint.load_drafter(
                drafter, target_config=config, dtype=dtype, sharding=whole
            )
        if mesh is None:
            trees = kernel_forms.two_way(trees)
        return Pair(config, drafter_config, trees, words.result(), dtype)


def default_dtype() -> str:
    """The dtype of weights and activations where none is asked for."""
    return "float32" if jax.default_backend() == "cpu" else "bfloat16"


def make_speculator(
    pair: Pair,
    method: Method | None = None,
    num_draft_tokens: int | Literal["auto"] | None = None,
    draft_sampling: DraftSampling = "sample",
    verify: Verification = "coupled",
) -> Speculator:
    """How to decode, checked.

    method: None takes the one the drafter was trained for.
    num_draft_tokens: K; None takes what the drafter was trained for, 5 where it does not say;
      "auto" chooses at every step how many, perhaps none, by what was accepted so far and by what
      steps cost here, see `decoding.draft_length`.
    """
    if method is None:
        method = pair.drafter.method if pair.drafter else "none"
    for name, found, known in (
        ("method", method, METHODS),
        ("draft_sampling", draft_sampling, ("greedy", "sample")),
        ("verify", verify, ("coupled", "rejection")),
    ):
        if found not in known:
            raise InputError(f"{name}: found {found!r}, expected one of {', '.join(known)}")
    if method == "none":
        return Speculator(pair.target, dtype=pair.dtype)
    lengths: tuple[int, ...] = ()
    if num_draft_tokens == "auto":
        lengths = _auto_lengths(pair.drafter if needs_drafter(method) else None)
        if drafts_tree(method):
            lengths = TREE_LENGTHS
        num_draft_tokens = lengths[-1]
    if num_draft_tokens is None:
        num_draft_tokens = _default_draft_tokens(pair.drafter if needs_drafter(method) else None)
    check_num_draft_tokens(num_draft_tokens)
    if not needs_drafter(method):
        return Speculator(
            pair.target, None, method, num_draft_tokens, draft_sampling, verify, pair.dtype, lengths
        )
    if pair.drafter is None:
        raise InputError(f"method: found {method!r}, but no drafter is loaded; expected 'none'")
    if pair.drafter.method != network_method(method):
        raise InputError(
            f"method: found {method!r}, expected {pair.drafter.method!r}, which the drafter "
            "was trained for"
        )
    if looks_up(method) and (verify, draft_sampling) == ("rejection", "sample"):
        raise InputError(
            f"draft_sampling: found 'sample' with {method!r} and the rejection rule, expected "
            "'greedy': drafts that are looked up are samples of nothing"
        )
    if drafts_tree(method) and verify == "rejection":
        raise InputError(
            f"verify: found 'rejection' with {method!r}, expected 'coupled': the drafts of a tree "
            "are alternatives, samples of nothing"
        )
    return Speculator(
        pair.target,
        pair.drafter,
        method,
        num_draft_tokens,
        draft_sampling,
        verify,
        pair.dtype,
        lengths,
    )


def _default_draft_tokens(drafter: DrafterConfig | None) -> int:
    """K where none is asked for: what the drafter was trained for, DEFAULT_DRAFT_TOKENS where it
    does not say or nothing drafts but the text."""
    trained = drafter.trained_num_draft_tokens if drafter else None
    return min(trained or DEFAULT_DRAFT_TOKENS, MAX_DRAFT_TOKENS)


def _auto_lengths(drafter: DrafterConfig | None) -> tuple[int, ...]:
    """Those of AUTO_LENGTHS that a drafter was trained for."""
    trained = drafter.trained_num_draft_tokens if drafter else None
    if trained is None:
        return tuple(length for length in AUTO_LENGTHS if length <= DEFAULT_DRAFT_TOKENS)
    return tuple(length for length in AUTO_LENGTHS if length <= max(trained, 1))


def generate(
    pair: Pair,
    prompts: Prompt | Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams] = SamplingParams(),
    *,
    method: Method | None = None,
    num_draft_tokens: int | Literal["auto"] | None = None,
    draft_sampling: DraftSampling = "sample",
    verify: Verification = "coupled",
    batch_size: int = 8,
    raw: bool = False,
    progress: Callable[[int, int], None] | None = None,
    names: Sequence[str] | None = None,
) -> list[Output]:
    """Answer prompts, in their order.

    Args:
      prompts: strings, chat message lists or token-id lists; one alone is a list of one.
      params: one for all, or one for each prompt.
      method, num_draft_tokens, draft_sampling, verify: see `make_speculator`.
      batch_size: requests that run together.
      raw: do not apply the chat template to strings.
      progress: called with (done, total) after each batch.
      names: what errors call the prompts; None = "prompt 0" and so on.

    Raises:
      InputError: before anything is compiled.
    """
    speculator = make_speculator(pair, method, num_draft_tokens, draft_sampling, verify)
    requests = _requests(pair, prompts, params, raw, names)
    outputs, _ = runner.run_requests(pair, speculator, requests, batch_size, progress)
    warn_if_nothing_accepted(outputs)
    return outputs


class Piece(str):
    """Text of an answer as it comes; `channel`: which of an answer in channels, else None."""

    __slots__ = ("channel",)
    channel: str | None

    def __new__(cls, text: str, channel: str | None = None) -> Piece:
        piece = super().__new__(cls, text)
        piece.channel = channel
        return piece


def stream(
    pair: Pair,
    prompt: Prompt,
    params: SamplingParams = SamplingParams(),
    *,
    method: Method | None = None,
    num_draft_tokens: int | Literal["auto"] | None = None,
    draft_sampling: DraftSampling = "sample",
    verify: Verification = "coupled",
    raw: bool = False,
    name: str = "prompt 0",
) -> Iterator[Piece | Output]:
    """Yield pieces of the answer as they are confirmed, then the Output; `name` is what errors
    call the prompt."""
    speculator = make_speculator(pair, method, num_draft_tokens, draft_sampling, verify)
    (batch,) = batching.make_batches(_requests(pair, [prompt], params, raw, [name]), 1)

    def pieces() -> Iterator[Piece | Output]:
        shown = 0
        for visit in runner.visits(pair, speculator, batch, num_steps=1):
            text = visit.streams[0]
            upto = len(text.text) if visit.over else text.safe_length()
            for channel, end in text.channel_ends():
                if shown < min(end, upto):
                    yield Piece(text.text[shown : min(end, upto)], channel)
                    shown = min(end, upto)
        outputs = visit.outputs()
        warn_if_nothing_accepted(outputs)
        yield outputs[0]

    return pieces()


def _requests(
    pair: Pair,
    prompts: Prompt | Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams],
    raw: bool,
    names: Sequence[str] | None,
) -> list[Request]:
    listed = [prompts] if _is_one_prompt(prompts) else list(prompts)
    if isinstance(params, SamplingParams):
        each = [params] * len(listed)
    else:
        each = list(params)
        if len(each) != len(listed):
            raise InputError(
                f"params: found {len(each)} entries, expected one, or one for each of the "
                f"{len(listed)} prompts"
            )
    return batching.make_requests(
        pair.tokenizer,
        pair.target,
        listed,  # type: ignore[arg-type]
        each,
        raw=raw,
        names=names,
    )


def _is_one_prompt(prompts: Any) -> bool:
    if isinstance(prompts, str):
        return True
    if isinstance(prompts, np.ndarray):
        return prompts.ndim == 1
    first = prompts[0] if isinstance(prompts, Sequence) and prompts else None
    return isinstance(first, (int, np.integer, dict)) and not isinstance(first, bool)


def warn_if_nothing_accepted(outputs: Sequence[Output]) -> None:
    """Warns where all outputs together look like those of another model's drafter."""
    warn_if_none_accepted(
        sum(output.stats.num_drafts for output in outputs),
        sum(output.stats.num_accepted for output in outputs),
        stacklevel=4,
    )


def warn_if_none_accepted(drafts: int, accepted: int, stacklevel: int = 3) -> None:
    """An acceptance length of exactly 1 is how a drafter for another model looks."""
    if drafts >= SUSPICIOUS_DRAFTS and not accepted:
        warnings.warn(
            f"none of {drafts} drafts was accepted: the drafter was probably trained for "
            "another target, or its layer ids mean other depths",
            stacklevel=stacklevel,
        )
