"""Results of a team's other processes: they take the leader's steps, and write nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from peagle_jax.hosts import Team
from peagle_jax.serving.batch import Errors, Results
from peagle_jax.serving.errors_file import ErrorsFile
from peagle_jax.serving.id_set import IdSet
from peagle_jax.serving.requests_file import BadLine
from peagle_jax.serving.results_file import ResultsFile
from peagle_jax.serving.run_files import RunFiles


class FollowedResults:
    """Takes results that the leader writes.

    Attributes:
        done: keys that were done when the run began, the same in every process: what is skipped
            decides on the steps.
    """

    def __init__(self, done: IdSet) -> None:
        self.done = done

    def add(self, key: str, line: bytes) -> None:
        """The leader adds it."""

    def commit(self) -> None:
        """The leader commits."""


class FollowedErrors:
    """Counts bad lines, which the leader writes."""

    def __init__(self) -> None:
        self.count = 0

    def add(self, bad: BadLine) -> None:
        """Counts one."""
        del bad
        self.count += 1


@contextlib.contextmanager
def open_results(
    files: RunFiles, settings: dict[str, Any], team: Team, mesh: Mesh | None
) -> Iterator[tuple[Results, Errors]]:
    """Where a process of `team` puts results and bad lines: the leader into files.

    Raises InputError as ResultsFile does.
    """
    if not team.leads:
        assert mesh is not None
        yield FollowedResults(share_done(IdSet(), mesh, leads=False)), FollowedErrors()
        return
    with ResultsFile(files.output, settings) as results:
        if not team.alone:
            assert mesh is not None
            share_done(results.done, mesh, leads=True)
        yield results, ErrorsFile(files.errors)


def share_done(done: IdSet, mesh: Mesh, *, leads: bool) -> IdSet:
    """The leader's ids, in every process of the mesh; `done` of the others is not looked at."""
    count = int(_from_leader(np.asarray([len(done)], np.int32), mesh, leads)[0])
    digests = done.digests() if leads else np.zeros((count, IdSet.BYTES), np.uint8)
    return IdSet.of(_from_leader(digests, mesh, leads))


def _from_leader(value: np.ndarray, mesh: Mesh, leads: bool) -> np.ndarray:
    """The leader's array of a shape that all processes know: a sum over devices, of which only
    one has anything."""
    devices = Mesh(mesh.devices.reshape(-1), ("all",))
    first = mesh.devices.reshape(-1)[0]
    assert leads == (first.process_index == jax.process_index())
    rows = [
        jax.device_put(np.where(device == first, value, 0).astype(value.dtype)[None], device)
        for device in devices.local_devices
    ]
    spread = jax.make_array_from_single_device_arrays(
        (devices.size, *value.shape), NamedSharding(devices, PartitionSpec("all")), rows
    )
    total = jax.jit(
        lambda array: array.sum(0, dtype=array.dtype),
        out_shardings=NamedSharding(devices, PartitionSpec()),
    )(spread)
    return np.asarray(total)
