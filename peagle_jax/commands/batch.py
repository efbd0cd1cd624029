"""Answer files of requests with continuous batching: results durable, resumable."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peagle_jax.commands.options import (
    add_drafter,
    add_drafting,
    add_hosts,
    add_mesh,
    add_model,
    add_raw,
    add_sampling,
    add_stop,
    add_weights,
    sampling_params,
)
from peagle_jax.commands.progress import progress_bar
from peagle_jax.config import SamplingParams, check_num_draft_tokens, needs_drafter
from peagle_jax.errors import InputError
from peagle_jax.hosts import Joining, Part, Team, team_of
from peagle_jax.mesh_shape import MeshShape

if TYPE_CHECKING:
    from peagle_jax.serving.batch_report import Status
    from peagle_jax.serving.profile import Profiler
    from peagle_jax.serving.prometheus import MetricsServer

HELP = "answer files of requests, many at a time"
EXIT_BAD_LINES = 3

_DEFAULT_CONTEXT = 2048
_UNITS = {"K": 10, "M": 20, "G": 30, "T": 40}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `peagle batch`."""
    files = parser.add_argument_group("files")
    files.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="IN",
        help="JSON Lines: files, patterns, folders, - for stdin; .gz and .zst too",
    )
    files.add_argument(
        "--output",
        type=Path,
        required=True,
        metavar="OUT.jsonl",
        help="results; where it has some of this run, only the others are computed",
    )
    files.add_argument(
        "--errors",
        type=Path,
        metavar="FILE",
        help="lines that are no requests (OUT.errors.jsonl beside the output)",
    )
    files.add_argument(
        "--ordered", action="store_true", help="results in the input's order, not as they come"
    )
    files.add_argument(
        "--shard",
        default="0/1",
        metavar="I/N",
        help="only the I-th of N parts of the lines, I from 0 (%(default)s)",
    )
    add_raw(files)

    models = parser.add_argument_group("models")
    add_model(models)
    add_weights(models)
    add_drafter(models)
    add_drafting(parser.add_argument_group("drafting"))

    devices = parser.add_argument_group("devices")
    add_mesh(devices)
    add_hosts(devices)

    engine = parser.add_argument_group("engine")
    engine.add_argument(
        "--slots", type=int, default=16, metavar="N", help="requests at a time (%(default)s)"
    )
    engine.add_argument(
        "--context",
        type=int,
        metavar="N",
        help=f"most tokens of prompt and answer ({_DEFAULT_CONTEXT}, or what the model has)",
    )
    engine.add_argument(
        "--page-size",
        type=int,
        metavar="N",
        help="positions a page of the cache (128 on TPU, else 32)",
    )
    cache = engine.add_mutually_exclusive_group()
    cache.add_argument("--pages", type=int, metavar="N", help="pages of the cache")
    cache.add_argument(
        "--cache-memory",
        default="2G",
        metavar="SIZE",
        help="memory for pages, as in 500M or 8G; slots never take more than they can use "
        "(%(default)s)",
    )

    sampling = parser.add_argument_group("sampling, where a request does not say")
    add_sampling(sampling, max_new_tokens=SamplingParams().max_new_tokens, seed=0)
    add_stop(sampling)

    watched = parser.add_argument_group("watching")
    watched.add_argument(
        "--metrics-port",
        type=int,
        metavar="N",
        help="serve metrics for Prometheus at this port, 0 = a free one",
    )
    watched.add_argument(
        "--profile",
        type=Path,
        metavar="DIR",
        help="write a JAX trace of some steps to this folder, and say where their time went",
    )
    parser.add_argument("--json", action="store_true", help="print the statistics as JSON")


def run(args: argparse.Namespace) -> int:
    """Answers what is missing. Files and options are checked before a model is loaded."""
    mesh = MeshShape.parse(args.mesh) if args.mesh is not None else None
    joining = Joining(args.coordinator, args.num_processes, args.process_id, args.distributed)
    with _ended_by_sigterm(), joining.joined() as process:
        return _answer(args, process, mesh)


