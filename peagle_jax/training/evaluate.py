"""How many drafts a drafter gets accepted, measured by decoding with it.

The figure is the serving one: the acceptance length of P-EAGLE (arXiv 2602.01469) and EAGLE-3
(arXiv 2503.01840), from whole answers, drafts being conditioned on what was really confirmed.
Loss and accuracy on given text, as training reports them, only hint at it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from peagle_jax import batching, runner
from peagle_jax.config import Method, SamplingParams, check_num_draft_tokens
from peagle_jax.decoding.speculate import Speculator
from peagle_jax.errors import InputError
from peagle_jax.metrics import GenerationStats
from peagle_jax.runner import Output, Pair
from peagle_jax.text import Prompt

Progress = Callable[[int, int], None]


@dataclasses.dataclass(frozen=True)
class Acceptance:
    """What became of the drafts of some prompts, pooled: long answers weigh more.

    tokens: generated. drafts: verifications that had drafts. accepted_per_position[j]: of
    those, how many accepted the draft at position j. standard_error: of the acceptance
    length over prompts (see `standard_error`), None where fewer than two prompts drafted.
    """

    prompts: int
    tokens: int
    drafts: int
    accepted_per_position: tuple[int, ...]
    standard_error: float | None

    @property
    def accepted(self) -> int:
        """Drafted tokens that the target confirmed."""
        return sum(self.accepted_per_position)

    @property
    def acceptance_length(self) -> float:
        """Tokens a verification yields on average, 1 + accepted / drafts; 1.0 without drafts."""
        return 1.0 + self.accepted / max(self.drafts, 1)

    @property
    def per_position(self) -> tuple[float, ...]:
        """Share of drafts that accepted the token at each of the K positions. As acceptance
        ends at the first rejection it falls from position to position, and the shares sum to
        the acceptance length less one."""
        return tuple(count / max(self.drafts, 1) for count in self.accepted_per_position)

    def to_json(self) -> dict[str, Any]:
        """Plain Python values; `standard_error` may be None."""
        return {
            "prompts": self.prompts,
            "tokens": self.tokens,
            "drafts": self.drafts,
            "accepted": self.accepted,
            "accepted_per_position": list(self.accepted_per_position),
            "acceptance_length": self.acceptance_length,
            "standard_error": self.standard_error,
            "per_position": list(self.per_position),
        }


@dataclasses.dataclass(frozen=True)
class AcceptanceReport(Acceptance):
    """All prompts together, then each category; `outputs` are the answers, in their order.

    seconds: wall time of decoding, prefill included and compilation not. The prompts of a
    category share batches with others, so only the whole has a speed.
    """

    by_category: dict[str, Acceptance]
    seconds: float
    compile_seconds: float
    outputs: tuple[Output, ...] = dataclasses.field(repr=False)

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens over `seconds`."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0

    def to_json(self) -> dict[str, Any]:
        """Plain Python values, the answers left out."""
        return {
            **super().to_json(),
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
            "compile_seconds": self.compile_seconds,
            "by_category": {name: part.to_json() for name, part in self.by_category.items()},
        }


def decoded_acceptance(
    pair: Pair,
    prompts: Sequence[Prompt],
    *,
    num_draft_tokens: int,
    max_new_tokens: int,
    batch_size: int,
    params: SamplingParams | None = None,
    categories: Sequence[str] | None = None,
    progress: Progress | None = None,
    method: Method | None = None,
) -> AcceptanceReport:
    """Decode answers to `prompts` with the pair's drafter and count what was accepted.

    Made to be called again and again while a drafter trains. Programs are compiled once a
    size and kept in `pair.compiled`; parameters are their arguments. So keep one pair and
    replace `pair.params["drafter"]` before each call (`dataclasses.replace(pair, params=...)`
    shares what is compiled too). The new tree must have the old one's structure, shapes,
    dtypes and shardings, that is `pair.dtype` and not the optimizer's dtype. The same prompts
    with the same limits then compile nothing: `compile_seconds` is 0.

    Args:
      pair: target and drafter.
      prompts: strings, chat message lists or token-id lists.
      num_draft_tokens: K, 1 to 32.
      max_new_tokens: length of an answer at most, in place of the one in `params`.
      batch_size: prompts that are decoded together.
      params: greedy by default. Prompt i is sampled with seed + i, a seed of None counting as
        0, so that prompts share no noise and evaluations repeat.
      categories: one for each prompt, for `by_category`.
      progress: called with (prompts done, prompts) after each batch.
      method: None = the drafter's own.

    Raises:
      InputError: no drafter, no prompts, or a bad value; before anything is compiled.
    """
    if pair.drafter is None:
        raise InputError("drafter: found none, expected one whose drafts can be counted")
    check_num_draft_tokens(num_draft_tokens)
    if categories is not None and len(categories) != len(prompts):
        raise InputError(
            f"categories: found {len(categories)}, expected one for each of the "
            f"{len(prompts)} prompts"
        )
    speculator = Speculator(
        pair.target,
        pair.drafter,
        method or pair.drafter.method,
        num_draft_tokens,
        dtype=pair.dtype,
    )
    outputs, total = _decode(
        pair, speculator, prompts, max_new_tokens, batch_size, params, progress
    )
    groups: dict[str, list[GenerationStats]] = {}
    for category, output in zip(categories or (), outputs, strict=categories is not None):
        groups.setdefault(category, []).append(output.stats)
    return AcceptanceReport(
        **_counts([output.stats for output in outputs]),
        by_category={name: Acceptance(**_counts(parts)) for name, parts in groups.items()},
        seconds=total.seconds,
        compile_seconds=total.compile_seconds,
        outputs=tuple(outputs),
    )


def decoded_plainly(
    pair: Pair,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int,
    batch_size: int,
    params: SamplingParams | None = None,
    progress: Progress | None = None,
) -> tuple[list[Output], GenerationStats]:
    """The same prompts without drafts: the answers that those of `decoded_acceptance` must
    equal, sampled ones too, and their total, for the speed. Arguments as there."""
    speculator = Speculator(pair.target, dtype=pair.dtype)
    return _decode(pair, speculator, prompts, max_new_tokens, batch_size, params, progress)


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first token where two answers part, None if they are the same."""
    if list(one) == list(other):
        return None
    same = (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(same, min(len(one), len(other)))


def standard_error(drafts: Sequence[int], accepted: Sequence[int]) -> float | None:
    """Standard error of accepted / drafts, pooled over prompts; one entry a prompt.

    Prompts are what is drawn at random, not drafts: those of one answer are alike. The ratio
    of two sums is linearised around its value (the usual estimate for cluster samples). With
    a handful of prompts it is itself rough. None for fewer than two prompts with drafts.
    """
    d, a = np.asarray(drafts, np.float64), np.asarray(accepted, np.float64)
    count = len(d)
    if np.count_nonzero(d) < 2:
        return None
    residuals = a - d * (a.sum() / d.sum())
    return math.sqrt(count / (count - 1) * float(residuals @ residuals)) / float(d.sum())


def _decode(
    pair: Pair,
    speculator: Speculator,
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    batch_size: int,
    params: SamplingParams | None,
    progress: Progress | None,
) -> tuple[list[Output], GenerationStats]:
    if not prompts:
        raise InputError("prompts: found none, expected at least one")
    base = params or SamplingParams()
    each = [
        dataclasses.replace(
            base, max_new_tokens=max_new_tokens, seed=((base.seed or 0) + index) % 2**32
        )
        for index in range(len(prompts))
    ]
    requests = batching.make_requests(pair.tokenizer, pair.target, prompts, each)
    return runner.run_requests(pair, speculator, requests, batch_size, progress)


def _counts(parts: Sequence[GenerationStats]) -> dict[str, Any]:
    """The fields of `Acceptance` for some prompts."""
    total = GenerationStats.total(parts, seconds=0.0, compile_seconds=0.0)
    return {
        "prompts": len(parts),
        "tokens": total.tokens,
        "drafts": total.num_drafts,
        "accepted_per_position": total.accepted_per_position,
        "standard_error": standard_error(
            [part.num_drafts for part in parts], [part.num_accepted for part in parts]
        ),
    }
