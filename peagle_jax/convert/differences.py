"""How a checkpoint's header differs from what its release's manifest says."""

from __future__ import annotations

import dataclasses
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from peagle_jax.convert.base_reader import Reader
from peagle_jax.convert.releases import Release, TensorSpec
from peagle_jax.errors import InputError

_NOTHING = "none"
_IN_A_MESSAGE = 3  # differences named in one line


@dataclasses.dataclass(frozen=True)
class Difference:
    """One difference, of `count` tensors that are alike but for the numbers in their names.

    `verified`: False where the manifest's side of it is a guess.
    """

    name: str
    expected: str
    found: str
    count: int
    verified: bool

    def __str__(self) -> str:
        times = f" ({self.count} of them)" if self.count > 1 else ""
        return f"{self.name}{times}: found {self.found}, expected {self.expected}"


def header_of(reader: Reader) -> dict[str, TensorSpec]:
    """Name -> shape and dtype of the tensors in the files."""
    stored = reader.stored()
    return {name: TensorSpec(stored.shape(name), stored.storage(name)) for name in stored.names()}


def compare(release: Release, found: Mapping[str, TensorSpec]) -> list[Difference]:
    """Every tensor that is missing, unexpected, or of another shape or dtype."""
    expected = release.tensors()
    names_known = all(spec.verified for spec in expected.values())
    groups: dict[tuple[str, str, str, bool], int] = {}
    for name in (*expected, *(name for name in found if name not in expected)):
        wanted, got = expected.get(name), found.get(name)
        if wanted is not None and got is not None and _agree(wanted, got):
            continue
        verified = names_known if wanted is None else wanted.verified
        key = (re.sub(r"(?<=\.)\d+(?=\.)", "*", name), _text(wanted), _text(got), verified)
        groups[key] = groups.get(key, 0) + 1
    return [
        Difference(name, wanted, got, count, verified)
        for (name, wanted, got, verified), count in groups.items()
    ]


def compare_config(release: Release, config: Mapping[str, Any]) -> list[Difference]:
    """The keys of config.json whose values differ; one that is absent means its default."""
    differing = [
        key for key, value in release.config.items() if key in config and config[key] != value
    ]
    return [
        Difference(
            name=f"config.json: {key}",
            expected=str(release.config[key]),
            found=str(config[key]),
            count=1,
            verified=key not in release.unverified,
        )
        for key in differing
    ]


def hold_to_release(release: Release, reader: Reader, source: str | os.PathLike[str]) -> None:
    """Compares a checkpoint that is about to be read with what its release holds.

    A difference is an error where the user named the repository and the manifest's side is
    verified. Elsewhere the checkpoint is right: a warning names the difference.
    """
    found = compare_config(release, reader.config or {}) + compare(release, header_of(reader))
    wrong = [difference for difference in found if difference.verified]
    if wrong and release.is_named(source):
        raise InputError(
            f"{reader.path}: {_listed(wrong)} (the manifest of {release.repository}); "
            "to read it as it is, name its folder"
        )
    if found:
        warnings.warn(
            f"{reader.path}: differs from the manifest of {release.repository}, and is read as "
            f"its own header says: {_listed(found)}",
            stacklevel=2,
        )


def table(differences: Sequence[Difference]) -> list[str]:
    """The differences as the aligned lines of a table."""
    rows = [("", "expected", "found", "")]
    for d in differences:
        times = f" x {d.count}" if d.count > 1 else ""
        rows.append((d.name + times, d.expected, d.found, "" if d.verified else "not verified"))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return [
        "  ".join(
            [*(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=False)), row[3]]
        ).rstrip()
        for row in rows
    ]


def _agree(expected: TensorSpec, found: TensorSpec) -> bool:
    """Where the shape is not known, the dtype is not either."""
    return found.shape is None or (found.shape, found.dtype) == (expected.shape, expected.dtype)


def _text(spec: TensorSpec | None) -> str:
    if spec is None:
        return _NOTHING
    return "a tensor" if spec.shape is None else f"{spec.dtype} {list(spec.shape)}"


def _listed(differences: Sequence[Difference]) -> str:
    more = len(differences) - _IN_A_MESSAGE
    shown = "; ".join(map(str, differences[:_IN_A_MESSAGE]))
    return shown + (f"; and {more} more (peagle convert --check lists them)" if more > 0 else "")
