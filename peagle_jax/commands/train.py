"""Train a drafter on the target's own answers; the same command goes on after an interruption."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peagle_jax.commands.progress import progress_bar
from peagle_jax.commands.prompts import read_prompts

if TYPE_CHECKING:
    from peagle_jax.training.trainer import Summary

HELP = "train a drafter on the target's own answers"
EXIT_STOPPED = 1
_SIGNALLED = 128


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `peagle train`."""
    parser.add_argument("--model", help="the target: a name, folder or hub repository (smollm2)")
    parser.add_argument(
        "--data",
        action="append",
        metavar="FOLDER",
        help="answers that `peagle distill` wrote; repeatable",
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="RUN", help="the run's folder, new or begun"
    )
    parser.add_argument("--config", type=Path, metavar="FILE.toml", help="the run's settings")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="one setting, such as optimizer.learning_rate=1e-3; repeatable",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")


def run(args: argparse.Namespace) -> int:
    """Trains. Exit codes: 0 at the last step; 1 where training cannot go on (a loss that is
    not finite, a checkpoint that cannot be saved); 128 + signal number after a signal."""
    from peagle_jax.training import train_config

    given: dict[str, Any] = {}
    if args.model is not None:
        given["model"] = args.model
    if args.data is not None:
        given["data.answers"] = tuple(args.data)
    own = args.out / "config.toml"
    path = own if args.config is None and own.exists() else args.config
    config = train_config.load(path, args.set, given)
    prompts = read_prompts(Path(config.eval.prompts))[0] if config.eval.prompts else []

    from peagle_jax import compile_cache
    from peagle_jax.training.checkpoints import CheckpointError
    from peagle_jax.training.run import open_run
    from peagle_jax.training.trainer import TrainingStopped

    compile_cache.enable()
    with open_run(config, args.out, prompts) as opened:
        print(opened.describe(), file=sys.stderr, flush=True)
        try:
            with progress_bar("steps") as progress:
                summary = opened.train(progress)
        except (TrainingStopped, CheckpointError) as error:
            print(f"peagle: error: {error}", file=sys.stderr)
            return EXIT_STOPPED
        _report(opened.folder)
        if args.json:
            print(json.dumps(as_json(summary, opened.folder)))
        else:
            print(line(summary, opened.folder))
    if summary.signal is not None:
        print(f"peagle: ended by signal {summary.signal}; the same command goes on from step "
              f"{summary.step}", file=sys.stderr)  # fmt: skip
        return _SIGNALLED + summary.signal
    return 0


def as_json(summary: Summary, folder: Path) -> dict[str, Any]:
    """What `--json` prints, in plain Python values."""
    return {
        "run": str(folder),
        "step": summary.step,
        "steps": summary.steps,
        "loss": summary.loss,
        "accuracy_per_depth": summary.accuracy_per_depth,
        "best": summary.best,
        "seconds": summary.seconds,
        "tokens": summary.tokens,
        "tokens_per_second": summary.tokens_per_second,
        "signal": summary.signal,
    }


def line(summary: Summary, folder: Path) -> str:
    """The statistics as a person reads them."""
    text = f"step {summary.step} of {summary.steps}"
    if summary.loss is None and summary.signal is None:
        text = f"nothing left to train at step {summary.step}: more train.steps go on from there"
    if summary.loss is not None:
        rates = " ".join(f"{rate:.2f}" for rate in summary.accuracy_per_depth)
        text += (
            f", loss {summary.loss:.4f}, accuracy by depth {rates}, {summary.tokens} tokens in "
            f"{summary.seconds:.1f} s, {summary.tokens_per_second:.0f} tokens/s"
        )
    if summary.best is not None:
        text += (
            f", best acceptance length {summary.best['acceptance_length']:.2f} at step "
            f"{summary.best['step']}"
        )
    return f"{text}; the drafter is in {folder}"


def _report(folder: Path) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        print(
            "peagle: no report: matplotlib is not installed (pip install 'peagle-jax[train]')",
            file=sys.stderr,
        )
        return
    from peagle_jax.training.report import write_report

    write_report(folder, folder.name)
