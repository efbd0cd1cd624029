"""The processes of a run that has several, one a host: joining them, and what each one's part is.

Every process has whole data groups on the devices of its own host, reads its own share of the
input and writes an output of its own: no step waits for another process. They are joined
(`jax.distributed`) so that one command line serves all of them, so that a mesh is that of the
whole slice, and so that the run ends as one: where a process dies, JAX ends the others.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from peagle_jax.errors import EXIT_BAD_INPUT, InputError, exit_code
from peagle_jax.mesh_shape import MeshShape

# A process that was not heard of for so long is taken for dead, and the others are ended.
HEARTBEAT_SECONDS = 30
# How long a process that has done its part waits for the others to do theirs.
_PATIENCE_SECONDS = 30 * 24 * 3600


@dataclasses.dataclass(frozen=True)
class Host:
    """Process `index` of `count`."""

    index: int = 0
    count: int = 1

    def part(self, path: Path, index: int | None = None) -> Path:
        """A process's own file (this one's by default) of what is one file in all: `path` itself
        where there is one process, else out-00001-of-00004.jsonl for out.jsonl."""
        if self.count == 1:
            return path
        index = self.index if index is None else index
        return path.with_name(f"{path.stem}-{index:05d}-of-{self.count:05d}{path.suffix}")

    def parts(self, path: Path) -> list[Path]:
        """Every process's."""
        return [self.part(path, index) for index in range(self.count)]

    def share(self, whole: MeshShape, num_local: int, num_all: int) -> MeshShape:
        """The mesh of this process's own devices, of `num_local`, where that of all processes is
        `whole`.

        Raises InputError where `whole` takes another number of devices than `num_all`, or a
        group that shares a copy of the weights would have devices of several processes.
        """
        whole.check_devices(num_all)
        if num_local % whole.group_size:
            raise InputError(
                f"--mesh: found {whole}, in which {whole.group_size} devices share a copy of the "
                f"weights, expected a divisor of {num_local}, the devices of a process"
            )
        return dataclasses.replace(whole, data=num_local // whole.group_size)


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
    def joined(self) -> Iterator[Host]:
        """Joins the others, before JAX is used for anything else; the end of the block waits for
        them. A process that leaves it by an exception does not wait: it is missed by the
        others, which JAX ends within a minute.

        Raises InputError where the processes do not find one another.
        """
        if not self.wanted:
            yield Host()
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
            yield Host(jax.process_index(), jax.process_count())
        except BaseException as error:
            _leave_with(exit_code(error))
            raise
        jax.distributed.shutdown()


def _leave_with(code: int) -> None:
    """At the end of this process, ends it before JAX waits for the others."""

    def leave() -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    atexit.register(leave)
