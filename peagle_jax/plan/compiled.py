"""An engine's programs through the TPU compiler, without a TPU: how much memory they take.

The compiler comes with the package libtpu. What is compiled is what a batch run compiles on the
chip, kernels included; parameters and arrays are shapes alone.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from pallas_kernels.target import Target, compile_for
from peagle_jax.decoding.generate import PREFILL_CHUNK
from peagle_jax.decoding.sampling import RequestArrays
from peagle_jax.errors import InputError
from peagle_jax.models import decoder, drafter
from peagle_jax.plan.estimate import GIB, MeshPlan
from peagle_jax.serving import device
from peagle_jax.serving.device import ChunkArrays, InsertionArrays
from peagle_jax.serving.engine_protocol import EngineShape
from peagle_jax.serving.scheduler import Policy


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A program, in bytes of one device. in_place: results that take the place of arguments.

    refusal: the compiler's reason, "" where it fits.
    """

    name: str
    arguments: int = 0
    results: int = 0
    in_place: int = 0
    temporaries: int = 0
    seconds: float = 0.0
    refusal: str = ""

    @property
    def total(self) -> int:
        """What is held at once; of a refused program its temporaries."""
        return self.arguments + self.results - self.in_place + self.temporaries

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return dataclasses.asdict(self) | {"total": self.total}

    def line(self, available: int) -> str:
        """A readable line."""
        head = f"compiled    {self.name:<8}"
        if self.refusal:
            return f"{head} refused: {self.refusal}"
        return (
            f"{head} {self.total / GIB:.2f} of {available / GIB:.2f} GiB: arguments "
            f"{self.arguments / GIB:.2f}, temporaries {self.temporaries / GIB:.2f}"
        )


def compile_programs(plan: MeshPlan) -> list[Compiled]:
    """Prefill, insert and step of one data group.

    Raises InputError without libtpu, and for groups of several devices.
    """
    if not _has_compiler():
        raise InputError(
            "--compile: found no libtpu package, which has the TPU compiler; expected it from "
            "pip install libtpu"
        )
    if plan.mesh.group_size > 1:
        raise InputError(
            f"--compile: found the mesh {plan.mesh}, expected one without model and expert: "
            "programs of one device are compiled"
        )
    topology = plan.job.topology
    described = topologies.get_topology_desc(platform="tpu", topology_name=topology.chip.topology)
    place = SingleDeviceSharding(described.devices[0])
    target = Target("tpu", topology.kind, topology.chip.cores)
    found = []
    for name, function, donated, arguments in _programs(plan):
        given = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), arguments
        )
        begin = time.monotonic()
        with compile_for(target):
            lowered = jax.jit(function, donate_argnums=donated).lower(*given)
            one = _compile(name, lowered)
        found.append(dataclasses.replace(one, seconds=time.monotonic() - begin))
    return found


def _has_compiler() -> bool:
    try:
        return importlib.util.find_spec("libtpu") is not None
    except ValueError:  # what stands for a module that is not to be had
        return False


def _compile(name: str, lowered: Any) -> Compiled:
    try:
        memory = lowered.compile().memory_analysis()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        said = str(error).partition("HLO module")[0]
        needed = re.search(r"temporaries \(([\d.]+)([MGT])\)", said)
        size = float(needed[1]) * 2 ** {"M": 20, "G": 30, "T": 40}[needed[2]] if needed else 0
        return Compiled(name, temporaries=int(size), refusal=" ".join(said.split())[:200])
    return Compiled(
        name,
        arguments=memory.argument_size_in_bytes,
        results=memory.output_size_in_bytes,
        in_place=memory.alias_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
    )


def _programs(
    plan: MeshPlan,
) -> Iterator[tuple[str, Callable[..., Any], tuple[int, ...], tuple[Any, ...]]]:
    """(name, function, donated arguments, arguments), of a group's own sizes."""
    job, speculator = plan.job, plan.job.speculator
    slots, dtype = job.slots // plan.mesh.data, jnp.dtype(speculator.dtype)
    pages = 1 + min(plan.pages_needed, max(plan.pages_that_fit, job.pages_a_slot))
    shape = EngineShape(
        slots,
        pages,
        job.page_size,
        job.context,
        speculator.num_draft_tokens,
        pending_rows=speculator.pending_rows,
    )
    params = {"target": decoder.abstract_params(speculator.target, dtype)}
    if speculator.drafter:
        params["drafter"] = drafter.abstract_params(speculator.drafter, dtype)
    pools, state = jax.eval_shape(
        functools.partial(device.init, speculator, slots, pages, job.page_size, job.context)
    )

    def array(*sizes: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype)

    chunks: Any = {name: array(1) for name in ("slot", "start", "counts")}
    chunks |= {name: array(1, PREFILL_CHUNK) for name in ("tokens", "following")}
    chunk = ChunkArrays(**chunks, tables=array(1, shape.pages_a_slot))
    yield (
        "prefill",
        functools.partial(device.prefill, speculator=speculator),
        (1, 2),
        (params, pools, state, chunk),
    )
    columns: Any = {
        field.name: getattr(state.requests, field.name)
        for field in dataclasses.fields(RequestArrays)
    }
    new = InsertionArrays(array(slots, dtype=bool), array(slots), RequestArrays(**columns))
    yield (
        "insert",
        functools.partial(device.insert, speculator=speculator),
        (1,),
        (params, state, new),
    )
    step = functools.partial(device.step, speculator=speculator, num_steps=Policy().steps_a_visit)
    yield "step", step, (1, 2), (params, pools, state, array(slots, shape.pages_a_slot))
