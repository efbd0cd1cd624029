"""The files that a batch run writes: a process's own, and those of all its processes."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from peagle_jax.errors import InputError
from peagle_jax.hosts import Host
from peagle_jax.serving.errors_file import errors_path
from peagle_jax.serving.results_file import settings_path


@dataclasses.dataclass(frozen=True)
class RunFiles:
    """What one process writes: results, their settings beside them, and bad lines.

    every: what all processes of the run write, which is no input of it.
    """

    output: Path
    errors: Path
    every: tuple[Path, ...]


def run_files(output: Path, errors: Path | None, host: Host) -> RunFiles:
    """The files of process `host` of a run that is given these names; `errors` None = beside the
    output.

    Raises InputError where two of them are one, or where there are results of a run of another
    number of processes: these would be computed again.
    """
    outputs = host.parts(output)
    bad = [errors_path(one) for one in outputs] if errors is None else host.parts(errors)
    every = (*outputs, *map(settings_path, outputs), *bad)
    if len({path.resolve() for path in every}) < len(every):
        raise InputError(f"--errors: found {errors}, expected another file than --output's")
    _check_same_count(output, host)
    return RunFiles(outputs[host.index], bad[host.index], every)


def _check_same_count(output: Path, host: Host) -> None:
    name = re.compile(rf"{re.escape(output.stem)}-\d+-of-(\d+){re.escape(output.suffix)}")
    if not output.parent.is_dir():
        return
    for path in sorted(output.parent.iterdir()):
        match = name.fullmatch(path.name)
        if match and int(match[1]) != host.count and path.stat().st_size:
            raise InputError(
                f"{path}: found results of a run of {int(match[1])} processes, expected "
                f"{host.count}, as this one has; another run needs another output file"
            )
