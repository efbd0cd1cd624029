"""Drafters that are in memory, written as checkpoints."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jax
import numpy as np

from peagle_jax.config import DrafterConfig
from peagle_jax.convert import layouts
from peagle_jax.convert.base_reader import Reader
from peagle_jax.convert.export import write_huggingface
from peagle_jax.convert.folders import atomic_folder
from peagle_jax.convert.lazy_tensor import LazyTensor
from peagle_jax.convert.opening import Checkpoint


class ArraysReader(Reader):
    """Arrays by dotted parameter path, as a checkpoint's tensors."""

    format = "memory"

    def __init__(self, path: Path, arrays: dict[str, np.ndarray]) -> None:
        self.path = path
        self.files = []
        self._arrays = arrays

    def names(self) -> list[str]:
        return list(self._arrays)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._arrays[name].shape

    def dtype(self, name: str) -> np.dtype:
        return self._arrays[name].dtype

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        return self._arrays[name][start:stop]


def write_drafter(
    out: str | os.PathLike[str], config: DrafterConfig, params: Any, max_positions: int
) -> Path:
    """Writes a drafter as config.json and model.safetensors, the layout that vLLM loads.

    The folder appears, or takes the place of the one before, when it is whole.

    Args:
        params: the parameters of `config`, a nested dict of arrays; they keep their dtypes.
        max_positions: the target's context, for config.json.

    Raises InputError on NaN or Inf, and on a folder that cannot be written.
    """
    folder = Path(out).expanduser().absolute()
    arrays = {path: np.asarray(jax.device_get(a)) for path, a in layouts.flatten(params).items()}
    reader = ArraysReader(folder, arrays)
    tensors = {p: LazyTensor(reader, p, array.shape, array.dtype) for p, array in arrays.items()}
    with atomic_folder(folder) as partial:
        write_huggingface(
            partial, Checkpoint("drafter", "vllm", reader, config, tensors), max_positions
        )
    return folder
