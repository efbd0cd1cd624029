"""Generate text with speculative decoding: the target's own output, in fewer steps."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

from peagle_jax.commands.prompts import Prompt, read_prompts
from peagle_jax.config import (
    METHODS,
    DraftSampling,
    SamplingParams,
    Verification,
    check_num_draft_tokens,
)
from peagle_jax.errors import InputError

HELP = "generate text with speculative decoding"

# Fewer drafts than these without an accepted token prove nothing about a drafter.
WARN_AFTER_DRAFTS = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `peagle generate`."""
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="one prompt (a user's turn)")
    parser.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE.jsonl",
        help="many prompts: strings, or objects with prompt, messages or token_ids",
    )
    parser.add_argument(
        "--raw", action="store_true", help="give the prompt as it is, without the chat template"
    )

    models = parser.add_argument_group("models")
    models.add_argument(
        "--model", default="smollm2", help="target: a name, folder or hub repository (%(default)s)"
    )
    models.add_argument("--drafter", help="drafter: a folder or hub repository (the model's own)")
    models.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="dtype of weights and activations (float32 on CPU, bfloat16 on TPU and GPU)",
    )

    drafting = parser.add_argument_group("drafting")
    drafting.add_argument(
        "--method", choices=METHODS, default="p-eagle", help="none = plain decoding (%(default)s)"
    )
    drafting.add_argument(
        "--num-draft-tokens", type=int, default=5, metavar="K", help="drafts a step (%(default)s)"
    )
    drafting.add_argument(
        "--draft-sampling",
        choices=get_args(DraftSampling),
        default="sample",
        help="how drafts are chosen above temperature 0 (%(default)s)",
    )
    drafting.add_argument(
        "--verify",
        choices=get_args(Verification),
        default="coupled",
        help="coupled = the same tokens as plain sampling with that seed (%(default)s)",
    )
    drafting.add_argument(
        "--batch-size", type=int, default=1, metavar="N", help="prompts at a time (%(default)s)"
    )

    defaults = SamplingParams()
    sampling = parser.add_argument_group("sampling")
    for option, kind, text in (
        ("temperature", float, "0 = greedy"),
        ("top-k", int, "keep the k likeliest tokens, 0 = all"),
        ("top-p", float, "keep the likeliest tokens that reach this probability"),
        ("min-p", float, "drop tokens under this fraction of the likeliest"),
        ("max-new-tokens", int, "end after this many tokens"),
    ):
        sampling.add_argument(
            f"--{option}",
            type=kind,
            default=getattr(defaults, option.replace("-", "_")),
            metavar=kind.__name__.upper(),
            help=f"{text} (%(default)s)",
        )
    sampling.add_argument("--seed", type=int, metavar="INT", help="makes sampling repeatable")
    sampling.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before it; repeatable"
    )

    output = parser.add_mutually_exclusive_group()
    output.add_argument("--stream", action="store_true", help="print the text as it comes")
    output.add_argument("--json", action="store_true", help="print one JSON object a prompt")


def run(args: argparse.Namespace) -> int:
    """Answers the prompts. All that needs no model is checked before one is loaded."""
    params = SamplingParams(
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        seed=args.seed,
        stop=tuple(args.stop),
    )
    check_num_draft_tokens(args.num_draft_tokens)
    if args.batch_size < 1:
        raise InputError(f"--batch-size: found {args.batch_size}, expected 1 or more")
    if (args.prompt is None) == (args.prompts is None):
        found = "neither" if args.prompt is None else "both"
        raise InputError(f"PROMPT and --prompts: found {found}, expected exactly one")
    prompts = [args.prompt] if args.prompts is None else read_prompts(args.prompts)

    from peagle_jax import api

    pair = api.load(target=args.model, drafter=args.drafter, dtype=args.dtype)
    options: dict[str, Any] = {
        "method": args.method,
        "num_draft_tokens": args.num_draft_tokens,
        "draft_sampling": args.draft_sampling,
        "verify": args.verify,
        "raw": args.raw,
    }
    if args.stream:
        outputs = [_print_stream(api.stream(pair, prompt, params, **options)) for prompt in prompts]
    else:
        with _progress_bar(prompts) as progress:
            outputs = api.generate(
                pair, prompts, params, batch_size=args.batch_size, progress=progress, **options
            )
        for output in outputs:
            if args.json:
                print(json.dumps(as_json(output), ensure_ascii=False))
            else:
                print(output.text, flush=True)
                _print_statistics(output)
    _warn_if_nothing_is_accepted(outputs)
    return 0


def as_json(output: Any) -> dict[str, Any]:
    """What `--json` prints for one prompt, in plain Python values."""
    stats = output.stats
    return {
        "text": output.text,
        "token_ids": [int(token) for token in output.token_ids],
        "prompt_tokens": int(output.prompt_tokens),
        "finish_reason": output.finish_reason,
        "num_drafts": int(stats.num_drafts),
        "num_draft_tokens": int(stats.num_draft_tokens),
        "num_accepted": int(stats.num_accepted),
        "accepted_per_position": [int(count) for count in stats.accepted_per_position],
        "acceptance_length": float(stats.acceptance_length),
        "tokens_per_second": float(stats.tokens_per_second),
        "compile_seconds": float(stats.compile_seconds),
    }


def statistics_line(output: Any) -> str:
    """One readable line: tokens, speed and, where there were drafts, how many were accepted."""
    stats = output.stats
    parts = [f"{len(output.token_ids)} tokens", f"{stats.tokens_per_second:.1f} tokens/s"]
    if stats.num_drafts:
        counts = " ".join(str(count) for count in stats.accepted_per_position)
        parts.append(f"acceptance length {stats.acceptance_length:.2f}")
        parts.append(f"accepted per position {counts} of {stats.num_drafts}")
    parts.append(f"compiled in {stats.compile_seconds:.1f} s")
    return ", ".join(parts)


def _print_statistics(output: Any) -> None:
    print(statistics_line(output), file=sys.stderr, flush=True)


def _print_stream(pieces: Iterator[Any]) -> Any:
    """Prints text as it comes, then the statistics of the output that ends the stream."""
    for piece in pieces:
        if not isinstance(piece, str):
            print(flush=True)
            _print_statistics(piece)
            return piece
        print(piece, end="", flush=True)
    raise RuntimeError("the stream ended without an output")


@contextlib.contextmanager
def _progress_bar(prompts: list[Prompt]) -> Iterator[Callable[[int], None] | None]:
    """A bar on stderr for many prompts, told how many are done; None where it would be noise."""
    if len(prompts) == 1 or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    columns = ("prompts", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("prompts", total=len(prompts))
        yield lambda done: bar.update(task, completed=done)


def _warn_if_nothing_is_accepted(outputs: list[Any]) -> None:
    drafts = sum(output.stats.num_drafts for output in outputs)
    accepted = sum(output.stats.num_accepted for output in outputs)
    if drafts >= WARN_AFTER_DRAFTS and not accepted:
        print(
            f"peagle: warning: acceptance length 1.00: none of {drafts} drafts had a token "
            "accepted; is this drafter for this target?",
            file=sys.stderr,
        )
