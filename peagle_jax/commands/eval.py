"""Measure a drafter: acceptance length and acceptance by position, from real decoding."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path

from peagle_jax.commands.options import (
    add_batch_size,
    add_drafter,
    add_model,
    add_weights,
    make_folder,
    numbers,
)
from peagle_jax.commands.progress import progress_bar
from peagle_jax.commands.prompts import read_records
from peagle_jax.config import (
    METHODS,
    SamplingParams,
    check_num_draft_tokens,
    needs_drafter,
)
from peagle_jax.errors import InputError

HELP = "measure a drafter's acceptance length on prompts"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `peagle eval`."""
    models = parser.add_argument_group("models")
    add_model(models)
    add_weights(models)
    add_drafter(models)
    models.add_argument(
        "--method",
        choices=tuple(method for method in METHODS if needs_drafter(method)),
        help="how to draft (the drafter's own)",
    )

    prompts = parser.add_argument_group("prompts")
    prompts.add_argument(
        "--prompts",
        type=Path,
        required=True,
        metavar="FILE.jsonl",
        help="one a line, with or without the keys id and category",
    )
    prompts.add_argument("--limit", type=int, metavar="N", help="only the first N prompts")

    decoding = parser.add_argument_group("decoding")
    decoding.add_argument(
        "--num-draft-tokens",
        metavar="K",
        help="drafts a step; several, as in 1,3,5,8, one after the other (what the drafter was "
        "trained for, 5 where it does not say)",
    )
    decoding.add_argument(
        "--max-new-tokens",
        type=int,
        default=128,
        metavar="INT",
        help="end an answer after this many tokens (%(default)s)",
    )
    decoding.add_argument(
        "--temperature", type=float, default=0.0, metavar="FLOAT", help="0 = greedy (%(default)s)"
    )
    decoding.add_argument(
        "--seed", type=int, default=0, metavar="INT", help="of the first prompt (%(default)s)"
    )
    add_batch_size(decoding, 8)
    decoding.add_argument(
        "--check-identical",
        action="store_true",
        help="decode without drafts too, and compare the answers and the speed",
    )

    output = parser.add_argument_group("output")
    output.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="write results.json, results.md and acceptance.png here",
    )
    output.add_argument("--no-plot", action="store_true", help="leave acceptance.png out")
    output.add_argument(
        "--json", action="store_true", help="print one JSON object instead of the table"
    )


def run(args: argparse.Namespace) -> int:
    """Measures and prints. All that needs no model is checked before one is loaded."""
    params = SamplingParams(
        max_new_tokens=args.max_new_tokens, temperature=args.temperature, seed=args.seed
    )
    depths = _numbers_of_drafts(args.num_draft_tokens) if args.num_draft_tokens is not None else []
    for option, value in (("--batch-size", args.batch_size), ("--limit", args.limit)):
        if value is not None and value < 1:
            raise InputError(f"{option}: found {value}, expected 1 or more")
    records = read_records(args.prompts)[: args.limit]
    if args.out is not None:
        if not args.no_plot and importlib.util.find_spec("matplotlib") is None:
            raise InputError(
                "--out: found no matplotlib, which draws acceptance.png; expected it from "
                "pip install 'peagle-jax[train]', or --no-plot"
            )
        make_folder("--out", args.out)

    from peagle_jax import api
    from peagle_jax.commands import eval_output
    from peagle_jax.files import replace_file
    from peagle_jax.training import evaluate

    if args.drafter == "auto" and args.model not in api.SHIPPED_DRAFTERS:
        raise InputError(
            f"--drafter: found none, expected one, as none ships for the model {args.model!r}"
        )
    pair = api.load(target=args.model, drafter=args.drafter, dtype=args.dtype, weights=args.weights)
    speculator = api.make_speculator(pair, args.method)
    method, depths = speculator.method, depths or [speculator.num_draft_tokens]

    prompts = [record.prompt for record in records]
    categories = None
    if any(record.category is not None for record in records):
        categories = [record.category or "uncategorised" for record in records]
    reports = {}
    for depth in depths:
        with progress_bar(f"K = {depth}") as progress:
            reports[depth] = evaluate.decoded_acceptance(
                pair,
                prompts,
                num_draft_tokens=depth,
                max_new_tokens=args.max_new_tokens,
                batch_size=args.batch_size,
                params=params,
                categories=categories,
                progress=progress,
                method=method,
            )
        api.warn_if_nothing_accepted(reports[depth].outputs)
    plain = None
    if args.check_identical:
        with progress_bar("without drafts") as progress:
            plain = eval_output.Plain(
                *evaluate.decoded_plainly(
                    pair,
                    prompts,
                    max_new_tokens=args.max_new_tokens,
                    batch_size=args.batch_size,
                    params=params,
                    progress=progress,
                )
            )

    settings = {
        "model": args.model,
        "drafter": args.model if args.drafter == "auto" else args.drafter,
        "method": method,
        "dtype": pair.dtype,
        "weights": args.weights,
        "prompts": str(args.prompts),
        "limit": args.limit,
        "max_new_tokens": args.max_new_tokens,
        "temperature": args.temperature,
        "seed": args.seed,
        "batch_size": args.batch_size,
        **eval_output.environment(),
    }
    evaluation = eval_output.Evaluation(settings, records, reports, plain)
    if args.json:
        print(json.dumps(evaluation.to_json(), ensure_ascii=False))
    else:
        eval_output.print_tables(evaluation)
    print("\n".join(evaluation.summary()), file=sys.stderr, flush=True)
    if args.out is not None:
        eval_output.write_files(evaluation, args.out)
        if not args.no_plot:
            from peagle_jax.commands.eval_plot import draw

            replace_file(args.out / "acceptance.png", draw(reports))
    return 0


def _numbers_of_drafts(text: str) -> list[int]:
    """The values of K in "1,3,5", ascending, each once."""
    depths = numbers("--num-draft-tokens", text)
    for depth in depths:
        check_num_draft_tokens(depth)
    return depths
