"""Conversion of a whole checkpoint: streamed, checked, and atomic."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from peagle_jax.config import ModelConfig
from peagle_jax.convert.export import write_huggingface
from peagle_jax.convert.manifest import config_to_json, source_files
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

    One piece of one tensor is in memory at a time. `out` appears under its name when it is
    whole; an interrupted conversion leaves nothing there.

    Args:
        source: as for `load_target` and `load_drafter`.
        out: the folder to make.
        target: a drafter's target, to check against; only its configuration is read.
        dtype: of the tensors written; None = the checkpoint's own.
        to: "orbax"; or "vllm", config.json and model.safetensors: a drafter in the layout
            that vLLM loads, a target in Hugging Face's.
        overwrite: replaces a folder that is there and not empty.
        aux_layer_shift: as for `load_drafter`.
        progress: called with (parameter path, tensors done, tensors in all); Orbax only.

    Raises InputError on a bad source, a drafter for another target, or an `out` in use.
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
    with atomic_folder(folder) as partial:
        max_positions = _max_positions(opened, target_config)
        if to == "vllm":
            write_huggingface(partial, opened, max_positions)
        else:
            from peagle_jax.convert import orbax_file  # here, as it costs an import of Orbax

            orbax_file.write_params(partial, opened.tensors, progress)
            orbax_file.write_manifest(partial, _manifest(opened, max_positions))
        if opened.kind == "target":
            for path in tokenizer_files(opened.reader.path):
                shutil.copy(path, partial / path.name)
    return folder


def _manifest(opened: Checkpoint, max_positions: int) -> dict[str, Any]:
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
            "files": source_files(opened.reader.files),
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


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """A folder to fill beside `folder`, which it becomes when all went well."""
    partial = folder.with_name(f".{folder.name}.partial")
    replaced = folder.with_name(f".{folder.name}.replaced")
    try:
        for stale in (partial, replaced):
            shutil.rmtree(stale, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        if folder.exists():
            folder.rename(replaced)
        partial.rename(folder)
        shutil.rmtree(replaced, ignore_errors=True)
    except OSError as error:
        raise InputError(
            f"{folder}: found {error.strerror or error}, expected a folder that can be written"
        ) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
