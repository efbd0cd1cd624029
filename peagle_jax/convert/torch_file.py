"""pytorch_model.bin files as named tensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from peagle_jax.convert.base_reader import Reader
from peagle_jax.errors import InputError


class PyTorchReader(Reader):
    """pytorch_model.bin files, through torch with `weights_only=True` alone.

    A pickle can run any code when it is loaded: without torch, or where torch's
    restricted unpickler refuses the file, so does this reader.
    """

    format = "pytorch"

    def __init__(self, path: Path, shards: list[Path], index: Mapping[str, str] | None = None):
        self.path = path
        self.files = shards
        self._tensors: dict[str, Any] = {}
        for shard in shards:
            for name, tensor in self._load(shard).items():
                if name in self._tensors:
                    raise self.fail(f"{name}: found in two files, expected once")
                self._tensors[name] = tensor
        for name in index or {}:
            if name not in self._tensors:
                raise self.fail(f"{name}: found in the index alone, expected it in a file")

    @staticmethod
    def _load(shard: Path) -> dict[str, Any]:
        try:
            import torch
        except ImportError:
            raise InputError(
                f"{shard}: found a PyTorch pickle and no torch to read it safely, "
                "expected safetensors, or torch installed"
            ) from None
        try:
            state = torch.load(shard, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:  # torch raises many kinds here, all meaning "not loadable"
            raise InputError(
                f"{shard}: found a file that torch.load(weights_only=True) refuses "
                f"({type(error).__name__}), expected plain tensors"
            ) from None
        if not isinstance(state, dict) or not all(
            isinstance(tensor, torch.Tensor) for tensor in state.values()
        ):
            raise InputError(f"{shard}: found no plain state dict, expected names to tensors")
        return state

    def names(self) -> list[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def dtype(self, name: str) -> np.dtype:
        torch_name = str(self._tensors[name].dtype).removeprefix("torch.")
        try:
            return np.dtype(ml_dtypes.bfloat16 if torch_name == "bfloat16" else torch_name)
        except TypeError:
            raise self.fail(f"{name}: found dtype {torch_name}, expected a plain one") from None

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        import torch

        rows = self._tensors[name][start:stop].contiguous()
        if rows.dtype == torch.bfloat16:  # NumPy has none: carry the bits over
            return rows.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        return rows.numpy()
