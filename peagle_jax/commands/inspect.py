"""Tell what a checkpoint is, and whether it would load, without reading its weights."""

from __future__ import annotations

import argparse
import json

from peagle_jax.errors import InputError

HELP = "tell what a checkpoint is, without loading it"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `peagle inspect`."""
    parser.add_argument("source", metavar="SRC", help="a folder, file, name or hub repository")
    parser.add_argument("--target", help="check a drafter against this target")
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--tensors", action="store_true", help="list the tensors too")
    output.add_argument(
        "--json", action="store_true", help="print one JSON object, tensors included"
    )


def run(args: argparse.Namespace) -> int:
    """Prints what was found; a checkpoint that would not load is an error after that."""
    from peagle_jax.convert.inspection import inspect

    found = inspect(args.source, target=args.target)
    if args.json:
        print(json.dumps(found.to_json()))
    else:
        rows = [(label, text) for label, text in found.summary() if label != "problem"]
        width = max(len(label) for label, _ in rows)
        for label, text in rows:
            print(f"{label:<{width}}  {text}")
    if args.tensors:
        width = max((len(tensor.name) for tensor in found.tensors), default=0)
        for tensor in found.tensors:
            print(f"{tensor.name:<{width}}  {tensor.dtype:<6}  {list(tensor.shape)}")
    if found.problems:
        raise InputError("; ".join(found.problems))
    return 0
