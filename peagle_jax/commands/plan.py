"""Plan a batch run on a TPU slice, without one: what fits, and the least time a step can take."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from peagle_jax.commands.options import add_drafter, add_drafting, add_model, add_weights
from peagle_jax.config import needs_drafter
from peagle_jax.errors import InputError

if TYPE_CHECKING:
    from peagle_jax.plan.batches import Curve
    from peagle_jax.plan.compiled import Compiled
    from peagle_jax.plan.estimate import MeshPlan
    from peagle_jax.plan.models import Described

HELP = "plan a run on a TPU slice, without one"
EXIT_DOES_NOT_FIT = 1

_DEFAULT_CONTEXT = 2048
_GIB = 2**30
# What libtpu looks for before jax is there: no metadata server, no other process, no chatter.
_COMPILER = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_MIN_LOG_LEVEL": "3",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `peagle plan`."""
    models = parser.add_argument_group("models")
    add_model(models)
    add_weights(models)
    add_drafter(models)
    add_drafting(parser.add_argument_group("drafting"))

    run = parser.add_argument_group("run")
    run.add_argument(
        "--topology", required=True, metavar="CHIP:GRID", help="TPU slice, as in v6e:2x4"
    )
    run.add_argument(
        "--mesh", metavar="AXES", help="only this mesh, as in data=2,model=4 (the best one)"
    )
    run.add_argument(
        "--batch", type=int, default=64, metavar="N", help="requests at a time (%(default)s)"
    )
    run.add_argument(
        "--context",
        type=int,
        metavar="N",
        help=f"tokens of each ({_DEFAULT_CONTEXT}, or what the model has)",
    )
    run.add_argument(
        "--page-size", type=int, default=128, metavar="N", help="positions a page (%(default)s)"
    )
    run.add_argument(
        "--acceptance-length",
        type=float,
        metavar="X",
        help="tokens that a verification yields, as peagle eval measures it (2, or 1 without "
        "drafts: no measurement)",
    )
    parser.add_argument(
        "--compile",
        action="store_true",
        help="compile prefill and step with the TPU compiler (libtpu) for their memory",
    )
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE.png",
        help="draw tokens/s by batch, with drafts and without, and the largest batch that fits",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Prints the plan; 1 where the run does not fit."""
    if args.num_draft_tokens == "auto":
        raise InputError("--num-draft-tokens: found auto, expected a number to plan for")
    if args.plot is not None:
        _check_plot(args.plot)
    # Nothing runs here, and a TPU that is there may be busy.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    for name, value in _COMPILER.items() if args.compile else ():
        os.environ.setdefault(name, value)
    from peagle_jax import api
    from peagle_jax.mesh_shape import MeshShape
    from peagle_jax.plan.estimate import Job, all_meshes, best, estimate
    from peagle_jax.plan.models import describe_drafter, describe_target
    from peagle_jax.plan.topology import Topology
    from peagle_jax.runner import Pair

    topology = Topology.parse(args.topology)
    mesh = MeshShape.parse(args.mesh) if args.mesh else None
    target, described = describe_target(args.model)
    if args.weights == "mxfp4" and described.packed_experts is False:
        raise InputError(
            f"--weights: found mxfp4 and {args.model}, whose experts are not packed, expected full "
            "or int8"
        )
    found: dict[str, Described] = {args.model: described}
    source = args.drafter
    if source == "auto":
        source = args.model if args.model in api.SHIPPED_DRAFTERS else None
    drafter = None
    if source is not None and needs_drafter(args.method):
        drafter, described = describe_drafter(source, target)
        found[f"{source} (drafter)" if source in found else source] = described
    pair = Pair(target, drafter, {}, None, args.dtype or "bfloat16")
    speculator = api.make_speculator(
        pair, args.method, args.num_draft_tokens, args.draft_sampling, args.verify
    )
    context = args.context
    if context is None:
        context = min(_DEFAULT_CONTEXT, target.max_positions)
    accepted = args.acceptance_length
    if accepted is None:
        accepted = 2.0 if speculator.drafts else 1.0
    job = Job(speculator, topology, args.batch, context, args.page_size, accepted, args.weights)
    plans = all_meshes(job) if mesh is None else [estimate(job, mesh)]
    chosen = best(plans)
    compiled = None
    if args.compile:
        from peagle_jax.plan.compiled import compile_programs

        compiled = compile_programs(chosen)
    curves = None
    if args.plot is not None:
        from peagle_jax.commands.plan_plot import draw
        from peagle_jax.files import replace_file
        from peagle_jax.plan.batches import by_batch

        curves = by_batch(job, chosen.mesh)
        name = Path(args.model).name
        replace_file(args.plot, draw(curves, chosen, name, args.acceptance_length is None))
    if args.json:
        print(json.dumps(_values(args, plans, chosen, found, compiled, curves)))
    else:
        print("\n".join(_lines(args, plans, chosen, found, compiled)))
    too_large = compiled is not None and any(one.total > chosen.hbm_bytes for one in compiled)
    return 0 if chosen.fits and not too_large else EXIT_DOES_NOT_FIT


def _check_plot(path: Path) -> None:
    if path.suffix.lower() != ".png":
        raise InputError(f"--plot: found {str(path)!r}, expected a name that ends in .png")
    if not path.parent.is_dir():
        raise InputError(f"--plot: found no folder {str(path.parent)!r}, expected one")
    if importlib.util.find_spec("matplotlib") is None:
        raise InputError(
            "--plot: found no matplotlib, expected it from pip install 'peagle-jax[train]'"
        )


def _values(
    args: argparse.Namespace,
    plans: list[MeshPlan],
    chosen: MeshPlan,
    found: dict[str, Described],
    compiled: list[Compiled] | None,
    curves: tuple[Curve, ...] | None,
) -> dict[str, object]:
    job = chosen.job
    return {
        "topology": job.topology.name,
        "devices": job.topology.num_devices,
        "models": {
            name: {"packed_bytes": one.packed_bytes, "guesses": list(one.guesses)}
            for name, one in found.items()
        },
        "dtype": job.speculator.dtype,
        "weights": job.weights,
        "method": job.speculator.method,
        "num_draft_tokens": job.speculator.num_draft_tokens,
        "batch": job.slots,
        "context": job.context,
        "page_size": job.page_size,
        "acceptance_length": job.acceptance_length,
        "acceptance_length_assumed": args.acceptance_length is None,
        "fits": chosen.fits,
        "suggested": str(chosen.mesh),
        "meshes": [plan.to_json() for plan in plans],
        "compiled": None
        if compiled is None
        else [one.to_json(chosen.job.topology.chip) for one in compiled],
        "by_batch": None if curves is None else [curve.to_json() for curve in curves],
    }


def _lines(
    args: argparse.Namespace,
    plans: list[MeshPlan],
    chosen: MeshPlan,
    found: dict[str, Described],
    compiled: list[Compiled] | None,
) -> list[str]:
    job, chip = chosen.job, chosen.job.topology.chip
    speculator = job.speculator
    lines = []
    for name, one in found.items():
        line = f"model       {name} in {speculator.dtype}"
        if one.packed_bytes is not None:
            line += f"; its checkpoint has {one.packed_bytes / _GIB:.2f} GiB"
        if job.weights != "full" and name == args.model:
            line += f"; weights {job.weights}"
        lines.append(line)
        if one.guesses:
            lines.append(f"  not known, so guessed: {', '.join(one.guesses)}")
    drafts = f"{speculator.method}, K = {speculator.num_draft_tokens}"
    assumed = ", an assumption" if args.acceptance_length is None and speculator.drafts else ""
    rates = f"{chip.hbm_gib:g} GiB, {chip.hbm_gb_s:g} GB/s, {chip.bf16_tflops:g} Tflop/s each"
    pages = f"{job.pages_a_slot} pages of {job.page_size} each"
    lines += [
        f"drafting    {drafts}, acceptance length {job.acceptance_length:g}{assumed}",
        f"devices     {job.topology.num_devices} of {chip.name}: {rates}",
        f"run         {job.slots} requests of {job.context} tokens, {pages}",
        "",
        *_EXPLAINED,
        "",
        _HEAD,
    ]
    lines += [_row(plan, plan is chosen) for plan in plans]
    lines.append("")
    if chosen.fits:
        lines.append(
            f"suggested   --mesh {chosen.mesh} --slots {job.slots} --context {job.context} "
            f"--page-size {job.page_size} --pages {chosen.pages_needed}"
        )
    else:
        lines.append(
            f"does not fit: with --mesh {chosen.mesh}, the roomiest, all but pages take "
            f"{chosen.fixed_bytes / _GIB:.2f} of {chip.hbm_gib:g} GiB a device, and of the "
            f"{chosen.pages_needed} pages that {job.slots // chosen.mesh.data} requests a group "
            f"need there is room for {chosen.pages_that_fit}; at most {chosen.most_slots} requests"
        )
    lines.append("tokens/s are upper bounds from published rates, no predictions")
    for program in compiled or ():
        lines += program.lines(chosen.hbm_bytes, chip)
    if compiled:
        lines += _COMPILED_EXPLAINED
    return lines


_EXPLAINED = (
    "GiB a device from the configurations (work is an estimate); most: requests that fit.",
    "Roofline of a step, every request at its longest, in ms: memory, products, sums of devices.",
)
_COMPILED_EXPLAINED = (
    "Memory and time by the compiler are its own count and estimate; kernels and collectives, for",
    "which it has none, are their bytes at published rates. Of a step's loop one turn counts.",
)
_HEAD = (
    f"{'mesh':<26}{'target':>8}{'drafter':>8}{'slots':>7}{'work':>7}{'pages':>8}{'all':>8}"
    f"{'':6}{'most':>6}{'memory':>8}{'prod.':>7}{'sums':>7}{'step':>8}{'tokens/s':>10}{'plain':>9}"
)


def _row(plan: MeshPlan, chosen: bool) -> str:
    pages = plan.pages_needed * plan.page_bytes
    drafter = plan.drafter.total if plan.drafter else 0
    parts = (plan.weights.total, drafter, plan.slot_bytes, plan.working_bytes, pages)
    shown = [f"{size / _GIB:.2f}" for size in (*parts, plan.fixed_bytes + pages)]
    mesh = f"{'* ' if chosen else '  '}{plan.mesh}"
    step = plan.step
    return (
        f"{mesh:<26}{shown[0]:>8}{shown[1]:>8}{shown[2]:>7}{shown[3]:>7}{shown[4]:>8}"
        f"{shown[5]:>8}{'' if plan.fits else ' no':6}{plan.most_slots:>6}{step.memory_ms:>8.2f}"
        f"{step.product_ms:>7.2f}{step.sum_ms:>7.2f}{step.ms:>8.2f}{plan.tokens_per_second:>10.0f}"
        f"{plan.plain_tokens_per_second:>9.0f}"
    )
