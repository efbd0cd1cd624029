"""Results of a team's other processes: they take the leader's steps, and write nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from jax.sharding import Mesh

from peagle_jax.hosts import Team
from peagle_jax.serving.batch import Errors, Results
from peagle_jax.serving.errors_file import ErrorsFile
from peagle_jax.serving.id_set import IdSet
from peagle_jax.serving.requests_file import BadLine
from peagle_jax.serving.results_file import ResultsFile
from peagle_jax.serving.run_files import RunFiles
from peagle_jax.sharding import from_first


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
        yield FollowedResults(share_done(IdSet(), mesh)), FollowedErrors()
        return
    with ResultsFile(files.output, settings) as results:
        if not team.alone:
            assert mesh is not None
            share_done(results.done, mesh)
        yield results, ErrorsFile(files.errors)


def share_done(done: IdSet, mesh: Mesh) -> IdSet:
    """The ids of the mesh's first process, in every process of it; those of the others are not
    looked at."""
    count = int(from_first(np.asarray([len(done)], np.int32), mesh)[0])
    digests = done.digests() if len(done) == count else np.zeros((count, IdSet.BYTES), np.uint8)
    return IdSet.of(from_first(digests, mesh))