def _answer(args: argparse.Namespace, process: Part, whole: MeshShape | None) -> int:
    from peagle_jax.serving.input_lines import STDIN, Shard, find_inputs, read_lines
    from peagle_jax.serving.requests_file import read_requests
    from peagle_jax.serving.run_files import run_files

    params = sampling_params(args, tuple(args.stop))
    if isinstance(args.num_draft_tokens, int):
        check_num_draft_tokens(args.num_draft_tokens)
    cache_bytes, shard = parse_bytes(args.cache_memory), Shard.parse(args.shard)
    team, mesh = _own_devices(process, whole)
    shard = shard.part(team.part.index, team.part.count)
    own = run_files(args.output, args.errors, team.part)
    for name in args.input:
        if any(Path(name).resolve() == path.resolve() for path in own.every):
            raise InputError(f"--input: found {name}, which this run writes, expected another file")
    files = find_inputs(args.input, exclude=own.every)
    if process.count > 1 and STDIN in files:
        raise InputError("--input: found -, expected files, of which each process reads its part")

    from peagle_jax import api
    from peagle_jax.serving.batch import BatchRun
    from peagle_jax.serving.engine import BackendSizes, PagedEngine, make_shape
    from peagle_jax.serving.followed import open_results
    from peagle_jax.serving.scheduler import Policy

    num_groups = process.count if whole is None else whole.data
    if args.slots % num_groups:
        raise InputError(
            f"--slots: found {args.slots}, expected a multiple of {num_groups}, the groups of "
            "devices that have requests of their own"
        )
    settings = _settings(args, params, files, f"{shard.index}/{shard.count}")
    with (
        _metrics(args.metrics_port if team.leads else None) as metrics,
        open_results(own, settings, team, mesh) as (results, errors),
    ):
        drafter = args.drafter if needs_drafter(args.method) else None
        pair = api.load(
            target=args.model, drafter=drafter, dtype=args.dtype, weights=args.weights, mesh=mesh
        )
        speculator = api.make_speculator(
            pair, args.method, args.num_draft_tokens, args.draft_sampling, args.verify
        )
        sizes = BackendSizes.here()
        shape = make_shape(
            speculator,
            num_slots=args.slots // num_groups * team.shape.data,
            page_size=sizes.page_size if args.page_size is None else args.page_size,
            context=_context(args, pair.target.max_positions),
            num_pages=args.pages,
            cache_bytes=cache_bytes,
            mesh=team.shape,
        )
        engine = PagedEngine(speculator, pair.params, shape, mesh=mesh, executables=pair.compiled)
        policy = Policy(sizes.steps_a_visit)
        with _timed(
            "step costs   measured in {:.0f} s, and kept for later runs", team.leads
        ) as tell:
            engine.measure_step_costs(policy.steps_a_visit, on_measuring=tell)
        batch = BatchRun(
            engine,
            pair.tokenizer,
            pair.target,
            results,
            errors,
            model_name=_absolute(args.model),
            ordered=args.ordered,
            raw=args.raw,
            policy=policy,
        )
        requests = read_requests(read_lines(files, shard), params, args.seed)
        with (
            _profiler(args.profile if team.leads else None, pair.compiled) as profiler,
            progress_bar("requests") if team.leads else contextlib.nullcontext() as bar,
        ):
            # What comes through a pipe can be read only once.
            countable = bar is not None and all(Path(name).is_file() for name in files)
            total = sum(1 for _ in read_lines(files, shard)) if countable else None

            def watch(status: Status) -> None:
                if bar is not None:
                    bar(status.done, total, str(status))
                for watcher in (metrics, profiler):
                    if watcher is not None:
                        watcher.watch(status)

            report = batch.run(requests, watch)
    if team.leads:
        values, lines = report.to_json(), report.lines()
        if profiler is not None:
            profile = profiler.report()
            values["profile"] = profile and profile.to_json()
            lines += profile.lines() if profile else ["profile      none: the run was too short"]
        if args.json:
            print(json.dumps(values))
        print("\n".join(lines), file=sys.stderr)
        api.warn_if_none_accepted(report.stats.num_drafts, report.stats.num_accepted)
        if errors.count:
            print(f"bad lines    {own.errors}", file=sys.stderr)
    return EXIT_BAD_LINES if errors.count else 0


