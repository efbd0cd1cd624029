"""Convert a PyTorch-side checkpoint to Orbax, or a drafter back to what vLLM loads."""

from __future__ import annotations

import argparse
from pathlib import Path

from peagle_jax.commands.progress import progress_bar
from peagle_jax.errors import InputError

HELP = "convert a checkpoint to Orbax, or back to vLLM's layout"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `peagle convert`."""
    parser.add_argument(
        "source", metavar="SRC", nargs="?", help="a folder, file, name or hub repository"
    )
    parser.add_argument("out", metavar="OUT", nargs="?", type=Path, help="the folder to make")
    parser.add_argument(
        "--to",
        choices=("orbax", "vllm"),
        default="orbax",
        help="vllm = config.json and model.safetensors (%(default)s)",
    )
    parser.add_argument("--target", help="check a drafter against this target")
    parser.add_argument(
        "--check",
        metavar="REPO_CONFIG",
        help="convert nothing: hold names and shapes, of SRC where it is given, against a "
        "released repository's manifest, a manifest, a config.json or a folder with one",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="dtype of the weights written (the checkpoint's own)",
    )
    parser.add_argument(
        "--aux-layer-shift",
        type=int,
        choices=(0, 1),
        default=0,
        help="1 = the drafter's layer ids are meant as SGLang takes them (%(default)s)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace OUT if it is there")


def run(args: argparse.Namespace) -> int:
    """Converts and prints the folder that was written, or checks."""
    if args.check is not None:
        return _check(args)
    if args.source is None or args.out is None:
        raise InputError("convert: found no SRC and OUT, expected both (or --check REPO_CONFIG)")
    from peagle_jax.convert.conversion import convert

    with progress_bar("convert", in_bytes=True) as report:
        folder = convert(
            args.source,
            args.out,
            target=args.target,
            dtype=args.dtype,
            to=args.to,
            overwrite=args.overwrite,
            aux_layer_shift=args.aux_layer_shift,
            progress=None if report is None else lambda _, done, total: report(done, total),
        )
    print(folder)
    return 0


def _check(args: argparse.Namespace) -> int:
    from peagle_jax.convert import differences
    from peagle_jax.convert.checking import check

    if args.out is not None:
        raise InputError("convert: found OUT beside --check, expected nothing to write to")
    report = check(args.check, args.source, target=args.target)
    width = max(len(label) for label, _ in report.facts)
    for label, text in report.facts:
        print(f"{label:<{width}}  {text}")
    if report.differences:
        print(*differences.table(report.differences), sep="\n")
    if report.problems:
        raise InputError("; ".join(report.problems))
    if not report.passed:
        raise InputError(f"{args.source or args.check}: found the differences above, expected none")
    return 0
