"""Checkpoints of random values with a release's names, shapes and dtypes.

What can be shown about a release without its weights: that it converts, in how much memory,
and, scaled down, what its network computes.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from peagle_jax.convert.releases import Release, TensorSpec
from peagle_jax.convert.safetensors_file import DTYPES, Output, write_safetensors

SHARD_BYTES = 4 << 30
_POOL = 1 << 16  # values drawn for a tensor; a larger one repeats them
_CHUNK = 1 << 22  # values written at a time


def write_release(
    folder: Path, release: Release, seed: int = 0, shard_bytes: int = SHARD_BYTES
) -> Path:
    """Writes config.json and safetensors files, sharded with an index where there are several.

    Weights are normal with a standard deviation of 0.02, norms about 1, MXFP4 blocks any bits
    under scales of about 2 ** -7. `d2t` and `t2d` are the identity. No more than one chunk
    of a tensor is in memory.
    """
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(dict(release.config), indent=2)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")
    tensors = release.tensors()
    shards = _shards(tensors, shard_bytes)
    index: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        of_all = f"-{number:05d}-of-{len(shards):05d}" if len(shards) > 1 else ""
        file = f"model{of_all}.safetensors"
        outputs = {name: _output(name, tensors[name], seed) for name in names}
        write_safetensors(folder / file, outputs)
        index |= dict.fromkeys(names, file)
    if len(shards) > 1:
        total = sum(map(tensor_bytes, tensors.values()))
        whole = {"metadata": {"total_size": total}, "weight_map": index}
        path = folder / "model.safetensors.index.json"
        path.write_text(json.dumps(whole) + "\n", encoding="utf-8")
    return folder


def tensor_bytes(spec: TensorSpec) -> int:
    """Bytes of a tensor's values; 0 where its shape is not known."""
    return math.prod(spec.shape) * DTYPES[spec.dtype].itemsize if spec.shape is not None else 0


def _shards(tensors: Mapping[str, TensorSpec], shard_bytes: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    size = 0
    for name, spec in tensors.items():
        if shards[-1] and size + tensor_bytes(spec) > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += tensor_bytes(spec)
    return shards


def _output(name: str, spec: TensorSpec, seed: int) -> Output:
    assert spec.shape is not None
    return Output(spec.shape, DTYPES[spec.dtype], _chunks(name, spec, seed))


def _chunks(name: str, spec: TensorSpec, seed: int) -> Iterator[np.ndarray]:
    size = math.prod(spec.shape or ())
    pool = _values(name, spec.dtype, min(size, _POOL), seed)
    for start in range(0, size, _CHUNK):
        yield np.resize(pool, min(_CHUNK, size - start))


def _values(name: str, dtype: str, size: int, seed: int) -> np.ndarray:
    random = np.random.default_rng([seed, zlib.crc32(name.encode())])
    kind: np.dtype[Any] = DTYPES[dtype]
    if kind.kind == "i":
        return np.zeros(size, kind)
    if kind.kind == "b":
        return np.ones(size, kind)
    if name.endswith("_scales"):
        return random.integers(119, 122, size, np.uint8)
    if kind.kind == "u":
        return random.integers(0, 256, size, np.uint8)
    centre = 1.0 if "norm" in name else 0.0
    return (centre + 0.02 * random.standard_normal(size)).astype(kind)
