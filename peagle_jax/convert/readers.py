"""The reader of a checkpoint file or folder, whatever its format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from peagle_jax.convert.base_reader import MANIFEST, Reader, read_json
from peagle_jax.errors import InputError
from peagle_jax.json_values import shown


def open_reader(path: Path) -> Reader:
    """The reader of a checkpoint file, or of the one checkpoint in a folder.

    A folder is searched for an Orbax checkpoint made by this package, then safetensors,
    then a GGUF file, then pytorch_model.bin. Raises InputError where there is none.
    """
    # The readers are imported where they are needed: each costs a library's import time.
    if path.is_file():
        return _open_file(path)
    if (path / MANIFEST).exists():
        from peagle_jax.convert.orbax_file import OrbaxReader

        return OrbaxReader(path)
    for stem, suffix in (("model", ".safetensors"), ("", ".gguf"), ("pytorch_model", ".bin")):
        index = path / f"{stem}{suffix}.index.json"
        if index.exists():
            return _with_configs(_open_shards(index, suffix), path)
        if stem and (path / f"{stem}{suffix}").exists():
            return _open_file(path / f"{stem}{suffix}")
        lone = sorted(path.glob(f"*{suffix}"))
        if len(lone) == 1:
            return _open_file(lone[0])
        if lone:
            raise InputError(
                f"{path}: found {len(lone)} {suffix} files and no index, expected one: name a file"
            )
    raise InputError(
        f"{path}: found no weights, expected model.safetensors (or its index), a .gguf file "
        "or pytorch_model.bin"
    )


def _open_file(path: Path) -> Reader:
    if path.suffix == ".gguf":
        from peagle_jax.convert.gguf_file import GGUFFileReader

        return GGUFFileReader(path)  # its metadata is its configuration
    kind = _sharded_kind(path.suffix)
    if kind is None:
        raise InputError(f"{path}: found suffix {path.suffix!r}, expected .safetensors or .gguf")
    return _with_configs(kind(path, [path]), path.parent)


def _open_shards(index_path: Path, suffix: str) -> Reader:
    weight_map = read_json(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError(
            f"{index_path}: weight_map: found {shown(weight_map)}, expected tensor names to files"
        )
    shards = sorted({index_path.parent / Path(name).name for name in weight_map.values()})
    for shard in shards:
        if not shard.is_file():
            raise InputError(f"{index_path}: {shard.name}: found no such shard, expected the file")
    kind = _sharded_kind(suffix)
    assert kind is not None
    return kind(index_path, shards, weight_map)


def _sharded_kind(suffix: str) -> Any:
    if suffix == ".safetensors":
        from peagle_jax.convert.safetensors_file import SafetensorsReader

        return SafetensorsReader
    if suffix == ".bin":
        from peagle_jax.convert.torch_file import PyTorchReader

        return PyTorchReader
    return None


def _with_configs(reader: Reader, folder: Path) -> Reader:
    for name in ("config", "generation_config"):
        path = folder / f"{name}.json"
        if path.exists():
            setattr(reader, name, read_json(path))
    return reader
