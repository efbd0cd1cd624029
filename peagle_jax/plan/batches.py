"""A job at other batch sizes on one mesh: rooflines by batch, and the largest batch that fits."""

from __future__ import annotations

import dataclasses
from typing import Any

from peagle_jax.decoding.speculate import Speculator
from peagle_jax.mesh_shape import MeshShape
from peagle_jax.plan.estimate import Job, MeshPlan, estimate


@dataclasses.dataclass(frozen=True)
class Curve:
    """plans: by rising batch, what does not fit included. largest: the largest batch that fits,
    0 where none does."""

    plans: tuple[MeshPlan, ...]
    largest: int

    def to_json(self) -> dict[str, Any]:
        """Plain values: batches, milliseconds, tokens a second."""
        return {
            "method": self.plans[0].job.speculator.method,
            "largest_batch": self.largest,
            "batches": [
                {
                    "batch": plan.job.slots,
                    "fits": plan.fits,
                    "step_ms_floor": plan.step.ms,
                    "tokens_per_second_floor": plan.tokens_per_second,
                    "tokens_per_device_second_floor": plan.tokens_per_second / plan.mesh.size,
                }
                for plan in self.plans
            ],
        }


def by_batch(job: Job, mesh: MeshShape) -> tuple[Curve, ...]:
    """The job's curve and, where it drafts, plain decoding's, over the same batches: the data
    groups' number and its doublings to past all that fits, and the job's and the largest ones."""
    jobs = [job]
    if job.speculator.drafts:
        plain = Speculator(job.speculator.target, dtype=job.speculator.dtype)
        jobs.append(dataclasses.replace(job, speculator=plain, acceptance_length=1.0))
    largest = [_largest(one, mesh) for one in jobs]
    sizes = {job.slots, *largest} - {0}
    size, end = mesh.data, max(sizes)
    while size < 2 * end:
        sizes.add(size)
        size *= 2
    return tuple(
        Curve(tuple(_at(one, mesh, slots) for slots in sorted(sizes)), most)
        for one, most in zip(jobs, largest, strict=True)
    )


def _largest(job: Job, mesh: MeshShape) -> int:
    """By bisection, as a batch takes more than every smaller one."""
    fitting, too_many = 0, _at(job, mesh, mesh.data).most_slots // mesh.data + 1
    while too_many - fitting > 1:
        middle = (fitting + too_many) // 2
        if _at(job, mesh, middle * mesh.data).fits:
            fitting = middle
        else:
            too_many = middle
    return fitting * mesh.data


def _at(job: Job, mesh: MeshShape, slots: int) -> MeshPlan:
    return estimate(dataclasses.replace(job, slots=slots), mesh)
