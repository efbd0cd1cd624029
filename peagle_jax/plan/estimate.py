"""What a batch run takes on each mesh of a slice, and which mesh to take."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

from peagle_jax.config import WeightForm
from peagle_jax.decoding.speculate import Speculator
from peagle_jax.errors import InputError
from peagle_jax.mesh_shape import MeshShape
from peagle_jax.plan import memory
from peagle_jax.plan.floors import StepFloor, step_floor
from peagle_jax.plan.memory import Weights
from peagle_jax.plan.topology import Topology
from peagle_jax.serving.engine_protocol import EngineShape

GIB = 2**30
_EVEN = 0.01  # meshes whose floors are this near are as good


@dataclasses.dataclass(frozen=True)
class Job:
    """What is planned for.

    slots: sequences at a time, over all devices. context: tokens of each. acceptance_length:
    tokens that a verification is taken to yield, 1 to K+1. weights: the target's form in memory.
    """

    speculator: Speculator
    topology: Topology
    slots: int
    context: int
    page_size: int
    acceptance_length: float
    weights: WeightForm = "full"

    def __post_init__(self) -> None:
        most, k = self.speculator.target.max_positions, self.speculator.num_draft_tokens
        for name, found, least in (("batch", self.slots, 1), ("page-size", self.page_size, 1)):
            if found < least:
                raise InputError(f"--{name}: found {found}, expected {least} or more")
        if not 2 <= self.context <= most:
            raise InputError(f"--context: found {self.context}, expected 2 to {most}, the target's")
        if not 1 <= self.acceptance_length <= k + 1:
            raise InputError(
                f"--acceptance-length: found {self.acceptance_length}, expected 1 to {k + 1}, "
                "the drafts of a step and one token"
            )

    @property
    def pages_a_slot(self) -> int:
        """Pages of a whole context."""
        k, pending = self.speculator.num_draft_tokens, self.speculator.pending_rows
        shape = EngineShape(1, 2, self.page_size, self.context, k, pending_rows=pending)
        return -(-(self.context + shape.scratch_rows) // self.page_size)


@dataclasses.dataclass(frozen=True)
class MeshPlan:
    """A job on one mesh; bytes are of one device.

    page_bytes: of one page of its group. slot_bytes: what an engine keeps beside pages.
    working_bytes: an estimate of temporaries. step, plain: floors of a speculative step and of
    one of plain decoding, every sequence at its longest.
    """

    job: Job
    mesh: MeshShape
    weights: Weights
    drafter: Weights | None
    page_bytes: int
    slot_bytes: int
    working_bytes: int
    step: StepFloor
    plain: StepFloor

    @property
    def hbm_bytes(self) -> int:
        """What the compiler has to give."""
        return int(self.job.topology.chip.hbm_gib * GIB)

    @property
    def fixed_bytes(self) -> int:
        """All but pages."""
        drafter = self.drafter.total if self.drafter else 0
        return self.weights.total + drafter + self.slot_bytes + self.working_bytes

    @property
    def pages_needed(self) -> int:
        """Pages of a group whose slots are all at their longest."""
        return self.job.slots // self.mesh.data * self.job.pages_a_slot

    @property
    def pages_that_fit(self) -> int:
        """Pages that there is room for; one more, which holds nothing, is always there."""
        return max(0, (self.hbm_bytes - self.fixed_bytes) // self.page_bytes - 1)

    @property
    def most_slots(self) -> int:
        """Sequences that fit at their longest, over all groups."""
        return self.pages_that_fit // self.job.pages_a_slot * self.mesh.data

    @property
    def fits(self) -> bool:
        """Whether no sequence of the job ever waits for pages."""
        return self.pages_that_fit >= self.pages_needed

    @property
    def tokens_per_second(self) -> float:
        """At the floor, over all devices."""
        return self.job.slots * self.job.acceptance_length / self.step.ms * 1e3

    @property
    def plain_tokens_per_second(self) -> float:
        """The same without drafts."""
        return self.job.slots / self.plain.ms * 1e3

    def to_json(self) -> dict[str, Any]:
        """Plain values: bytes, milliseconds, tokens a second."""
        return {
            "mesh": dataclasses.asdict(self.mesh),
            "fits": self.fits,
            "hbm_bytes": self.hbm_bytes,
            "weights": dataclasses.asdict(self.weights),
            "drafter": dataclasses.asdict(self.drafter) if self.drafter else None,
            "page_bytes": self.page_bytes,
            "slot_bytes": self.slot_bytes,
            "working_bytes_estimate": self.working_bytes,
            "pages_a_slot": self.job.pages_a_slot,
            "pages_needed": self.pages_needed,
            "pages_that_fit": self.pages_that_fit,
            "most_slots": self.most_slots,
            "step_floor": dataclasses.asdict(self.step) | {"ms": self.step.ms},
            "plain_step_floor": dataclasses.asdict(self.plain) | {"ms": self.plain.ms},
            "tokens_per_second_floor": self.tokens_per_second,
            "tokens_per_device_second_floor": self.tokens_per_second / self.mesh.size,
            "plain_tokens_per_second_floor": self.plain_tokens_per_second,
        }


def estimate(job: Job, mesh: MeshShape) -> MeshPlan:
    """Raises InputError for a mesh that the model or the slots cannot be split over."""
    mesh.check_devices(job.topology.num_devices)
    if job.slots % mesh.data:
        raise InputError(
            f"--batch: found {job.slots}, expected a multiple of {mesh.data}, the mesh's data "
            "groups"
        )
    speculator, slots = job.speculator, job.slots // mesh.data
    in_form = functools.partial(memory.target_weights, speculator.target, speculator.dtype, mesh)
    weights = in_form(job.weights)
    config = speculator.drafter
    drafter = memory.drafter_weights(config, speculator.dtype) if config else None
    floor = functools.partial(
        step_floor,
        mesh=mesh,
        chip=job.topology.chip,
        slots=slots,
        context=job.context,
        multiplied=in_form("full"),
    )
    plain = Speculator(speculator.target, dtype=speculator.dtype)
    return MeshPlan(
        job=job,
        mesh=mesh,
        weights=weights,
        drafter=drafter,
        page_bytes=memory.page_bytes(speculator, job.page_size, mesh),
        slot_bytes=memory.slot_bytes(speculator, slots, job.context),
        working_bytes=memory.working_bytes(speculator, slots, mesh),
        step=floor(speculator, weights, drafter),
        plain=floor(plain, weights, None),
    )


def all_meshes(job: Job) -> list[MeshPlan]:
    """Every mesh of the slice that the model and the slots can be split over, smallest groups
    first. Raises InputError where there is none."""
    count = job.topology.num_devices
    sizes = [size for size in range(1, count + 1) if count % size == 0]
    plans, problem = [], None
    for model, expert in itertools.product(sizes, repeat=2):
        if count % (model * expert):
            continue
        try:
            plans.append(estimate(job, MeshShape(count // (model * expert), expert, model)))
        except InputError as error:
            problem = problem or error
    if not plans:
        assert problem is not None
        raise problem
    return sorted(plans, key=lambda plan: (plan.mesh.group_size, plan.mesh.expert))


def best(plans: Sequence[MeshPlan]) -> MeshPlan:
    """Of those that fit the one with the most tokens a second; of several that are as good the
    smallest groups, which wait for one another the least. Where none fits, the one that has room
    for the most."""
    fitting = [plan for plan in plans if plan.fits]
    if not fitting:
        return max(plans, key=lambda plan: (plan.most_slots, -plan.fixed_bytes))
    most = max(plan.tokens_per_second for plan in fitting)
    good = [plan for plan in fitting if plan.tokens_per_second >= (1 - _EVEN) * most]
    return min(good, key=lambda plan: (plan.mesh.group_size, plan.mesh.expert))
