"""Generate text with speculative decoding: the target's own output, in fewer steps."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peagle_jax.commands.options import (
    add_batch_size,
    add_drafter,
    add_drafting,
    add_model,
    add_raw,
    add_sampling,
    add_stop,
    add_weights,
    sampling_params,
)
from peagle_jax.commands.progress import progress_bar
from peagle_jax.commands.prompts import read_prompts
from peagle_jax.config import SamplingParams, check_num_draft_tokens, needs_drafter
from peagle_jax.errors import InputError
from peagle_jax.prompt_lines import check_text

if TYPE_CHECKING:
    from peagle_jax.api import Piece
    from peagle_jax.runner import Output

HELP = "generate text with speculative decoding"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `peagle generate`."""
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="one prompt (a user's turn)")
    parser.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE.jsonl",
        help="many prompts: strings, or objects with prompt, messages or token_ids",
    )
    add_raw(parser)

    models = parser.add_argument_group("models")
    add_model(models)
    add_weights(models)
    add_drafter(models)

    drafting = parser.add_argument_group("drafting")
    add_drafting(drafting)
    add_batch_size(drafting, 8)

    sampling = parser.add_argument_group("sampling")
    add_sampling(sampling, max_new_tokens=SamplingParams().max_new_tokens, seed=None)
    add_stop(sampling)

    output = parser.add_mutually_exclusive_group()
    output.add_argument("--stream", action="store_true", help="print the text as it comes")
    output.add_argument("--json", action="store_true", help="print one JSON object a prompt")


def run(args: argparse.Namespace) -> int:
    """Answers the prompts. All that needs no model is checked before one is loaded."""
    params = sampling_params(args, tuple(args.stop))
    if isinstance(args.num_draft_tokens, int):
        check_num_draft_tokens(args.num_draft_tokens)
    if args.batch_size < 1:
        raise InputError(f"--batch-size: found {args.batch_size}, expected 1 or more")
    if (args.prompt is None) == (args.prompts is None):
        found = "neither" if args.prompt is None else "both"
        raise InputError(f"PROMPT and --prompts: found {found}, expected exactly one")
    prompts: list[Any]
    if args.prompts is None:
        prompts, names = [args.prompt], ["PROMPT"]
        check_text(args.prompt, "PROMPT")
    else:
        prompts, names = read_prompts(args.prompts)

    from peagle_jax import api

    drafter = args.drafter if needs_drafter(args.method) else None
    pair = api.load(target=args.model, drafter=drafter, dtype=args.dtype, weights=args.weights)
    options: dict[str, Any] = {
        "method": args.method,
        "num_draft_tokens": args.num_draft_tokens,
        "draft_sampling": args.draft_sampling,
        "verify": args.verify,
        "raw": args.raw,
    }
    if args.stream:
        for prompt, name in zip(prompts, names, strict=True):
            _print_stream(api.stream(pair, prompt, params, name=name, **options))
        return 0
    bar = progress_bar("prompts") if len(prompts) > 1 else contextlib.nullcontext()
    with bar as progress:
        outputs = api.generate(
            pair,
            prompts,
            params,
            batch_size=args.batch_size,
            progress=progress,
            names=names,
            **options,
        )
    for output in outputs:
        if args.json:
            print(json.dumps(as_json(output), ensure_ascii=False))
        else:
            for part in output.parts:
                print(f"[{part.channel}]\n{part.text}", flush=True)
            if not output.parts:
                print(output.text, flush=True)
            _print_statistics(output)
    return 0


def as_json(output: Output) -> dict[str, Any]:
    """What `--json` prints for one prompt, in plain Python values."""
    stats = output.stats
    parts = [dataclasses.asdict(part) for part in output.parts]
    return {
        "text": output.text,
        **({"parts": parts} if parts else {}),
        "token_ids": output.token_ids,
        "prompt_tokens": output.prompt_tokens,
        "finish_reason": output.finish_reason,
        "num_drafts": stats.num_drafts,
        "num_draft_tokens": stats.num_draft_tokens,
        "num_accepted": stats.num_accepted,
        "accepted_per_position": list(stats.accepted_per_position),
        "acceptance_length": stats.acceptance_length,
        "tokens_per_second": stats.tokens_per_second,
        "compile_seconds": stats.compile_seconds,
    }


def _print_statistics(output: Output) -> None:
    print(output.stats.line(), file=sys.stderr, flush=True)


def _print_stream(pieces: Iterator[Piece | Output]) -> None:
    """Prints text as it comes, then the statistics of the output that ends the stream."""
    channel = None
    for piece in pieces:
        if isinstance(piece, str):
            if piece.channel != channel:
                channel = piece.channel
                print(f"[{channel}]")
            print(piece, end="", flush=True)
        else:
            print(flush=True)
            _print_statistics(piece)
