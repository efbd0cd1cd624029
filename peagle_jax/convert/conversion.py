"""Conversion of a whole checkpoint: streamed, checked, and atomic."""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from peagle_jax.config import ModelConfig
from peagle_jax.convert.differences import hold_to_release
from peagle_jax.convert.export import write_huggingface
from peagle_jax.convert.folders import Journal, check_space, resumable_folder
from peagle_jax.convert.manifest import config_to_json, describe_file
from peagle_jax.convert.opening import Checkpoint, open_checkpoint, open_config
from peagle_jax.convert.sources import tokenizer_files
from peagle_jax.errors import InputError

Format = Literal["orbax", "vllm"]
Progress = Callable[[str, int, int], None]

_DEFAULT_MAX_POSITIONS = 2048  # Hugging Face's default for the Llama type


def convert(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    target: str | os.PathLike[str] | ModelConfig | None = None,
    dtype: Any = None,
    to: Format = "orbax",
    overwrite: bool = False,
    aux_layer_shift: int = 0,
    progress: Progress | None = None,
) -> Path:
    """Converts a target or drafter, and gives the folder written.

    A piece or two of one tensor are in memory at a time. `out` appears under its name when it
    is whole. A conversion that was stopped is gone on with by the next call of the same kind:
    what it has written, tensors for Orbax and whole files for vLLM, is kept beside `out`, in
    .OUT.partial, until then.

    Args:
        source: as for `load_target` and `load_drafter`.
        out: the folder to make.
        target: a drafter's target, to check against; only its configuration is read.
        dtype: of the tensors written; None = the checkpoint's own.
        to: "orbax"; or "vllm", config.json and safetensors, in files of 4 GiB: a drafter in
            the layout that vLLM loads, a target in Hugging Face's.
        overwrite: replaces a folder that is there and not empty.
        aux_layer_shift: as for `load_drafter`.
        progress: called with (what was just done, bytes done, bytes in all): tensors
            written and, for Orbax, source files hashed.

    Raises InputError on a bad source, a drafter for another target, an `out` in use, or too
    little space on its disk. Warns where a release known by its manifest is not as that says.
    """
    if to not in ("orbax", "vllm"):
        raise InputError(f"to: found {to!r}, expected orbax or vllm")
    folder = Path(out).expanduser().absolute()
    _check_free(folder, overwrite)
    target_config = open_config(target) if isinstance(target, str | os.PathLike) else target
    opened = open_checkpoint(
        source, target_config=target_config, dtype=dtype, aux_layer_shift=aux_layer_shift
    )
    if opened.kind == "target" and target is not None:
        raise opened.reader.fail("found a target, expected a drafter, as a target was given")
    if any(folder == path or folder in path.absolute().parents for path in opened.reader.files):
        raise InputError(f"{folder}: found the source inside, expected another output folder")
    if opened.release is not None and opened.layout not in ("orbax", "gguf"):
        hold_to_release(opened.release, opened.reader, source)
    max_positions = _max_positions(opened, target_config)
    meter = _Meter(opened, progress)
    plan = _plan(opened, max_positions, to)
    with resumable_folder(folder, plan) as journal:
        check_space(folder, meter.num_bytes - _bytes_done(journal, opened, to))
        if to == "vllm":
            write_huggingface(journal.folder, opened, max_positions, meter.advance, journal)
        else:
            _write_orbax(journal, opened, max_positions, meter)
        _copy_tokenizer(opened, journal.folder)
    return folder


def _bytes_done(journal: Journal, opened: Checkpoint, to: Format) -> int:
    """What is on the disk already: whole files for vLLM, whole tensors for Orbax."""
    if to == "vllm":
        return sum(journal.done.values())
    return sum(tensor.nbytes for path, tensor in opened.tensors.items() if path in journal.done)


class _Meter:
    """Counts bytes for a progress callback."""

    def __init__(self, opened: Checkpoint, progress: Progress | None):
        self.num_bytes = sum(tensor.nbytes for tensor in opened.tensors.values())
        self._total = self.num_bytes
        self._done = 0
        self._progress = progress

    def expect(self, num_bytes: int) -> None:
        """Adds work beyond the tensors."""
        self._total += num_bytes

    def advance(self, what: str, num_bytes: int) -> None:
        self._done += num_bytes
        if self._progress is not None:
            self._progress(what, self._done, self._total)


def _write_orbax(journal: Journal, opened: Checkpoint, max_positions: int, meter: _Meter) -> None:
    from peagle_jax.convert import orbax_file  # here, as it costs an import of Orbax

    files = opened.reader.files
    meter.expect(sum(path.stat().st_size for path in files))
    orbax_file.write_params(journal, opened.tensors, meter.advance)
    for path in files:
        if path.name in journal.done:
            meter.advance(path.name, path.stat().st_size)
        else:
            advance = functools.partial(meter.advance, path.name)
            journal.add(path.name, describe_file(path, advance))
    described = [journal.done[path.name] for path in files]
    orbax_file.write_manifest(journal.folder, _manifest(opened, max_positions, described))


def _plan(opened: Checkpoint, max_positions: int, to: Format) -> dict[str, Any]:
    """What must not have changed for a conversion to be gone on with."""
    files = [(str(path), path.stat()) for path in opened.reader.files]
    return {
        "to": to,
        "manifest": _manifest(opened, max_positions, []),
        "files": [(path, stat.st_size, stat.st_mtime_ns) for path, stat in files],
    }


def _copy_tokenizer(opened: Checkpoint, folder: Path) -> None:
    if opened.kind == "target":
        for path in tokenizer_files(opened.reader.path):
            shutil.copy(path, folder / path.name)


def _manifest(
    opened: Checkpoint, max_positions: int, files: list[dict[str, Any]]
) -> dict[str, Any]:
    return {
        "kind": opened.kind,
        "config": config_to_json(opened.config),
        "max_position_embeddings": max_positions,
        "tensors": {
            path: {"shape": list(tensor.shape), "dtype": tensor.dtype.name}
            for path, tensor in opened.tensors.items()
        },
        "source": {
            "layout": opened.layout,
            "format": opened.reader.format,
            "files": files,
        },
    }


def _max_positions(opened: Checkpoint, target: ModelConfig | None) -> int:
    if isinstance(opened.config, ModelConfig):
        return opened.config.max_positions
    raw = opened.reader.config or {}
    inner = raw.get("transformer_layer_config", raw)
    known = target.max_positions if target is not None else _DEFAULT_MAX_POSITIONS
    return int(inner.get("max_position_embeddings") or known)


def _check_free(folder: Path, overwrite: bool) -> None:
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder}: found a file, expected a folder to make")
    if folder.is_dir() and any(folder.iterdir()) and not overwrite:
        raise InputError(f"{folder}: found a folder that is not empty, expected a new one")
