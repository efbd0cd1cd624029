"""Measure decoding side by side: methods, draft lengths and batch sizes, and other engines."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from peagle_jax.bench.cases import AUTO
from peagle_jax.commands.options import add_model, add_raw, add_weights, make_folder, numbers
from peagle_jax.commands.progress import progress_bar
from peagle_jax.commands.prompts import read_prompts
from peagle_jax.config import METHODS
from peagle_jax.errors import InputError

if TYPE_CHECKING:
    from peagle_jax.batching import Request
    from peagle_jax.bench.cases import Case
    from peagle_jax.bench.session import Engine
    from peagle_jax.config import Method
    from peagle_jax.runner import Pair

HELP = "measure speed, acceptance and exactness side by side"
EXIT_DIFFERENT = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `peagle bench`."""
    models = parser.add_argument_group("models")
    add_model(models)
    add_weights(models)
    models.add_argument(
        "--drafter",
        action="append",
        default=[],
        help="drafter: a folder or hub repository; one for each method that needs one "
        "(the one that ships for the model)",
    )

    cases = parser.add_argument_group("what is measured")
    cases.add_argument(
        "--prompts",
        type=Path,
        required=True,
        metavar="FILE.jsonl",
        help="prompts to answer (see peagle generate)",
    )
    cases.add_argument("--limit", type=int, metavar="N", help="N of the prompts, evenly spaced")
    add_raw(cases)
    cases.add_argument(
        "--methods",
        default="none,p-eagle,prompt-lookup",
        metavar="M,..",
        help=f"some of {', '.join(METHODS)} (%(default)s)",
    )
    cases.add_argument(
        "--num-draft-tokens",
        default="1,3,5",
        metavar="K,..",
        help="drafts a step, or auto (%(default)s)",
    )
    cases.add_argument("--batch", default="1", metavar="N,..", help="batch sizes (%(default)s)")
    cases.add_argument(
        "--max-new-tokens",
        type=int,
        default=128,
        metavar="INT",
        help="end an answer after this many tokens (%(default)s)",
    )
    cases.add_argument(
        "--repeats", type=int, default=3, metavar="N", help="times, interleaved (%(default)s)"
    )

    peers = parser.add_argument_group("other engines, on the same prompts and weights")
    peers.add_argument(
        "--peers",
        default="",
        metavar="P,..",
        help="some of peagle_batch (the engine of peagle batch, with as many slots as the batch "
        "size), transformers, vllm, llama.cpp; one that is not installed is left out",
    )
    peers.add_argument(
        "--peer-python",
        action="append",
        default=[],
        metavar="PEER=PYTHON",
        help="the interpreter of a peer's own environment (this one); repeatable",
    )

    output = parser.add_argument_group("output")
    output.add_argument("--out", required=True, metavar="DIR", help="a folder to write")
    output.add_argument("--no-plot", action="store_true", help="draw nothing")
    output.add_argument("--json", action="store_true", help="print the results as JSON")


