"""Checkpoints written back in PyTorch's world: config.json and safetensors."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from peagle_jax.config import DrafterConfig, ModelConfig
from peagle_jax.convert import expert_tensors, layouts
from peagle_jax.convert.config_writers import drafter_json, family_name, target_json
from peagle_jax.convert.folders import Journal
from peagle_jax.convert.lazy_tensor import LazyTensor
from peagle_jax.convert.opening import Checkpoint
from peagle_jax.convert.safetensors_file import (
    Output,
    in_shards,
    write_index,
    write_safetensors,
)

SHARD_BYTES = 4 << 30  # of a file: what a stopped conversion writes again at most


def write_huggingface(
    folder: Path,
    opened: Checkpoint,
    max_positions: int,
    advance: Callable[[str, int], None] = lambda path, num_bytes: None,
    journal: Journal | None = None,
) -> None:
    """Writes a drafter in vLLM's layout, a target in Hugging Face's.

    `max_positions` goes into a drafter's config.json, whose network has no limit itself.
    `advance(path, num_bytes)` is called as parameters are written. A file that the journal
    knows as done is not written again.
    """
    moved = 0

    def count(path: str, num_bytes: int) -> None:
        nonlocal moved
        moved += num_bytes
        advance(path, num_bytes)

    dtype = next(t.dtype.name for p, t in opened.tensors.items() if p.endswith("norm.scale"))
    outputs: dict[str, Output] = {}
    if isinstance(opened.config, ModelConfig):
        config = target_json(opened.config, dtype)
        rule = family_name(opened.config)[1].experts
        if rule is not None:
            outputs = _experts(opened, rule.form, count)
        paths = layouts.TARGET_PATHS
    else:
        config = drafter_json(opened.config, dtype, max_positions)
        paths = layouts.DRAFTER_PATHS
    for path, tensor in opened.tensors.items():
        name = layouts.tensor_name(path, paths)
        if not expert_tensors.is_special(name):
            outputs[name] = Output(tensor.shape, tensor.dtype, _chunks(path, tensor, count))
    if isinstance(opened.config, DrafterConfig):
        _to_vllm(outputs, opened.config, opened.tensors, count)
    shards = in_shards(outputs, SHARD_BYTES)
    for file, shard in shards.items():
        if journal is not None and file in journal.done:
            advance(file, journal.done[file])
            continue
        before = moved
        write_safetensors(folder / file, shard)
        if journal is not None:
            journal.add(file, moved - before)
    if len(shards) > 1:
        write_index(folder / "model.safetensors.index.json", shards)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _experts(
    opened: Checkpoint, form: expert_tensors.Form, advance: Callable[[str, int], None]
) -> dict[str, Output]:
    """The tensors of routers and experts, in a family's form."""
    paths = {layouts.tensor_name(path, layouts.TARGET_PATHS): path for path in opened.tensors}
    return expert_tensors.outputs(
        {name: opened.tensors[path] for name, path in paths.items()},
        form,
        lambda name, num_bytes: advance(paths[name], num_bytes),
    )


def _to_vllm(
    outputs: dict[str, Output],
    config: DrafterConfig,
    tensors: dict[str, LazyTensor],
    advance: Callable[[str, int], None],
) -> None:
    """The tensors that vLLM keeps in another form than the parameters do."""
    if "mask_hidden" in outputs:
        mask_hidden = outputs["mask_hidden"]
        shape = (1, 1, *mask_hidden.shape)
        outputs["mask_hidden"] = Output(shape, mask_hidden.dtype, mask_hidden.chunks)
    if "d2t" in outputs:
        path = "draft_to_target"
        ids = tensors[path].part().astype(np.int64)
        offsets = ids - np.arange(len(ids))
        used = np.zeros(config.vocab_size, np.bool_)
        used[ids] = True
        for name, array in (("d2t", offsets), ("t2d", used)):
            outputs[name] = Output(array.shape, array.dtype, [array])
        advance(path, tensors[path].nbytes)


def _chunks(
    path: str, tensor: LazyTensor, advance: Callable[[str, int], None]
) -> Iterator[np.ndarray]:
    for start, stop in tensor.chunks():
        rows = tensor.rows(start, stop)
        yield rows
        advance(path, rows.nbytes)
