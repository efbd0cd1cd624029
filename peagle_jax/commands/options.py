"""Options that several commands have, declared once: `Group.add_argument` calls by name."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import get_args

from peagle_jax.config import METHODS, DraftSampling, SamplingParams, Verification, WeightForm
from peagle_jax.errors import InputError

# What add_argument makes: a parser, or a group of its options.
Options = argparse._ActionsContainer


def numbers(option: str, text: str) -> list[int]:
    """Those of "1,3,5", rising, each once; raises InputError naming the option."""
    try:
        return sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise InputError(
            f"{option}: found {text!r}, expected a number, or some as in 1,3,5"
        ) from None


def make_folder(option: str, folder: Path) -> None:
    """Makes what an option names; raises InputError naming it where that is no folder."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"{option}: {folder}: {error.strerror}, expected a folder to write"
        ) from None


def add_model(options: Options) -> None:
    """`--model` and `--dtype`: the target."""
    options.add_argument(
        "--model", default="smollm2", help="target: a name, folder or hub repository (%(default)s)"
    )
    options.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="dtype of weights and activations (float32 on CPU, bfloat16 on TPU and GPU)",
    )


def add_weights(options: Options) -> None:
    """`--weights`."""
    options.add_argument(
        "--weights",
        choices=get_args(WeightForm),
        default="full",
        help="of the target, in memory: mxfp4 keeps gpt-oss's experts packed, int8 rounds linear "
        "layers (%(default)s)",
    )


def add_drafter(options: Options) -> None:
    """`--drafter`."""
    options.add_argument(
        "--drafter",
        default="auto",
        help="drafter: a folder or hub repository (the one that ships for the model, if any)",
    )


def _number_of_drafts(text: str) -> int | str:
    return text if text == "auto" else int(text)


_number_of_drafts.__name__ = "number or auto"  # what argparse calls it


def add_drafting(options: Options) -> None:
    """`--method`, `--num-draft-tokens`, `--draft-sampling` and `--verify`."""
    options.add_argument(
        "--method",
        choices=METHODS,
        help="prompt-lookup drafts from the text's own past, +lookup asks it before the drafter, "
        "none = plain decoding (the drafter's own)",
    )
    options.add_argument(
        "--num-draft-tokens",
        type=_number_of_drafts,
        metavar="K",
        help="drafts a step; auto = as many as pay, perhaps none (what the drafter was trained "
        "for, 5 where it does not say)",
    )
    options.add_argument(
        "--draft-sampling",
        choices=get_args(DraftSampling),
        default="sample",
        help="how drafts are chosen above temperature 0 (%(default)s)",
    )
    options.add_argument(
        "--verify",
        choices=get_args(Verification),
        default="coupled",
        help="coupled = the same tokens as plain sampling with that seed (%(default)s)",
    )


def add_mesh(options: Options) -> None:
    """`--mesh`."""
    options.add_argument(
        "--mesh",
        metavar="AXES",
        help="devices a mesh axis, as in data=2,model=4: groups with requests of their own, and "
        "devices that share the weights; also expert (one device)",
    )


def add_hosts(options: Options) -> None:
    """`--coordinator`, `--num-processes`, `--process-id` and `--distributed`."""
    options.add_argument(
        "--distributed",
        action="store_true",
        help="one of several processes, which JAX finds: TPU slices, Slurm, MPI",
    )
    options.add_argument("--coordinator", metavar="HOST:PORT", help="where process 0 of several is")
    options.add_argument("--num-processes", type=int, metavar="N", help="how many there are")
    options.add_argument("--process-id", type=int, metavar="I", help="which one this is, from 0")


def add_stop(options: Options) -> None:
    """`--stop`."""
    options.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before it; repeatable"
    )


def add_raw(options: Options) -> None:
    """`--raw`."""
    options.add_argument(
        "--raw", action="store_true", help="give prompts as they are, without the chat template"
    )


def add_batch_size(options: Options, default: int) -> None:
    """`--batch-size`."""
    options.add_argument(
        "--batch-size",
        type=int,
        default=default,
        metavar="N",
        help="prompts at a time (%(default)s)",
    )


def add_sampling(options: Options, *, max_new_tokens: int, seed: int | None) -> None:
    """`--temperature`, the filters, `--max-new-tokens` and `--seed`, whose default may be
    None: drawn anew each time."""
    defaults = SamplingParams(max_new_tokens=max_new_tokens)
    for option, kind, text in (
        ("temperature", float, "0 = greedy"),
        ("top-k", int, "keep the k likeliest tokens, 0 = all"),
        ("top-p", float, "keep the likeliest tokens that reach this probability"),
        ("min-p", float, "drop tokens under this fraction of the likeliest"),
        ("max-new-tokens", int, "end after this many tokens"),
    ):
        options.add_argument(
            f"--{option}",
            type=kind,
            default=getattr(defaults, option.replace("-", "_")),
            metavar=kind.__name__.upper(),
            help=f"{text} (%(default)s)",
        )
    options.add_argument(
        "--seed", type=int, default=seed, metavar="INT", help="makes sampling repeatable"
    )


def sampling_params(args: argparse.Namespace, stop: tuple[str, ...] = ()) -> SamplingParams:
    """What `add_sampling`'s options ask for; raises InputError where they are out of range."""
    return SamplingParams(
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        seed=args.seed,
        stop=stop,
    )
