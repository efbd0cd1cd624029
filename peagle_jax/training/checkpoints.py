"""A run's checkpoints: Orbax, saved while training goes on, whole or not there at all."""

from __future__ import annotations

import dataclasses
import logging
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from peagle_jax.files import Closing

_DELETED = ".deleted"  # old checkpoints are renamed into it at once, then removed
_UNFINISHED = "*.orbax-checkpoint-tmp"
_METRIC = "acceptance_length"


class CheckpointError(Exception):
    """A checkpoint could not be saved. The message is one line, with the last good step."""


@dataclasses.dataclass(frozen=True)
class Restored:
    """What a checkpoint holds: the state's arrays, and the JSON values saved with them."""

    step: int
    state: Any
    progress: dict[str, Any]


class Checkpoints(Closing):
    """Checkpoints in a folder, by step; a context manager.

    The last `keep` stay, and the one whose drafts were accepted best. A save that was
    interrupted leaves nothing that `latest` or `restore` would see. One process at a time
    may have a folder open.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        # Its threads log the whole chain of causes of an error that is raised here anyway.
        self._logger = logging.getLogger("absl")
        self._level = self._logger.level
        self._logger.setLevel(logging.CRITICAL)
        self.folder = folder.absolute()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._remove(_DELETED)

        def acceptance(metrics: Mapping[str, float]) -> float:
            return metrics[_METRIC]

        policies = ocp.checkpoint_managers
        options = ocp.CheckpointManagerOptions(
            best_fn=acceptance,
            preservation_policy=policies.AnyPreservationPolicy(
                [
                    policies.LatestN(keep),
                    policies.BestN(
                        get_metric_fn=acceptance, n=1, keep_checkpoints_without_metrics=False
                    ),
                ]
            ),
            cleanup_tmp_directories=True,
            todelete_subdir=_DELETED,
        )
        self._manager = ocp.CheckpointManager(
            self.folder, options=options, item_names=("state", "progress")
        )
        self._good = self._manager.latest_step()

    def steps(self) -> list[int]:
        """Steps of the whole checkpoints there are, rising."""
        return sorted(self._manager.all_steps())

    def latest(self) -> int | None:
        """The newest of them."""
        return self._manager.latest_step()

    def save(
        self,
        step: int,
        state: Any,
        progress: Mapping[str, Any],
        acceptance_length: float | None = None,
    ) -> None:
        """Begins to save a checkpoint; it counts once `wait`, or the next `save`, returned.

        Args:
            step: training steps done.
            state: a pytree of arrays. They are copied before this returns, so that the
                caller may donate them.
            progress: JSON values.
            acceptance_length: as decoded with this state, where it was measured.

        Raises CheckpointError where this or the save before it failed.
        """
        self.wait()
        metrics = None if acceptance_length is None else {_METRIC: float(acceptance_length)}
        try:
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(state),
                    progress=ocp.args.JsonSave(dict(progress)),
                ),
                metrics=metrics,
                force=True,
            )
        except (OSError, ValueError) as error:
            raise self._failed(error) from None

    def wait(self) -> None:
        """Waits for the save under way. Raises CheckpointError where it failed."""
        try:
            self._manager.wait_until_finished()
        except (OSError, ValueError) as error:
            raise self._failed(error) from None
        self._good = self._manager.latest_step()
        self._remove(_DELETED)

    def restore(self, step: int, like: Any) -> Restored:
        """The checkpoint of `step`.

        `like` is a pytree of the saved one's structure, of arrays or `jax.ShapeDtypeStruct`s
        with shardings: where the arrays go.
        """
        abstract = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), like
        )
        found = self._manager.restore(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardRestore(abstract), progress=ocp.args.JsonRestore()
            ),
        )
        return Restored(step, found["state"], found["progress"])

    def close(self) -> None:
        """Ends the threads; a save under way is finished first, its failure not reported."""
        try:
            self._manager.close()
        except (OSError, ValueError):
            self._remove(_UNFINISHED)
        self._remove(_DELETED)
        self._logger.setLevel(self._level)

    def _failed(self, error: Exception) -> CheckpointError:
        self._remove(_UNFINISHED)  # it takes room that the next save may need
        good = "none" if self._good is None else f"step {self._good}"
        return CheckpointError(
            f"{self.folder}: a checkpoint could not be saved ({_reason(error)}); "
            f"the last good checkpoint is {good}"
        )

    def _remove(self, pattern: str) -> None:
        for path in self.folder.glob(pattern):
            shutil.rmtree(path, ignore_errors=True)


def _reason(error: Exception) -> str:
    """The operating system's words, out of whatever a storage library wraps around them."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    found = re.findall(r": ([^:\[\]]+?) \[os_error_code", str(error))
    return found[-1] if found else " ".join(str(error).split())[:200]
