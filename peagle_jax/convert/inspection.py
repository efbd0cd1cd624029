"""What a checkpoint is, before anyone loads it."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import numpy as np

from peagle_jax.config import ModelConfig
from peagle_jax.convert import differences, opening, releases
from peagle_jax.convert.base_reader import Reader
from peagle_jax.convert.differences import Difference
from peagle_jax.convert.drafter_configs import Layout
from peagle_jax.convert.manifest import config_to_json
from peagle_jax.convert.releases import Release
from peagle_jax.convert.sources import Kind, locate
from peagle_jax.errors import InputError


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """One tensor as its file has it: `dtype` names the storage, e.g. "BF16" or "Q4_1"."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int


@dataclasses.dataclass(frozen=True)
class Inspection:
    """What `inspect` found out. `config` is None where it could not be understood.

    `problems` are the one-line reasons why loading would fail; none = it would load, as far
    as can be told without reading the weights. `num_parameters` counts elements of
    floating-point tensors, `nbytes` the bytes of all tensors in the files. `release` is the
    released checkpoint that it is by its name, `differences` what it has not as that one's
    manifest says.
    """

    source: str
    kind: Kind
    layout: Layout | None
    format: str
    files: tuple[str, ...]
    method: str | None
    config: dict[str, Any] | None
    tensors: tuple[TensorInfo, ...]
    dtypes: dict[str, int]
    num_parameters: int
    nbytes: int
    problems: tuple[str, ...]
    release: str | None
    differences: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return dataclasses.asdict(self)

    def summary(self) -> list[tuple[str, str]]:
        """(label, value) rows for a table."""
        rows = [
            ("source", self.source),
            ("kind", self.kind if self.method is None else f"{self.kind} ({self.method})"),
            ("layout", f"{self.layout or 'not understood'}, {self.format}"),
            ("tensors", f"{len(self.tensors)}: " + ", ".join(
                f"{count} {dtype}" for dtype, count in self.dtypes.items()
            )),
            ("parameters", f"{self.num_parameters:,}"),
            ("size", f"{self.nbytes / 1e6:,.1f} MB in {len(self.files)} file(s)"),
        ]  # fmt: skip
        if self.release is not None:
            differs = f"{len(self.differences)} differences: peagle convert --check"
            as_said = "as its manifest says" if not self.differences else differs
            rows.append(("release", f"{self.release}, {as_said}"))
        rows += [(key, _text(value)) for key, value in _flat(self.config or {}).items()]
        return rows + [("problem", problem) for problem in self.problems]


def inspect(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str] | ModelConfig | None = None,
    kind: Kind = "target",
) -> Inspection:
    """Looks at a checkpoint without reading its weights.

    Args:
        source: as for `load_target` and `load_drafter`.
        target: a drafter's target, to check against.
        kind: what the alias "smollm2" stands for.

    Raises InputError where there is no readable checkpoint; whatever else is wrong with it
    is in `problems`.
    """
    path = locate(source, kind)
    reader, release = opening.open_source(path), releases.find(source, path)
    found = opening.kind_of(reader)
    target_config = opening.open_config(target) if isinstance(target, str | os.PathLike) else target
    problems, config, layout, method = [], None, None, None
    try:
        layout = opening.layout_of(reader, found)
        parsed = opening.config_of(reader, found, layout, target_config, release=release)
        config = config_to_json(parsed)
        method = None if isinstance(parsed, ModelConfig) else parsed.method
        opening.match(reader, found, layout, parsed)
    except InputError as error:
        problems.append(str(error))
    tensors = tuple(
        TensorInfo(n, reader.shape(n), reader.storage(n), reader.nbytes(n)) for n in reader.names()
    )
    dtypes: dict[str, int] = {}
    for tensor in tensors:
        dtypes[tensor.dtype] = dtypes.get(tensor.dtype, 0) + 1
    return Inspection(
        source=os.fspath(source),
        kind=found,
        layout=layout,
        format=reader.format,
        files=tuple(str(path) for path in reader.files),
        method=method,
        config=config,
        tensors=tensors,
        dtypes=dtypes,
        num_parameters=sum(
            int(np.prod(t.shape, dtype=np.int64))
            for t in tensors
            if reader.dtype(t.name).kind not in "biu"
        ),
        nbytes=sum(tensor.nbytes for tensor in tensors),
        problems=tuple(problems),
        release=None if release is None else release.repository,
        differences=tuple(map(str, _differences(release, reader))),
    )


def _differences(release: Release | None, reader: Reader) -> list[Difference]:
    if release is None or reader.format not in ("safetensors", "pytorch"):
        return []
    return differences.compare_config(release, reader.config or {}) + differences.compare(
        release, differences.header_of(reader)
    )


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def _text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)
