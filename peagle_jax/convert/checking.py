"""Names and shapes held against a manifest or a configuration, without weights."""

from __future__ import annotations

import dataclasses
import math
import os
from pathlib import Path
from typing import Any

import numpy as np

from peagle_jax.config import ModelConfig
from peagle_jax.convert import configs, differences, drafter_configs, mxfp4, opening, releases
from peagle_jax.convert.base_reader import Reader, read_json
from peagle_jax.convert.differences import Difference
from peagle_jax.convert.readers import open_reader
from peagle_jax.convert.releases import Release, TensorSpec
from peagle_jax.convert.safetensors_file import DTYPES
from peagle_jax.convert.sources import locate
from peagle_jax.errors import InputError

_CONFIG, _INDEX = "config.json", "model.safetensors.index.json"
_WEIGHTS = ("*.safetensors", "*.gguf", "pytorch_model*.bin", "manifest.json")


@dataclasses.dataclass(frozen=True)
class Report:
    """What a check found.

    Attributes:
        facts: (label, text) rows: what was held against what.
        differences: between the manifest and the header.
        problems: one-line reasons why it would not load.
    """

    facts: tuple[tuple[str, str], ...]
    differences: tuple[Difference, ...]
    problems: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether it would load, and differs in nothing that is verified."""
        return not self.problems and not any(d.verified for d in self.differences)


def check(
    reference: str | os.PathLike[str],
    source: str | os.PathLike[str] | None = None,
    target: str | os.PathLike[str] | ModelConfig | None = None,
) -> Report:
    """Holds a checkpoint's header against what its manifest or configuration asks for.

    Args:
        reference: a released repository that a manifest is known for, a manifest, a
            config.json, or a folder or repository with one.
        source: the checkpoint whose header is read; None = the reference's own files. Without
            any, its manifest alone is held against this version's networks.
        target: a drafter's target, whose configuration it must fit.

    Raises InputError where there is nothing to check against.
    """
    release, config, folder = _reference(reference)
    target_config = opening.open_config(target) if isinstance(target, str | os.PathLike) else target
    place = locate(source, weights=False) if source is not None else folder
    reader = _reader(place)
    if source is not None and reader is None:
        raise InputError(f"{place}: found no weights, expected some to check")
    names = _index_names(place) if reader is None else None
    facts = [("against", _origin(reference, release, config))]
    found: list[Difference] = []
    if reader is not None:
        facts.append(("checked", f"the header of {reader.path}"))
        if release is None and config is not None:
            reader.config = config
    elif names is not None:
        facts.append(("checked", f"the names in {place}/{_INDEX}"))
    else:
        facts.append(("checked", "no files: the description alone"))
    if release is not None:
        own = reader.config if reader is not None and source is not None else config
        found += differences.compare_config(release, own or {})
        header = differences.header_of(reader) if reader is not None else names
        found += differences.compare(release, header) if header is not None else []
        facts += _release_facts(release)
    subject = reader if reader is not None else _described(release, config)
    if subject is not None:
        problems, more = _would_load(subject, release, target_config)
    else:
        problems, more = _would_be_understood(config or {}, str(reference))
    return Report((*facts, *more), tuple(found), tuple(problems))


class DescribedReader(Reader):
    """The tensors of a description; their values, which nobody has, are zeros."""

    format = "safetensors"

    def __init__(self, path: Path, config: dict[str, Any], tensors: dict[str, TensorSpec]):
        self.path, self.files, self.config = path, [], config
        self._tensors = tensors

    def names(self) -> list[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape or ()

    def dtype(self, name: str) -> np.dtype:
        return DTYPES[self._tensors[name].dtype]

    def storage(self, name: str) -> str:
        return self._tensors[name].dtype

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        return np.zeros((stop - start, *self.shape(name)[1:]), self.dtype(name))


def _reference(
    reference: str | os.PathLike[str],
) -> tuple[Release | None, dict[str, Any] | None, Path | None]:
    """What is checked against: a manifest, a config.json, the folder with the files."""
    path = Path(reference).expanduser()
    if path.is_file() and path.suffix == ".json":
        read = read_json(path)
        if read.get("format") == releases.FORMAT:
            return releases.load(path), None, None
        return releases.find(path, path), read, path.parent
    known = releases.find(reference)
    if not path.exists() and known is not None:
        return known, None, None
    path = locate(reference, weights=False)
    folder = path if path.is_dir() else path.parent
    config = read_json(folder / _CONFIG) if (folder / _CONFIG).is_file() else None
    release = releases.find(reference, path)
    if config is None and release is None and _reader(path) is None:
        raise InputError(f"{path}: found neither config.json nor weights, expected one of them")
    return release, config, path


def _reader(place: Path | None) -> Reader | None:
    """The reader of what is there; None without weights, or with an index but not its shards."""
    if place is None or place.is_file():
        return None if place is None else open_reader(place)
    names = _index_names(place)
    if not any(any(place.glob(pattern)) for pattern in _WEIGHTS):
        return None
    if names is not None:
        shards = set(read_json(place / _INDEX)["weight_map"].values())
        if not all((place / shard).is_file() for shard in shards):
            return None
    return open_reader(place)


def _index_names(place: Path | None) -> dict[str, TensorSpec] | None:
    index = None if place is None else place / _INDEX
    if index is None or not index.is_file():
        return None
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise InputError(f"{index}: weight_map: found none, expected tensor names to files")
    return dict.fromkeys(weight_map, TensorSpec(None, ""))


def _described(release: Release | None, config: dict[str, Any] | None) -> Reader | None:
    """What a release would hold, with the sizes of `config` where there is one."""
    if release is None:
        return None
    release = release.scaled(**(config or {}))
    path = Path(release.repository) / "model.safetensors"
    return DescribedReader(path, dict(release.config), release.tensors())


def _would_load(
    subject: Reader, release: Release | None, target: ModelConfig | None
) -> tuple[list[str], list[tuple[str, str]]]:
    """Why it would not load; what it is if it would."""
    try:
        reader = mxfp4.dequantised(subject)
        kind = opening.kind_of(reader)
        layout = opening.layout_of(reader, kind)
        config = opening.config_of(reader, kind, layout, target, release=release)
        opened = opening.match(reader, kind, layout, config)
    except InputError as error:
        return [str(error)], []
    size = sum(math.prod(tensor.shape) for tensor in opened.tensors.values())
    num_bytes = sum(tensor.nbytes for tensor in opened.tensors.values())
    return [], [
        ("is", f"a {kind} in the layout {layout}"),
        ("parameters", f"{size:,} in {len(opened.tensors)} arrays"),
        ("converted", f"{num_bytes / 1e9:,.2f} GB"),
    ]


def _would_be_understood(
    config: dict[str, Any], where: str
) -> tuple[list[str], list[tuple[str, str]]]:
    """The same for a configuration alone."""
    if drafter_configs.is_drafter(config, []):
        return [], [("is", "a drafter; more can be told from its tensors alone")]
    try:
        built = configs.model_config(config, where)
    except InputError as error:
        return [str(error)], []
    return [], [("is", f"a target of {built.block.num_layers} layers")]


def _origin(
    reference: str | os.PathLike[str], release: Release | None, config: dict[str, Any] | None
) -> str:
    parts = [] if release is None else [f"the manifest of {release.repository}"]
    return " and ".join(parts + ([f"the config of {os.fspath(reference)}"] if config else []))


def _release_facts(release: Release) -> list[tuple[str, str]]:
    tensors = release.tensors()
    rows = [("manifest", f"{len(tensors):,} tensors")]
    return rows + [("unverified", f"{key}: {why}") for key, why in release.unverified.items()]
