#!/usr/bin/env python3
"""Checks on the real model that drafting never changes a token, and prints what it found.

    .venv/bin/python scripts/check_lossless.py        the whole matrix: hours on two cores
    .venv/bin/python scripts/check_lossless.py --limit 4 --num-draft-tokens 5 --batch-sizes 8
    .venv/bin/python scripts/check_lossless.py --vllm-reference  against recorded answers of vLLM

The matrix: SmolLM2-135M-Instruct in float32 with the shipped P-EAGLE drafter, a random
P-EAGLE and a random EAGLE-3 drafter, each K, each batch size, greedy and sampled (temperature
0.7 and 1.0, with and without top-k, top-p and min-p, both draft modes), against plain decoding
with the same seeds. Ends with 1 on any difference, each shown with the gap between the two best
scores where it begins: a near-tie is decided by rounding, anything else is a fault.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

import peagle_jax as pj
from peagle_jax.batching import Batch, Request
from peagle_jax.commands.progress import progress_bar
from peagle_jax.config import SamplingParams
from peagle_jax.decoding import sampling
from peagle_jax.models import drafter as drafter_network
from peagle_jax.models.cache import KVCache
from peagle_jax.models.decoder import Decoder
from peagle_jax.runner import Output, Pair
from peagle_jax.text import encode_prompt

GOLDENS = Path(__file__).resolve().parent.parent / "tests" / "goldens"
DRAFTERS = ("p-eagle", "p-eagle-random", "eagle3-random")
# Scores of order 10 in float32 differ by a few 1e-5 between program shapes.
NEAR_TIE = 1e-3
# Prompt i is sampled with entry i, cyclically.
FILTERS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.7},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 20},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 0.7, "top_k": 50, "top_p": 0.95, "min_p": 0.02},
    {"temperature": 1.0, "top_k": 50, "top_p": 0.9, "min_p": 0.02},
)


@dataclasses.dataclass(frozen=True)
class Cell:
    """One entry of the matrix."""

    drafter: str
    sampling: str  # "greedy" or "sampled"
    draft_sampling: str
    num_draft_tokens: int
    batch_size: int


@dataclasses.dataclass
class Outcome:
    """What a cell gave."""

    cell: Cell
    prompts: int
    tokens: int
    num_drafts: int
    acceptance_length: float
    seconds: float
    differences: list[dict[str, Any]]


def make_pairs(shipped: Pair) -> dict[str, Pair]:
    """The shipped drafter and two random ones; what is compiled is shared where configs agree."""
    assert shipped.drafter is not None
    eagle3 = dataclasses.replace(shipped.drafter, parallel=False, mask_token_id=None)
    pairs = {"p-eagle": shipped}
    for name, config in (("p-eagle-random", shipped.drafter), ("eagle3-random", eagle3)):
        tree = drafter_network.init(config, jax.random.key(0))
        if "draft_to_target" in tree:
            tree["draft_to_target"] = shipped.params["drafter"]["draft_to_target"]
        pairs[name] = dataclasses.replace(
            shipped, drafter=config, params={**shipped.params, "drafter": tree}
        )
    return pairs


def make_params(kind: str, count: int, max_new_tokens: int) -> list[SamplingParams]:
    """Sampling parameters of each prompt."""
    return [
        SamplingParams(
            max_new_tokens=max_new_tokens,
            seed=index,
            **(FILTERS[index % len(FILTERS)] if kind == "sampled" else {}),
        )
        for index in range(count)
    ]


def first_difference(
    pair: Pair, ids: Sequence[int], params: SamplingParams, expected: Output, found: Output
) -> dict[str, Any] | None:
    """Where two answers part, and the gap between the two best scores there."""
    one, other = expected.token_ids, found.token_ids
    if one == other:
        return None
    at = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), -1)
    if at < 0:
        at = min(len(one), len(other))
        return {"at": at, "lengths": [len(one), len(other)], "gap": None, "verdict": "fault"}
    tokens = [*ids, *one[:at]]
    # The scores that plain decoding took the argmax of: processed logits plus noise.
    network, variables = Decoder(pair.target), {"params": pair.params["target"]}
    cache = KVCache.init(pair.target.block, 1, len(tokens), jnp.float32)
    rows = jnp.asarray([tokens], jnp.int32)
    hidden = network.apply(variables, rows, jnp.zeros(1, jnp.int32), cache).hidden[:, -1:]
    logits = network.apply(variables, hidden, method="logits")
    table = Batch((Request(0, (0,), params),), 1, 1, 1).arrays()[2]
    position = jnp.asarray([[len(tokens)]])
    noise = sampling.gumbel_noise(table, position, pair.target.vocab_size)
    scores = np.sort(np.asarray(sampling.process_logits(logits, table) + noise)[0, 0])
    gap = float(scores[-1] - scores[-2])
    verdict = "near-tie" if gap < NEAR_TIE else "fault"
    return {"at": at, "tokens": [one[at], other[at]], "gap": gap, "verdict": verdict}


def run_matrix(
    shipped: Pair,
    prompts: list[str],
    *,
    num_draft_tokens: Sequence[int],
    batch_sizes: Sequence[int],
    max_new_tokens: int,
    drafters: Sequence[str] = DRAFTERS,
    kinds: Sequence[str] = ("greedy", "sampled"),
    draft_sampling: Sequence[str] = ("sample", "greedy"),
    on_outcome: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Every cell against plain decoding; `on_outcome` is called as each is done. A greedy
    request's drafts are argmaxes in either mode: it runs in the first one alone."""
    cells = [
        Cell(drafter, kind, mode, k, batch_size)
        for drafter in drafters
        for kind in kinds
        for mode in (draft_sampling if kind == "sampled" else draft_sampling[:1])
        for k in num_draft_tokens
        for batch_size in batch_sizes
    ]
    ids = [encode_prompt(shipped.tokenizer, prompt, raw=False) for prompt in prompts]
    pairs = make_pairs(shipped)
    params = {kind: make_params(kind, len(prompts), max_new_tokens) for kind in kinds}
    total, outcomes = (len(kinds) + len(cells)) * len(prompts), []
    with progress_bar("Prompts") as report:
        done = 0

        def generate(pair: Pair, kind: str, **options: Any) -> list[Output]:
            nonlocal done
            base = done
            progress = report and (lambda finished, _: report(base + finished, total))
            outputs = pj.generate(pair, ids, params[kind], progress=progress, **options)
            done += len(ids)
            return outputs

        widest = max(batch_sizes)
        plain = {k: generate(shipped, k, method="none", batch_size=widest) for k in kinds}
        for cell in cells:
            pair = pairs[cell.drafter]
            outputs = generate(
                pair,
                cell.sampling,
                num_draft_tokens=cell.num_draft_tokens,
                draft_sampling=cell.draft_sampling,
                batch_size=cell.batch_size,
            )
            outcomes.append(compare(pair, cell, ids, params, plain, outputs))
            pair.compiled.clear()  # the programs of a whole matrix do not fit one process
            on_outcome(outcomes[-1])
    return outcomes


