"""What the released checkpoints hold: manifests in checkpoints/manifests.

A manifest has a release's config.json and a table of its tensors: names with {layer} and
{expert} in them, shapes as products of config values, dtypes as safetensors names them. So a
file stays small, and the same table gives the tensors of a scaled-down copy. Facts that
could not be verified are listed with the reason: where a checkpoint differs in one of those,
the checkpoint is right.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from peagle_jax.config import ModelConfig
from peagle_jax.convert import shipped
from peagle_jax.convert.base_reader import read_json
from peagle_jax.errors import InputError

FOLDER = "manifests"
FORMAT, FORMAT_VERSION = "peagle_jax release", 1
TENSORS = "tensors"  # the key of `unverified` that stands for all names

_INDEX = re.compile(r"\{(layer|expert)(?::(\d+))?\}")  # {layer:1} starts at 1
_COUNTS = {"layer": ("num_hidden_layers",), "expert": ("num_experts", "num_local_experts")}
_SIZE = re.compile(r"[*/]?[^*/]+")
_HUB_CACHE = re.compile(r"models--(.+)--(.+)")


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """A tensor's shape, None where only its name is known, and dtype ("BF16").

    `verified`: False where its name or a size in it is a guess.
    """

    shape: tuple[int, ...] | None
    dtype: str
    verified: bool = True


@dataclasses.dataclass(frozen=True)
class Release:
    """A released checkpoint, as its manifest describes it.

    Attributes:
        repository: its name on the hub, "org/name".
        also: other repositories of the same shape.
        target: the repository of a drafter's target.
        num_tensors, num_bytes: of all tensors, where published: what the table must add up to.
        config: its config.json.
        table: (name, shape, dtype) rows, as the manifest writes them.
        unverified: key of `config`, or "tensors" for all names -> why it is a guess.
        path: the manifest.
    """

    repository: str
    kind: Literal["target", "drafter"]
    config: Mapping[str, Any]
    table: tuple[tuple[str, str, str], ...]
    path: Path
    also: tuple[str, ...] = ()
    target: str | None = None
    num_tensors: int | None = None
    num_bytes: int | None = None
    unverified: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def tensors(self) -> dict[str, TensorSpec]:
        """Every tensor's name -> its shape and dtype."""
        found = {}
        for pattern, shape, dtype in self.table:
            spec = TensorSpec(self._shape(shape), dtype, self._is_verified(shape))
            for name in self._names(pattern):
                found[name] = spec
        return found

    def scaled(self, **values: Any) -> Release:
        """The same release with other config values: fewer layers, narrower, fewer experts.

        `layer_types` is cut to the layers there are.
        """
        config = {**self.config, **values}
        if "layer_types" in config:
            config["layer_types"] = config["layer_types"][: config["num_hidden_layers"]]
        return dataclasses.replace(self, config=config, num_tensors=None, num_bytes=None)

    def is_named(self, source: str | os.PathLike[str]) -> bool:
        """Whether the user named this very repository, not a folder called like it."""
        return os.fspath(source).lower() in self._repositories()

    def check_target(self, target: ModelConfig, where: str) -> None:
        """Raises InputError unless `target` has the shape of this drafter's own target.

        Two targets may agree in width and vocabulary, and in every tensor of their drafters:
        gpt-oss-20b and gpt-oss-120b do.
        """
        made_for = find(self.target) if self.target else None
        if made_for is None:
            return
        found = {
            "num_hidden_layers": target.block.num_layers,
            "hidden_size": target.block.hidden_size,
            "vocab_size": target.vocab_size,
        }
        for key, value in found.items():
            if value != made_for.config[key]:
                raise InputError(
                    f"{where}: found a drafter for {self.target} ({key} {made_for.config[key]}), "
                    f"expected one for a target with {key} {value}"
                )

    def _repositories(self) -> list[str]:
        return [repository.lower() for repository in (self.repository, *self.also)]

    def _names(self, pattern: str) -> list[str]:
        indices = list(_INDEX.finditer(pattern))
        ranges = [range(int(m[2] or 0), self._count(m[1])) for m in indices]
        template = _INDEX.sub("{}", pattern)
        return [template.format(*values) for values in itertools.product(*ranges)]

    def _count(self, kind: str) -> int:
        return int(next(self.config[key] for key in _COUNTS[kind] if key in self.config))

    def _shape(self, text: str) -> tuple[int, ...]:
        return tuple(self._size(size) for size in text.split())

    def _size(self, text: str) -> int:
        size = 1
        for part in _SIZE.findall(text):
            value = self._value(part.lstrip("*/"))
            if part.startswith("/") and size % value:
                raise InputError(
                    f"{self.path}: {text}: found {size} / {value}, expected a whole number"
                )
            size = size // value if part.startswith("/") else size * value
        return size

    def _value(self, name: str) -> int:
        if name.isdigit():
            return int(name)
        if not isinstance(self.config.get(name), int):
            raise InputError(
                f"{self.path}: {name}: found {self.config.get(name)!r}, expected a whole number"
            )
        return int(self.config[name])

    def _is_verified(self, shape: str) -> bool:
        used = set(re.split(r"[*/\s]", shape))
        return TENSORS not in self.unverified and not used & set(self.unverified)


def load(path: Path) -> Release:
    """Reads a manifest. Raises InputError where it is not one."""
    read = read_json(path)
    version = (read.get("format"), read.get("format_version"))
    if version != (FORMAT, FORMAT_VERSION):
        raise InputError(
            f"{path}: format, format_version: found {version}, expected {(FORMAT, FORMAT_VERSION)}"
        )
    try:
        return Release(
            repository=read["repository"],
            also=tuple(read.get("also", ())),
            kind=read["kind"],
            target=read.get("target"),
            num_tensors=read.get("num_tensors"),
            num_bytes=read.get("num_bytes"),
            config=read["config"],
            table=tuple((name, shape, dtype) for name, shape, dtype in read["tensors"]),
            unverified=read.get("unverified", {}),
            path=path,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path}: found no {error}, expected a whole manifest") from None


@functools.cache
def shipped_releases() -> tuple[Release, ...]:
    """The manifests that come with the package."""
    return tuple(load(path) for path in sorted(shipped.path(FOLDER).glob("*.json")))


def find(source: str | os.PathLike[str], path: Path | None = None) -> Release | None:
    """The release that a source is, None where it is none that is known.

    Args:
        source: what the user named: a repository, in any case of its letters.
        path: the local copy, known by a folder's name: the repository's own or last part, or
            what the hub's cache calls it. A checkpoint file stands for its folder.
    """
    names = {os.fspath(source).lower()}
    if path is not None:
        folder = path.absolute() if path.is_dir() else path.absolute().parent
        names.add(folder.name.lower())
        cached = [_HUB_CACHE.fullmatch(part) for part in folder.parts]
        names |= {f"{match[1]}/{match[2]}".lower() for match in cached if match}
    for release in shipped_releases():
        for repository in release._repositories():
            if repository in names or repository.partition("/")[2] in names:
                return release
    return None
