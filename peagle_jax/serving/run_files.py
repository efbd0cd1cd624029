"""The files that a batch run writes: those of one part of it, and of all."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path

from peagle_jax.errors import InputError
from peagle_jax.hosts import Part
from peagle_jax.serving.errors_file import errors_path
from peagle_jax.serving.results_file import settings_path


@dataclasses.dataclass(frozen=True)
class RunFiles:
    """What is written for one part: results, their settings beside them, and bad lines.

    every: what is written for all parts of the run, which is no input of it.
    """

    output: Path
    errors: Path
    every: tuple[Path, ...]


def run_files(output: Path, errors: Path | None, part: Part) -> RunFiles:
    """The files of `part` of a run that is given these names; `errors` None = beside the output.

    Raises InputError where two of them are one, or one could be no file, or where there are results
    of a run of another number of parts: these would be computed again.
    """
    for option, path in (("--output", output), ("--errors", errors)):
        if path is not None:
            _check_file(option, path)
    outputs = [one.file(output) for one in part.siblings()]
    bad = [
        errors_path(own) if errors is None else one.file(errors)
        for one, own in zip(part.siblings(), outputs, strict=True)
    ]
    every = (*outputs, *map(settings_path, outputs), *bad)
    if len({path.resolve() for path in every}) < len(every):
        raise InputError(f"--errors: found {errors}, expected another file than --output's")
    _check_same_count(output, part)
    return RunFiles(outputs[part.index], bad[part.index], every)


def _check_file(option: str, path: Path) -> None:
    """A device would be read without end, and a folder that is not there is noticed late."""
    if not path.name or path.is_dir():
        raise InputError(f"{option}: found {path}, a folder, expected a file")
    if path.exists() and not path.is_file():
        raise InputError(f"{option}: found {path}, which is no regular file, expected one")
    if not path.parent.is_dir():
        raise InputError(f"{option}: found {path}, expected a file in a folder that is there")
    if not os.access(path.parent, os.W_OK):
        raise InputError(f"{option}: found {path}, expected a file in a folder to write to")


def _check_same_count(output: Path, part: Part) -> None:
    name = re.compile(rf"{re.escape(output.stem)}-\d+-of-(\d+){re.escape(output.suffix)}")
    for path in sorted(output.parent.iterdir()):
        match = name.fullmatch(path.name)
        if match and int(match[1]) != part.count and path.stat().st_size:
            raise InputError(
                f"{path}: found results of a run of {int(match[1])} parts, expected "
                f"{part.count}, as this one has; another run needs another output file"
            )