def _own_devices(process: Part, whole: MeshShape | None) -> tuple[Team, Any]:
    """The team of this process and its mesh; None = the default device."""
    import jax

    from peagle_jax.sharding import make_inference_mesh

    team = team_of(process, whole, jax.local_device_count(), jax.device_count())
    if whole is None:
        return team, None
    devices = [one for one in jax.devices() if one.process_index in team.processes]
    return team, make_inference_mesh(team.shape, devices)


def parse_bytes(text: str) -> int:
    """Bytes in "500M", "8G" or "123": K, M, G and T are powers of 1024."""
    number, unit = (text[:-1], text[-1]) if text[-1:].upper() in _UNITS else (text, "")
    try:
        found = int(float(number) * 2 ** _UNITS.get(unit.upper(), 0))
    except (ValueError, OverflowError):
        found = 0
    if found < 1:
        raise InputError(f"--cache-memory: found {text!r}, expected a size, as in 500M or 8G")
    return found


def _context(args: argparse.Namespace, most: int) -> int:
    return args.context if args.context is not None else min(_DEFAULT_CONTEXT, most)


def _settings(
    args: argparse.Namespace, params: SamplingParams, files: Sequence[str], shard: str
) -> dict[str, Any]:
    """What results depend on: a run that goes on with an output must have the same."""
    from peagle_jax import api
    from peagle_jax.serving.input_lines import identify

    folder, names = identify(files)
    return {
        "input": {"folder": folder, "files": names},
        "shard": shard,
        "ordered": args.ordered,
        "raw": args.raw,
        "model": _absolute(args.model),
        "drafter": _absolute(args.drafter),
        "dtype": args.dtype or api.default_dtype(),
        "weights": args.weights,
        "method": args.method,
        "num_draft_tokens": args.num_draft_tokens,
        "draft_sampling": args.draft_sampling,
        "verify": args.verify,
        "context": args.context,
        "sampling": dataclasses.asdict(params),
    }


def _absolute(source: str) -> str:
    """A model's name; where it is a path, the same from every folder."""
    path = Path(source).expanduser()
    return str(path.resolve()) if path.exists() else source


@contextlib.contextmanager
def _metrics(port: int | None) -> Iterator[MetricsServer | None]:
    """A server of metrics, whose address is printed; None where none is asked for."""
    if port is None:
        yield None
        return
    from peagle_jax.serving.prometheus import MetricsServer

    with MetricsServer(port) as server:
        address = f"http://{socket.gethostname()}:{server.port}/metrics"
        print(f"metrics      {address}", file=sys.stderr, flush=True)
        yield server


@contextlib.contextmanager
def _timed(line: str, shown: bool) -> Iterator[Callable[[], None]]:
    """Prints `line` with how long the block took, if what it gives was called."""
    called = False

    def tell() -> None:
        nonlocal called
        called = True

    begin = time.perf_counter()
    yield tell
    if called and shown:
        print(line.format(time.perf_counter() - begin), file=sys.stderr, flush=True)


@contextlib.contextmanager
def _profiler(folder: Path | None, executables: Mapping[Any, Any]) -> Iterator[Profiler | None]:
    """A profiler, None where none is asked for."""
    if folder is None:
        yield None
        return
    from peagle_jax.serving.profile import Profiler

    with Profiler(folder, executables) as profiler:
        yield profiler


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Lets SIGTERM, which comes before a machine is taken away, end the run in order."""

    def end(number: int, _: Any) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
