"""The processes of a run that has several, one a host: joining them, and what each one does.

Processes whose devices share a copy of the weights are a team, mostly one process alone. A team
has whole data groups, reads its own part of the input and writes an output of its own: no
step waits for another team. All are joined (`jax.distributed`) so that one command line serves
them, so that a mesh is that of the whole slice, and so that the run ends as one: where a process
dies, JAX ends the others.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

from peagle_jax.errors import EXIT_BAD_INPUT, InputError, exit_code
from peagle_jax.mesh_shape import ONE_DEVICE, MeshShape

# A process that was not heard of for so long is taken for dead, and the others are ended.
HEARTBEAT_SECONDS = 30
# How long a process that has done its part waits for the others to do theirs.
_PATIENCE_SECONDS = 30 * 24 * 3600


@dataclasses.dataclass(frozen=True)
class Part:
    """Number `index` of `count`: of processes, or of a run's input and output."""

    index: int = 0
    count: int = 1

    def file(self, path: Path) -> Path:
        """This part's own file of what is one file in all: `path` where there is one part, else
        out-00001-of-00004.jsonl for out.jsonl."""
        if self.count == 1:
            return path
        return path.with_name(f"{path.stem}-{self.index:05d}-of-{self.count:05d}{path.suffix}")

    def siblings(self) -> list[Part]:
        """All parts."""
        return [Part(index, self.count) for index in range(self.count)]


@dataclasses.dataclass(frozen=True)
class Team:
    """What a process works on, and with which others.

    part: of the input and the output.
    shape: the mesh of the team's devices; `alone` says whether these are this process's.
    processes: the team's. All of them take the same steps; the first one leads and writes.
    leads: whether that is this one.
    """

    part: Part
    shape: MeshShape
    processes: tuple[int, ...]
    leads: bool

    @property
    def alone(self) -> bool:
        """Whether the team is one process."""
        return len(self.processes) == 1


def team_of(process: Part, whole: MeshShape | None, num_local: int, num_all: int) -> Team:
    """The team of a process.

    whole: the mesh of all processes; None = each of them uses one device.
    num_local, num_all: devices of each process, and of all of them.

    Raises InputError where `whole` takes another number of devices than there are, or where the
    devices that share a copy of the weights are not those of whole processes, or of a part of
    one.
    """
    if whole is None:
        return Team(process, ONE_DEVICE, (process.index,), True)
    whole.check_devices(num_all)
    if num_local % whole.group_size == 0:
        own = dataclasses.replace(whole, data=num_local // whole.group_size)
        return Team(process, own, (process.index,), True)
    size, rest = divmod(whole.group_size, num_local)
    if rest:
        raise InputError(
            f"--mesh: found {whole}, in which {whole.group_size} devices share a copy of the "
            f"weights, expected a divisor or a multiple of {num_local}, the devices of a process"
        )
    index, place = divmod(process.index, size)
    processes = tuple(range(index * size, (index + 1) * size))
    own = dataclasses.replace(whole, data=1)
    return Team(Part(index, process.count // size), own, processes, place == 0)


@dataclasses.dataclass(frozen=True)
class Joining:
    """How a process finds the others; by default there are none.

    coordinator: host:port of process 0. num_processes, process_id: as they say. What is None is
    left to JAX, which knows it on TPU slices and under Slurm and MPI. found: leave all of it to
    JAX.
    """

    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None
    found: bool = False

    def __post_init__(self) -> None:
        if self.coordinator is not None:
            name, _, port = self.coordinator.rpartition(":")
            if not name or not port.isdigit():
                raise InputError(f"--coordinator: found {self.coordinator!r}, expected host:port")
        count, index = self.num_processes, self.process_id
        if count is not None and count < 1:
            raise InputError(f"--num-processes: found {count}, expected 1 or more")
        if index is not None and not 0 <= index < (index + 1 if count is None else count):
            raise InputError(f"--process-id: found {index}, expected 0 to --num-processes less one")

    @property
    def wanted(self) -> bool:
        """Whether there are others."""
        given = (self.coordinator, self.num_processes, self.process_id)
        return self.found or any(one is not None for one in given)

    @contextlib.contextmanager
    def joined(self) -> Iterator[Part]:
        """Joins the others, before JAX is used for anything else, and says which process this
        is; the end of the block waits for them. A process that leaves it by an exception does
        not wait: it is missed by the others, which JAX ends within a minute.

        Raises InputError where the processes do not find one another.
        """
        if not self.wanted:
            yield Part()
            return
        import jax

        # JAX would catch SIGTERM to have all processes save at one step: here each ends alone.
        jax.config.update("jax_enable_preemption_service", False)
        try:
            jax.distributed.initialize(
                self.coordinator,
                self.num_processes,
                self.process_id,
                heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
                shutdown_timeout_seconds=_PATIENCE_SECONDS,
            )
        except (RuntimeError, ValueError) as error:
            _leave_with(EXIT_BAD_INPUT)
            raise InputError(
                f"hosts: found {' '.join(str(error).split())}; expected processes that find one "
                "another (--coordinator, --num-processes, --process-id)"
            ) from None
        try:
            yield Part(jax.process_index(), jax.process_count())
        except BaseException as error:
            _leave_with(exit_code(error))
            raise
        # It waits where Python cannot answer a signal; all that this process had to do is done.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        jax.distributed.shutdown()


def _leave_with(code: int) -> None:
    """At the end of this process, ends it before JAX waits for the others."""

    def leave() -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    atexit.register(leave)
