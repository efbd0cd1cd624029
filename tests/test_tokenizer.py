"""Tokenizers: the shipped one, folders, GGUF metadata, and what has none."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import pytest

from peagle_jax.convert import shipped
from peagle_jax.convert.sources import smollm2_gguf
from peagle_jax.errors import InputError
from peagle_jax.tokenizer import load_tokenizer

TEXT = "Hello, world! 12345 + 678\n\n\tdef f(x): # ünïcode 你好 <|im_end|>"
CHAT = [{"role": "user", "content": "hi"}]


def test_smollm2() -> None:
    tokenizer = load_tokenizer("smollm2")
    assert tokenizer("Hello, world!").input_ids == [19556, 28, 905, 17]
    prompt = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=False)
    assert prompt.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.eos_token_id == 2
    assert tokenizer.decode(tokenizer(TEXT).input_ids) == TEXT


def test_folder_and_a_file_in_it(tmp_path: Path) -> None:
    for file in shipped.path("smollm2-135m-instruct-tokenizer").iterdir():
        shutil.copy(file, tmp_path / file.name)
    (tmp_path / "model.safetensors").touch()
    expected = load_tokenizer("smollm2")(TEXT).input_ids
    assert load_tokenizer(tmp_path)(TEXT).input_ids == expected
    assert load_tokenizer(tmp_path / "model.safetensors")(TEXT).input_ids == expected


def test_other_classes_go_through_auto_tokenizer(tmp_path: Path) -> None:
    source = shipped.path("smollm2-135m-instruct-tokenizer")
    shutil.copy(source / "tokenizer.json", tmp_path)
    config = json.loads((source / "tokenizer_config.json").read_text())
    config["tokenizer_class"] = "GPT2Tokenizer"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    found = load_tokenizer(tmp_path)
    assert found("Hello, world!").input_ids == [19556, 28, 905, 17]


def test_no_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(InputError, match=r"found no tokenizer, expected tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_broken_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "TokenizersBackend"}')
    with pytest.raises(InputError, match="found tokenizer files that transformers refuses") as info:
        load_tokenizer(tmp_path)
    assert "\n" not in str(info.value)


def test_code_that_comes_with_a_model_is_not_run(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    (tmp_path / "evil.py").write_text(f"open({str(marker)!r}, 'w')\nclass Evil: pass\n")
    config = {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(InputError):
        load_tokenizer(tmp_path)
    assert not marker.exists()


class TestGGUF:
    """Built from metadata, for models that are not shipped."""

    @staticmethod
    def write(path: Path, **changes: Any) -> Path:
        model = json.loads(
            (shipped.path("smollm2-135m-instruct-tokenizer") / "tokenizer.json").read_text()
        )["model"]
        tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_tokenizer_model(changes.get("model", "gpt2"))
        writer.add_tokenizer_pre(changes.get("pre", "smollm"))
        writer.add_token_list(tokens)
        writer.add_token_types([3 if token.startswith("<|im_") else 1 for token in tokens])
        writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_add_bos_token(changes.get("add_bos", False))
        writer.add_chat_template("{{ messages[0].content }}!")
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        return path

    def test_equals_the_shipped_one(self, tmp_path: Path) -> None:
        found = load_tokenizer(self.write(tmp_path / "m.gguf"))
        expected = load_tokenizer("smollm2")(TEXT).input_ids
        assert found(TEXT).input_ids == expected
        assert found.decode(expected) == TEXT
        assert found.apply_chat_template(CHAT, tokenize=False) == "hi!"
        assert (found.bos_token, found.eos_token) == ("<|im_start|>", "<|im_end|>")

    def test_bos_is_put_in_front(self, tmp_path: Path) -> None:
        found = load_tokenizer(self.write(tmp_path / "m.gguf", add_bos=True))
        assert found("Hello, world!").input_ids == [1, 19556, 28, 905, 17]

    @pytest.mark.parametrize(
        ("pre", "pieces"),
        [
            ("gpt-2", ["ab", "1234", "'", "LL"]),
            ("smollm", ["ab", "1", "2", "3", "4", "'", "LL"]),
            ("llama-bpe", ["ab", "123", "4", "'LL"]),
            ("qwen2", ["ab", "1", "2", "3", "4", "'LL"]),
        ],
    )
    def test_pre_tokenizers(self, tmp_path: Path, pre: str, pieces: list[str]) -> None:
        found = load_tokenizer(self.write(tmp_path / "m.gguf", pre=pre))
        split = found.backend_tokenizer.pre_tokenizer.pre_tokenize_str("ab1234'LL")
        assert [piece for piece, _ in split] == pieces

    @pytest.mark.parametrize("changes", [{"model": "llama"}, {"pre": "tekken"}])
    def test_unknown_kinds_are_refused(self, tmp_path: Path, changes: dict[str, str]) -> None:
        path = self.write(tmp_path / "m.gguf", **changes)
        with pytest.raises(InputError, match=r"found .*expected 'gpt2' and one of gpt-2.*folder"):
            load_tokenizer(path)

    @pytest.mark.real_model
    def test_the_package_s_file_has_the_shipped_tokenizer(self) -> None:
        path = smollm2_gguf()
        assert path is not None
        assert load_tokenizer(path)(TEXT).input_ids == load_tokenizer("smollm2")(TEXT).input_ids
