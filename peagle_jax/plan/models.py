"""Configurations of models by name, without their weights."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from peagle_jax.config import DrafterConfig, ModelConfig
from peagle_jax.convert import opening, releases
from peagle_jax.convert.checking import DescribedReader
from peagle_jax.convert.releases import Release
from peagle_jax.errors import InputError


@dataclasses.dataclass(frozen=True)
class Described:
    """A network's configuration, and what of it is a guess.

    packed_bytes: of a released checkpoint's own tensors, None where it is not known. guesses:
    config keys of a release that could not be verified. packed_experts: whether the checkpoint has
    its experts in MXFP4, None where a configuration alone does not tell.
    """

    config: ModelConfig | DrafterConfig
    packed_bytes: int | None = None
    guesses: tuple[str, ...] = ()
    packed_experts: bool | None = None


def describe_target(source: str) -> tuple[ModelConfig, Described]:
    """A target: a released repository that a manifest is known for, or what `peagle generate`
    takes, of which the small files are enough. Raises InputError as loading does."""
    release = _release(source, "target")
    if release is None:
        try:
            config = opening.open_config(source)
        except InputError as error:
            folder = Path(source).expanduser()
            if not folder.is_dir() or (folder / "config.json").exists():
                raise
            raise InputError(f"{error}; for a plan a config.json is enough") from None
        return config, Described(config, packed_experts=None if config.block.moe else False)
    found = _config(release, None)
    assert isinstance(found, ModelConfig)
    packed = release.config.get("quantization_config", {}).get("quant_method") == "mxfp4"
    unverified = tuple(release.unverified)
    return found, Described(found, release.num_bytes, unverified, packed_experts=packed)


def describe_drafter(source: str, target: ModelConfig) -> tuple[DrafterConfig, Described]:
    """A drafter, checked against its target; of files, tensor names and shapes are read too."""
    release = _release(source, "drafter")
    if release is None:
        config = opening.open_checkpoint(source, "drafter", target).config
        assert isinstance(config, DrafterConfig)
        return config, Described(config)
    found = _config(release, target)
    assert isinstance(found, DrafterConfig)
    return found, Described(found, release.num_bytes, tuple(release.unverified))


def _release(source: str, kind: str) -> Release | None:
    release = None if Path(source).expanduser().exists() else releases.find(source)
    return release if release is not None and release.kind == kind else None


def _config(release: Release, target: ModelConfig | None) -> ModelConfig | DrafterConfig:
    reader = DescribedReader(release.path, dict(release.config), release.tensors())
    layout = opening.layout_of(reader, release.kind)
    return opening.config_of(reader, release.kind, layout, target, release=release)