def run(args: argparse.Namespace) -> int:
    """Measures, prints a table and writes the folder; 1 where an own answer is not identical."""
    from peagle_jax.bench.cases import OURS, make_cases

    peers = _names("--peers", args.peers) if args.peers else []
    cases = make_cases(
        _names("--methods", args.methods),
        _draft_lengths(args.num_draft_tokens),
        numbers("--batch", args.batch),
        peers,
    )
    if args.weights == "int8" and set(peers) - set(OURS):
        raise InputError(
            "--weights: found int8 with --peers, expected full: theirs are not rounded"
        )
    pythons = _pythons(args.peer_python, peers)
    if not args.out:
        raise InputError("--out: found '', expected a folder to write")
    out = Path(args.out)
    prompts, names = read_prompts(args.prompts)
    if args.limit is not None:
        if args.limit < 1:
            raise InputError(f"--limit: found {args.limit}, expected 1 or more")
        count = min(args.limit, len(prompts))
        places = [i * len(prompts) // count for i in range(count)]
        prompts, names = [prompts[i] for i in places], [names[i] for i in places]
    most = max(case.batch for case in cases)
    if most > len(prompts):
        raise InputError(
            f"--batch: found {most}, expected at most {len(prompts)}, the number of prompts"
        )
    if not args.no_plot and importlib.util.find_spec("matplotlib") is None:
        raise InputError("plots: found no matplotlib, expected it, or --no-plot")

    from peagle_jax import batching
    from peagle_jax.bench import report, session
    from peagle_jax.bench.batching import BatchingEngine
    from peagle_jax.bench.cases import BATCHING, OWN
    from peagle_jax.bench.own import OwnEngine
    from peagle_jax.commands import bench_output
    from peagle_jax.config import SamplingParams

    make_folder("--out", out)
    pairs, drafters = _load(args, {case.method for case in cases})
    pair = pairs["none"]
    params = SamplingParams(max_new_tokens=args.max_new_tokens)
    requests = batching.make_requests(
        pair.tokenizer, pair.target, prompts, [params] * len(prompts), raw=args.raw, names=names
    )
    settings = {
        "command": shlex.join(["peagle", *sys.argv[1:]]),
        "model": args.model,
        "drafters": drafters,
        "dtype": pair.dtype,
        "weights": args.weights,
        "prompts": f"{len(prompts)} of {args.prompts.name}",
        "max_new_tokens": args.max_new_tokens,
        "repeats": args.repeats,
        **report.environment(),
    }
    with (
        _peers(args, out, cases, pair, drafters, requests, pythons) as engines,
        progress_bar("bench") as progress,
    ):
        engines |= {
            OWN: OwnEngine(pairs, requests),
            BATCHING: BatchingEngine(pairs, requests),
        }
        kept = [case for case in cases if case.peer in engines]
        lines = session.result_lines(session.measure(engines, kept, args.repeats, progress))
    bench_output.write_files(out, lines, settings, plots=not args.no_plot)
    if args.json:
        print(json.dumps({"settings": settings, "results": lines}))
    else:
        bench_output.print_table(lines)
    different = [line for line in lines if session.is_own(line) and not _identical(line)]
    for line in different:
        print(
            f"peagle: warning: {line['method']} with K = {line['num_draft_tokens']} at batch "
            f"{line['batch']}: {line['identical']} of {line['prompts']} answers are identical",
            file=sys.stderr,
        )
    return EXIT_DIFFERENT if different else 0


def _identical(line: dict[str, Any]) -> bool:
    return bool(line["identical"] == line["prompts"])


def _load(args: argparse.Namespace, methods: set[str]) -> tuple[dict[str, Pair], dict[str, str]]:
    """A pair for each method, all with the same target; the drafters' sources by method."""
    from peagle_jax import api
    from peagle_jax.config import network_method
    from peagle_jax.convert import checkpoint
    from peagle_jax.models import kernel_forms
    from peagle_jax.runner import Pair

    networks = {method: network_method(cast("Method", method)) for method in methods}
    needed = {network for network in networks.values() if network is not None}
    plain = api.load(target=args.model, drafter=None, dtype=args.dtype, weights=args.weights)
    sources = list(args.drafter)
    if not sources and needed and args.model in api.SHIPPED_DRAFTERS:
        sources = [args.model]
    pairs = {"none": plain, "prompt-lookup": plain}
    found: dict[str, str] = {}
    for source in sources:
        config, tree = checkpoint.load_drafter(
            source, target_config=plain.target, dtype=plain.dtype
        )
        if config.method in found:
            raise InputError(
                f"--drafter: found {source} and {found[config.method]}, both for "
                f"{config.method}, expected one"
            )
        found[config.method] = source
        trees = {"target": plain.params["target"], "drafter": kernel_forms.two_way(tree)}
        pairs[config.method] = Pair(plain.target, config, trees, plain.tokenizer, plain.dtype)
    missing = sorted(needed - set(found))
    if missing:
        raise InputError(
            f"--methods: found {', '.join(missing)}, expected a --drafter that was trained for it"
        )
    for method, network in networks.items():
        if network is not None:
            pairs[method] = pairs[network]
    return pairs, found


@contextlib.contextmanager
def _peers(
    args: argparse.Namespace,
    out: Path,
    cases: Sequence[Case],
    pair: Pair,
    drafters: dict[str, str],
    requests: Sequence[Request],
    pythons: dict[str, str],
) -> Iterator[dict[str, Engine]]:
    """The peers that start, by name; their output goes to DIR/PEER.log."""
    from peagle_jax.bench.cases import OURS
    from peagle_jax.bench.peer_process import PeerProcess, PeerSettings
    from peagle_jax.bench.report import available_threads
    from peagle_jax.bench.session import EngineError
    from peagle_jax.convert.conversion import convert
    from peagle_jax.convert.sources import locate

    asked = list(dict.fromkeys(case.peer for case in cases if case.peer not in OURS))
    engines: dict[str, Engine] = {}
    if not asked:
        yield engines
        return
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        # Peers read these files, so that all weights are the same to the bit.
        target = str(convert(args.model, folder / "target", to="vllm", dtype=pair.dtype))
        exported = {
            method: str(
                convert(
                    locate(source, "drafter"),
                    folder / method,
                    to="vllm",
                    dtype=pair.dtype,
                    target=args.model,
                )
            )
            for method, source in drafters.items()
        }
        longest = max(len(request.token_ids) for request in requests)
        most = max(k for case in cases if isinstance(k := case.num_draft_tokens, int))
        told = PeerSettings(
            str(locate(args.model)),
            target,
            exported,
            pair.dtype,
            [list(request.token_ids) for request in requests],
            args.max_new_tokens,
            min(longest + args.max_new_tokens + most + 1, pair.target.max_positions),
            list(pair.target.eos_token_ids),
            available_threads(),
        )
        for peer in asked:
            log = stack.enter_context((out / f"{peer}.log").open("w"))
            try:
                process = PeerProcess(peer, told, log, pythons.get(peer))
            except EngineError as error:
                print(f"peagle: warning: {error}; it is left out", file=sys.stderr)
                continue
            stack.callback(process.close)
            engines[peer] = process
        yield engines


def _names(option: str, text: str) -> list[str]:
    """Those of "a,b"; raises InputError naming the option where one is missing."""
    names = [part.strip() for part in text.split(",")]
    if not all(names):
        raise InputError(f"{option}: found {text!r}, expected a name, or some as in a,b")
    return names


def _draft_lengths(text: str) -> list[int | str]:
    option = "--num-draft-tokens"
    names = [part.strip() for part in text.split(",")]
    fixed = [name for name in names if name != AUTO]
    lengths: list[int | str] = []
    try:
        lengths += numbers(option, ",".join(fixed)) if fixed else []
    except InputError as error:
        raise InputError(f"{error}, or {AUTO}") from None
    return lengths + [AUTO] * (AUTO in names)


def _pythons(options: Sequence[str], peers: Sequence[str]) -> dict[str, str]:
    found = {}
    for option in options:
        peer, sign, python = option.partition("=")
        if not sign or not Path(python).is_file():
            raise InputError(
                f"--peer-python: found {option!r}, expected PEER=PYTHON, PYTHON an interpreter's "
                "file"
            )
        if peer not in peers:
            known = ", ".join(peers) or "none"
            raise InputError(f"--peer-python: found {peer}, expected one of --peers, here {known}")
        found[peer] = python
    return found
