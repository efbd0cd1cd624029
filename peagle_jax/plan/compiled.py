"""An engine's programs through the TPU compiler, without a TPU: memory, collectives, estimates.

The compiler comes with the package libtpu. What is compiled is what a batch run compiles on the
chip, kernels included; parameters and arrays are shapes alone.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import Mesh

from pallas_kernels.chips import Chip
from pallas_kernels.program_text import ProgramText, compile_with_text, read_estimates
from pallas_kernels.target import Target, compile_for
from peagle_jax.convert.layouts import BY_ROWS
from peagle_jax.decoding.generate import PREFILL_CHUNK
from peagle_jax.decoding.placement import drafter_sharding, target_shardings
from peagle_jax.errors import InputError
from peagle_jax.models import decoder, drafter, kernel_forms
from peagle_jax.plan.estimate import GIB, MeshPlan
from peagle_jax.serving import device, programs
from peagle_jax.serving.device import ChunkArrays, InsertionArrays
from peagle_jax.serving.engine_protocol import EngineShape
from peagle_jax.serving.scheduler import Policy
from peagle_jax.sharding import by_rows, make_inference_mesh


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A program, in bytes of one device.

    in_place: results that take the place of arguments. beside: weights, pages and slots that
    the program does not take, and that lie in memory meanwhile: prefill needs no head, insertion
    no page. refusal: the compiler's reason, "" where it fits. text: what the program says of
    itself, None of a refused one; a step's loop over the steps of a visit counts once.
    """

    name: str
    arguments: int = 0
    results: int = 0
    in_place: int = 0
    temporaries: int = 0
    beside: int = 0
    seconds: float = 0.0
    refusal: str = ""
    text: ProgramText | None = None

    @property
    def total(self) -> int:
        """What is held at once; of a refused program its temporaries."""
        new = self.results - self.in_place + self.temporaries
        return self.arguments + self.beside + new

    def to_json(self, chip: Chip) -> dict[str, Any]:
        """Plain values; times of a run of the program in milliseconds."""
        values = dataclasses.asdict(self) | {"total": self.total}
        if self.text is not None:
            values |= {
                "compiler_ms": _ms(self.text.compiled_us(chip)),
                "kernels_ms": _ms(self.text.kernels_us(chip)),
                "collectives_ms": _ms(self.text.sent_us(chip)),
            }
        return values

    def lines(self, available: int, chip: Chip) -> list[str]:
        """Readable lines: memory, and what the program is estimated to take."""
        head = f"compiled    {self.name:<8}"
        if self.text is None:
            return [f"{head} refused: {self.refusal}"]
        memory = (
            f"{head} {self.total / GIB:.2f} of {available / GIB:.2f} GiB: arguments "
            f"{self.arguments / GIB:.2f}, temporaries {self.temporaries / GIB:.2f}, beside it "
            f"{self.beside / GIB:.2f}; compiled in {self.seconds:.0f} s"
        )
        text, own = self.text, _ms(self.text.compiled_us(chip))
        sent = ", ".join(
            f"{one.count} {kind} of {one.nbytes / 2**20:.2f} MiB"
            for kind, one in text.collectives.items()
        )
        estimate = (
            f"{'':21}{'no clock known' if own is None else f'{own:.2f} ms'} by the compiler, "
            f"{text.kernels} kernels {text.kernels_us(chip) / 1e3:.2f} ms by their bytes, "
            f"{sent or 'no collective'}"
        )
        return [memory, estimate + (f", {text.sent_us(chip) / 1e3:.2f} ms" if sent else "")]


def _ms(microseconds: float | None) -> float | None:
    return None if microseconds is None else microseconds / 1e3


def compile_programs(plan: MeshPlan) -> list[Compiled]:
    """Prefill, insert and step over the plan's mesh. Raises InputError without libtpu."""
    if not _has_compiler():
        raise InputError(
            "--compile: found no libtpu package, which has the TPU compiler; expected it from "
            "pip install libtpu"
        )
    topology = plan.job.topology
    described = topologies.get_topology_desc(platform="tpu", topology_name=topology.name)
    mesh = make_inference_mesh(plan.mesh, described.devices)
    target = Target("tpu", topology.kind, topology.chip.cores)
    found = []
    for function, arguments, static in _programs(plan, mesh):
        begin = time.monotonic()
        with compile_for(target):
            lowered = programs.lower(
                function, mesh, arguments, speculator=plan.job.speculator, **static
            )
            one = _compile(function.__name__, lowered)
        beside = max(0, _resident(plan) - one.arguments) if not one.refusal else 0
        seconds = time.monotonic() - begin
        found.append(dataclasses.replace(one, beside=beside, seconds=seconds))
    return found


