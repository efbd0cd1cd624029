"""What a run measured: RUN/metrics.jsonl, a line an entry, and TensorBoard beside it."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from peagle_jax.errors import InputError
from peagle_jax.files import Closing, replace_file

METRICS = "metrics.jsonl"
TENSORBOARD = "tensorboard"
Kind = Literal["step", "evaluation"]


class MetricsLog(Closing):
    """Writes a run's metrics; a context manager.

    A line is a JSON object with `kind`, "step" or "evaluation", and `step`, the number of
    steps done. Lists, such as the accuracy of each depth, become one TensorBoard curve an
    entry.
    """

    def __init__(self, folder: Path, resumed_step: int = 0, tensorboard: bool = False) -> None:
        """Opens the log of a run that goes on after `resumed_step`: what an interrupted run
        wrote past it is dropped, all at once.

        Raises InputError where TensorBoard is asked for and tensorboardX is not installed.
        """
        if tensorboard and importlib.util.find_spec("tensorboardX") is None:
            raise InputError(
                "train.tensorboard: found no package tensorboardX, expected it "
                "(pip install 'peagle-jax[train]'), or train.tensorboard = false"
            )
        self.path = folder / METRICS
        kept = [line for line in _lines(self.path) if line["step"] <= resumed_step]
        text = "".join(json.dumps(line) + "\n" for line in kept)
        replace_file(self.path, text.encode())
        self._file = self.path.open("a", encoding="utf-8")
        self._writer: Any = None
        if tensorboard:
            from tensorboardX import SummaryWriter

            self._writer = SummaryWriter(
                str(folder / TENSORBOARD), purge_step=resumed_step + 1 if resumed_step else None
            )

    def write(self, kind: Kind, step: int, values: Mapping[str, Any]) -> None:
        """Adds a line; `values` are JSON values."""
        self._file.write(json.dumps({"kind": kind, "step": step, **values}) + "\n")
        self._file.flush()
        if self._writer is not None:
            for name, value in values.items():
                if isinstance(value, list):
                    for index, item in enumerate(value):
                        self._writer.add_scalar(f"{kind}/{name}/{index}", item, step)
                else:
                    self._writer.add_scalar(f"{kind}/{name}", value, step)

    def sync(self) -> None:
        """Puts all lines so far on the disk: before a checkpoint that counts on them."""
        os.fsync(self._file.fileno())
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Closes the files."""
        self._file.close()
        if self._writer is not None:
            self._writer.close()


def read_metrics(folder: Path, kind: Kind) -> list[dict[str, Any]]:
    """The lines of one kind of a run's metrics.jsonl, in their order; none where it is missing."""
    return [line for line in _lines(folder / METRICS) if line["kind"] == kind]


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Whole lines; a last one that was cut short is what a killed run left."""
    if not path.exists():
        return
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), start=1):
        if not line.endswith(b"\n"):
            return
        try:
            value = json.loads(line)
            value["kind"], value["step"]
        except (ValueError, KeyError, TypeError):
            raise InputError(
                f"{path}:{number}: found no object with kind and step, expected a line that "
                "`peagle train` wrote"
            ) from None
        yield value
