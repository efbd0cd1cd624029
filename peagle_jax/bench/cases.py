"""What is timed: a way to decode at a number of drafts and a batch size, and what came of it."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from peagle_jax.config import METHODS, check_num_draft_tokens
from peagle_jax.errors import InputError

OWN = "peagle_jax"
# This package too, by continuous batching: what `peagle batch` does.
BATCHING = "peagle_batch"
OURS = (OWN, BATCHING)
AUTO = "auto"
# Peers and the methods each is asked to decode with.
PEER_METHODS = {
    BATCHING: METHODS,
    "transformers": ("none", "prompt-lookup"),
    "vllm": ("none", "p-eagle", "eagle3", "prompt-lookup"),
    "llama.cpp": ("none", "prompt-lookup"),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One way to decode. `num_draft_tokens` is 0 exactly where `method` is "none"; "auto" where
    each step chooses."""

    peer: str
    method: str
    num_draft_tokens: int | str
    batch: int

    @property
    def name(self) -> str:
        """Short and unique."""
        drafts = f" K={self.num_draft_tokens}" if self.num_draft_tokens else ""
        return f"{self.peer} {self.method}{drafts} batch {self.batch}"

    @property
    def reference(self) -> Case:
        """The plain decoding that its answers must equal: batch is the same, so that programs
        are of like shapes."""
        return Case(OWN, "none", 0, self.batch)


@dataclasses.dataclass(frozen=True)
class Run:
    """All prompts decoded once in one way.

    token_ids: an answer for each prompt, in the prompts' order.
    seconds: wall time, prefill included; compilation, loading and tokenization not.
    drafts, accepted_per_position: verifications with drafts, and how many of them accepted
      the draft at each position; 0 and () where nothing is drafted or a peer does not tell.
    steps: times that the target ran after prefill, 0 where a peer does not tell.
    prefill_seconds: the part of `seconds` before the first step, None where it is not known.
    """

    token_ids: Sequence[Sequence[int]]
    seconds: float
    drafts: int = 0
    accepted_per_position: tuple[int, ...] = ()
    steps: int = 0
    prefill_seconds: float | None = None

    @property
    def tokens(self) -> int:
        """Generated tokens."""
        return sum(map(len, self.token_ids))

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens over wall time."""
        return self.tokens / self.seconds


@dataclasses.dataclass(frozen=True)
class Parts:
    """Milliseconds of a step's parts, each timed alone as a program of its own; medians."""

    draft_ms: float
    verify_ms: float


@dataclasses.dataclass
class Measurement:
    """A case and its repeats; `parts` None where they were not timed."""

    case: Case
    runs: list[Run] = dataclasses.field(default_factory=list)
    parts: Parts | None = None
    compile_seconds: float = 0.0
    error: str | None = None

    def to_json(self, reference: Measurement | None) -> dict[str, Any]:
        """A line of results.jsonl; `identical` counts prompts whose answer is the reference's."""
        line: dict[str, Any] = {
            "method": self.case.method,
            "peer": self.case.peer,
            "num_draft_tokens": self.case.num_draft_tokens,
            "batch": self.case.batch,
        }
        if self.error is not None or not self.runs:
            return line | {"error": self.error or "not run"}
        last, speeds = self.runs[-1], [run.tokens_per_second for run in self.runs]
        accepted = last.accepted_per_position
        drafted = last.drafts > 0
        line |= {
            "tokens_per_second": statistics.median(speeds),
            "tokens_per_second_repeats": speeds,
            "tokens": last.tokens,
            "prompts": len(last.token_ids),
            "acceptance_length": 1 + sum(accepted) / last.drafts if drafted else None,
            "acceptance_per_position": [a / last.drafts for a in accepted] if drafted else None,
            "compile_seconds": self.compile_seconds,
        }
        line |= self._times()
        if reference is not None and reference.runs:
            expected = reference.runs[-1].token_ids
            line["identical"] = sum(
                list(a) == list(b) for a, b in zip(last.token_ids, expected, strict=True)
            )
            line["speedup"] = statistics.median(
                run.tokens_per_second / plain.tokens_per_second
                for run, plain in zip(self.runs, reference.runs, strict=False)
            )
        return line

    def _times(self) -> dict[str, float | None]:
        known = [run for run in self.runs if run.prefill_seconds is not None and run.steps]
        if not known:
            return dict.fromkeys(TIMES)
        step = statistics.median(
            1e3 * (run.seconds - (run.prefill_seconds or 0.0)) / run.steps for run in known
        )
        prefill = statistics.median(1e3 * (run.prefill_seconds or 0.0) for run in known)
        times: dict[str, float | None] = {"step_ms": step, "prefill_ms": prefill}
        if self.parts is None:
            return times | {"draft_ms": None, "verify_ms": None, "other_ms": None}
        draft, verify = self.parts.draft_ms, self.parts.verify_ms
        return times | {
            "draft_ms": draft,
            "verify_ms": verify,
            "other_ms": step - draft - verify,
        }


TIMES = ("step_ms", "prefill_ms", "draft_ms", "verify_ms", "other_ms")


def make_cases(
    methods: Sequence[str],
    numbers_of_drafts: Sequence[int | str],
    batches: Sequence[int],
    peers: Iterable[str] = (),
) -> list[Case]:
    """All combinations that make sense, plain decoding of this package always among them.

    Raises InputError for an unknown method or peer, or a bad number.
    """
    for method in methods:
        if method not in METHODS:
            raise InputError(f"--methods: found {method!r}, expected some of {', '.join(METHODS)}")
    for k in numbers_of_drafts:
        if isinstance(k, int):
            check_num_draft_tokens(k)
    for batch in batches:
        if batch < 1:
            raise InputError(f"--batch: found {batch}, expected 1 or more")
    ways: list[tuple[str, str]] = [(OWN, method) for method in ("none", *methods)]
    for peer in peers:
        if peer not in PEER_METHODS:
            known = ", ".join(PEER_METHODS)
            raise InputError(f"--peers: found {peer!r}, expected some of {known}")
        ways += [(peer, method) for method in methods if method in PEER_METHODS[peer]]
    cases = []
    for batch in batches:
        for peer, method in ways:
            for k in (0,) if method == "none" else numbers_of_drafts:
                case = Case(peer, method, k, batch)
                if case not in cases and (peer in OURS or k != AUTO):
                    cases.append(case)
    return cases