def _resident(plan: MeshPlan) -> int:
    """Bytes that an engine holds from start to end."""
    drafter = plan.drafter.total if plan.drafter else 0
    pages = _num_pages(plan) * plan.page_bytes
    return plan.weights.total + drafter + plan.slot_bytes + pages


def _num_pages(plan: MeshPlan) -> int:
    """Of a group, the null page too: as many as fit, and no fewer than one request needs."""
    return 1 + min(plan.pages_needed, max(plan.pages_that_fit, plan.job.pages_a_slot))


def _has_compiler() -> bool:
    try:
        return importlib.util.find_spec("libtpu") is not None
    except ValueError:  # what stands for a module that is not to be had
        return False


def _compile(name: str, lowered: Any) -> Compiled:
    try:
        program, text = compile_with_text(lowered)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        said = str(error).partition("HLO module")[0]
        needed = re.search(r"temporaries \(([\d.]+)([MGT])\)", said)
        size = float(needed[1]) * 2 ** {"M": 20, "G": 30, "T": 40}[needed[2]] if needed else 0
        return Compiled(name, temporaries=int(size), refusal=" ".join(said.split())[:200])
    memory = program.memory_analysis()
    return Compiled(
        name,
        text=read_estimates(text),
        arguments=memory.argument_size_in_bytes,
        results=memory.output_size_in_bytes,
        in_place=memory.alias_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
    )


def _programs(
    plan: MeshPlan, mesh: Mesh
) -> Iterator[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]]:
    """(function, abstract arguments, statics), with the arrays of all groups."""
    job, speculator, groups = plan.job, plan.job.speculator, plan.mesh.data
    dtype = jnp.dtype(speculator.dtype)
    shape = EngineShape(
        num_slots=job.slots,
        num_pages=_num_pages(plan),
        page_size=job.page_size,
        context=job.context,
        num_draft_tokens=speculator.num_draft_tokens,
        num_groups=groups,
        pending_rows=speculator.pending_rows,
    )
    abstract = kernel_forms.abstract(decoder.abstract_params(speculator.target, dtype), job.weights)
    params = {"target": _placed(abstract, target_shardings(speculator.target, abstract, mesh))}
    if speculator.drafter:
        own = drafter.abstract_params(speculator.drafter, dtype)
        place = drafter_sharding(speculator.drafter, own, mesh)
        params["drafter"] = _placed(own, jax.tree.map(lambda _: place, own))
    pools, state = jax.eval_shape(lambda: programs.init(speculator, shape, mesh))

    def array(*sizes: int, dtype: Any = jnp.int32) -> Any:
        return jax.ShapeDtypeStruct(sizes, dtype)

    chunks: Any = {name: array(groups) for name in ("slot", "start", "counts")}
    chunks |= {name: array(groups, PREFILL_CHUNK) for name in ("tokens", "following")}
    chunks["ends"] = array(groups, dtype=bool)
    chunk = ChunkArrays(**chunks, tables=array(groups, shape.pages_a_slot))
    yield device.prefill, (params, pools, state, chunk), {"drafts": True}
    some = array(job.slots, dtype=bool)
    new = InsertionArrays(some, array(job.slots), some, some, state.requests)
    yield device.insert, (params, state, new), {}
    tables = array(job.slots, shape.pages_a_slot)
    steps = Policy().steps_a_visit
    yield device.step, (params, pools, state, tables), {"num_steps": steps, "drafts": True}


def _placed(abstract: Any, shardings: Any) -> Any:
    def place(path: Any, leaf: Any, where: Any) -> Any:
        name = ".".join(key.key for key in path)
        at = by_rows(leaf.ndim, where) if name.endswith(BY_ROWS) else where
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=at)

    return jax.tree.map_with_path(place, abstract, shardings)