def compare(
    pair: Pair,
    cell: Cell,
    ids: list[list[int]],
    params: dict[str, list[SamplingParams]],
    plain: dict[str, list[Output]],
    outputs: list[Output],
) -> Outcome:
    """A cell's answers against plain decoding's."""
    differences = []
    rows = zip(ids, params[cell.sampling], plain[cell.sampling], outputs, strict=True)
    for index, row in enumerate(rows):
        difference = first_difference(pair, *row)
        if difference:
            differences.append({"prompt": index, **difference})
    drafts = sum(o.stats.num_drafts for o in outputs)
    accepted = sum(o.stats.num_accepted for o in outputs)
    # A batch's time counts for each request in it.
    seconds = sum(o.stats.seconds for o in outputs) / cell.batch_size
    tokens = sum(len(o.token_ids) for o in outputs)
    length = 1 + accepted / max(drafts, 1)
    return Outcome(cell, len(ids), tokens, drafts, length, seconds, differences)


def check_vllm_reference(shipped: Pair, limit: int, batch_size: int = 1) -> list[dict[str, Any]]:
    """Differences from vLLM's recorded tokens, drafts and accepted drafts a position, prompt by
    prompt: greedy, float32, the shipped drafter, K = 5."""
    recorded = json.loads((GOLDENS / "vllm_reference.json").read_text())["p_eagle_k5"]
    summary, answers = recorded["summary"], recorded["prompts"][:limit]
    by_id = {row["id"]: row["prompt"] for row in read_rows(GOLDENS / "eval_prompts.jsonl")}
    with progress_bar("Prompts") as report:
        outputs = pj.generate(
            shipped,
            [by_id[answer["id"]] for answer in answers],
            SamplingParams(max_new_tokens=summary["max_tokens"]),
            num_draft_tokens=summary["num_draft_tokens"],
            batch_size=batch_size,
            progress=report,
        )
    differences = []
    for answer, output in zip(answers, outputs, strict=True):
        found = {
            "token_ids": output.token_ids,
            "prompt_tokens": output.prompt_tokens,
            "finish_reason": output.finish_reason,
            "num_drafts": output.stats.num_drafts,
            "num_accepted": output.stats.num_accepted,
            "accepted_per_position": list(output.stats.accepted_per_position),
        }
        for key, value in found.items():
            if value != answer[key]:
                differences.append(
                    {"id": answer["id"], "what": key, "vllm": answer[key], "found": value}
                )
    return differences


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file."""
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def print_outcomes(outcomes: list[Outcome]) -> None:
    """The table, then every difference."""
    table = Table("drafter", "requests", "drafts by", "K", "batch", "tokens", "acceptance length")
    table.add_column("seconds")
    table.add_column("differences")
    for o in outcomes:
        c = o.cell
        mode = "argmax" if "greedy" in (c.draft_sampling, c.sampling) else "sampling"
        numbers = (c.num_draft_tokens, c.batch_size, o.tokens, f"{o.acceptance_length:.2f}")
        table.add_row(
            *(c.drafter, c.sampling, mode, *map(str, numbers)),
            *(f"{o.seconds:.0f}", str(len(o.differences) or "none")),
        )
    console = Console()
    console.print(table)
    for o in outcomes:
        for d in o.differences:
            console.print(f"{o.cell}: {d}")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--prompts", type=Path, default=GOLDENS / "eval_prompts.jsonl", metavar="FILE.jsonl")
    add("--limit", type=int, default=40, help="prompts (default 40; 20 with --vllm-reference)")
    add("--max-new-tokens", type=int, default=128)
    add("--num-draft-tokens", type=int, nargs="+", default=[1, 3, 5, 8], metavar="K")
    add("--batch-sizes", type=int, nargs="+", default=[1, 8], metavar="B")
    add("--drafters", nargs="+", choices=DRAFTERS, default=list(DRAFTERS))
    add("--requests", nargs="+", choices=("greedy", "sampled"), default=["greedy", "sampled"])
    add("--draft-sampling", nargs="+", choices=("sample", "greedy"), default=["sample", "greedy"])
    add("--vllm-reference", action="store_true", help="compare with vLLM's recorded answers alone")
    add("--json", action="store_true", help="one JSON object a cell, as each is done")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """0 without a difference, 1 with one."""
    options = parse(argv)
    shipped = pj.load("smollm2", dtype="float32")
    if options.vllm_reference:
        differences = check_vllm_reference(shipped, options.limit, max(options.batch_sizes))
        for difference in differences:
            print(json.dumps(difference))
        if not differences:
            print("Tokens, drafts and accepted drafts equal vLLM's, prompt by prompt.")
        return int(bool(differences))
    prompts = [row["prompt"] for row in read_rows(options.prompts)][: options.limit]

    def as_json(outcome: Outcome) -> None:
        print(json.dumps(dataclasses.asdict(outcome)), flush=True)

    outcomes = run_matrix(
        shipped,
        prompts,
        num_draft_tokens=options.num_draft_tokens,
        batch_sizes=options.batch_sizes,
        max_new_tokens=options.max_new_tokens,
        drafters=options.drafters,
        kinds=options.requests,
        draft_sampling=options.draft_sampling,
        **({"on_outcome": as_json} if options.json else {}),
    )
    if not options.json:
        print_outcomes(outcomes)
    return int(any(outcome.differences for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
