"""Distil a target: it answers prompts, and its answers are what a drafter is trained on."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path

from peagle_jax.commands.options import (
    add_batch_size,
    add_model,
    add_raw,
    add_sampling,
    sampling_params,
)
from peagle_jax.commands.progress import progress_bar
from peagle_jax.commands.prompts import read_records
from peagle_jax.errors import InputError

HELP = "let a target answer prompts: training text for a drafter"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `peagle distill`."""
    add_model(parser)
    parser.add_argument(
        "--prompts", type=Path, metavar="FILE.jsonl", help="prompts to answer (see peagle generate)"
    )
    parser.add_argument(
        "--self-prompt",
        type=int,
        default=0,
        metavar="N",
        help="also answer N prompts that the target invents itself",
    )
    parser.add_argument(
        "--given",
        action="store_true",
        help="take each prompt's answer from the file, key `answer`, instead of the target's",
    )
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="D",
        help="folder of the answers; where it exists the run goes on",
    )
    parser.add_argument("--limit", type=int, metavar="N", help="only the file's first N prompts")
    add_raw(parser)
    add_batch_size(parser, 32)
    add_sampling(parser.add_argument_group("sampling"), max_new_tokens=256, seed=0)
    parser.add_argument("--json", action="store_true", help="print the statistics as JSON")


def run(args: argparse.Namespace) -> int:
    """Answers what is missing in the folder."""
    params = sampling_params(args)
    for option, found, least in (
        ("--self-prompt", args.self_prompt, 0),
        ("--batch-size", args.batch_size, 1),
        ("--limit", 1 if args.limit is None else args.limit, 1),
    ):
        if found < least:
            raise InputError(f"{option}: found {found}, expected {least} or more")
    if args.prompts is None and not args.self_prompt:
        raise InputError("--prompts and --self-prompt: found neither, expected one or both")
    if args.given and (args.prompts is None or args.self_prompt):
        raise InputError("--given: found no --prompts alone, expected a file of answered prompts")
    records = read_records(args.prompts)[: args.limit] if args.prompts else []
    given = [record.answer or "" for record in records]
    for number, answer in enumerate(given, start=1):
        if args.given and not answer.strip():
            raise InputError(
                f"{args.prompts}: prompt {number}: answer: found none, or an empty one, expected "
                "text with --given"
            )

    from peagle_jax import api
    from peagle_jax.training.distill import Question, distill, self_prompts
    from peagle_jax.training.given import take_answers

    questions = [Question(r.id, r.prompt, r.source or "", r.category or "") for r in records]
    questions += self_prompts(args.self_prompt)
    pair = api.load(target=args.model, drafter=None, dtype=args.dtype)
    with progress_bar("prompts") as progress:
        if args.given:
            done = take_answers(
                pair,
                questions,
                given,
                args.out,
                model=args.model,
                raw=args.raw,
                progress=progress,
            )
        else:
            done = distill(
                pair,
                questions,
                args.out,
                model=args.model,
                params=params,
                batch_size=args.batch_size,
                raw=args.raw,
                progress=progress,
            )
    if args.json:
        print(json.dumps(dataclasses.asdict(done)))
    print(done.line(), file=sys.stderr)
    return 0
