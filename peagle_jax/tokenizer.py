"""The tokenizer of a model, always one of transformers' own.

Importing transformers takes most of a second, so it is imported inside.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from peagle_jax.convert import shipped
from peagle_jax.convert.base_reader import read_json
from peagle_jax.convert.sources import locate, tokenizer_files
from peagle_jax.errors import InputError

# Classes that are a tokenizer.json and nothing else: loaded without AutoTokenizer, whose
# import takes seconds.
_PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")

# How llama.cpp's pre-tokenizers (tokenizer.ggml.pre) split text before byte-level BPE. The
# library's own GPT-2 pattern is used where the value is None; `digits` splits digits one by one.
_LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PRE_TOKENIZERS: dict[str, tuple[str | None, bool]] = {
    "gpt-2": (None, False),
    "smollm": (None, True),
    "llama-bpe": (_LLAMA3_PATTERN, False),
    "qwen2": (_LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}"), False),
}
_CONTROL_TOKEN = 3  # llama.cpp's token_type of special tokens
_USER_TOKEN = 4


def load_tokenizer(source: str | os.PathLike[str]) -> Any:
    """A transformers tokenizer (`PreTrainedTokenizerBase`), with its chat template.

    Args:
        source: a folder with tokenizer files, "smollm2" (the files that ship with the
            package), a hub repository, a weights file beside tokenizer files, or a GGUF
            file with a byte-level BPE vocabulary of a known kind.

    Code that comes with a model is never run. Raises InputError where there is no tokenizer.
    """
    # Without torch, transformers advises that it has no models; only its tokenizers are used.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    if os.fspath(source) == "smollm2" and not Path(source).exists():
        return _from_folder(shipped.path("smollm2-135m-instruct-tokenizer"))
    path = locate(source, weights=False)
    files = tokenizer_files(path)
    if any(file.name in ("tokenizer.json", "tokenizer_config.json") for file in files):
        return _from_folder(files[0].parent)
    gguf = next(iter(sorted(path.glob("*.gguf"))), path) if path.is_dir() else path
    if gguf.suffix == ".gguf":
        return _from_gguf(gguf)
    raise InputError(f"{path}: found no tokenizer, expected tokenizer.json beside the weights")


def _from_folder(folder: Path) -> Any:
    config_path = folder / "tokenizer_config.json"
    name = read_json(config_path).get("tokenizer_class") if config_path.exists() else None
    try:
        if name in _PLAIN_CLASSES:
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers and tokenizers raise many kinds
        raise InputError(
            f"{folder}: found tokenizer files that transformers refuses "
            f"({' '.join(str(error).split())[:200]}), expected a whole tokenizer"
        ) from None


def _from_gguf(path: Path) -> Any:
    """Byte-level BPE ("gpt2") from GGUF metadata, as its pre-tokenizer splits text."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    from peagle_jax.convert.gguf_file import GGUFFileReader

    metadata = GGUFFileReader(path).metadata
    kind, pre = metadata("tokenizer.ggml.model"), metadata("tokenizer.ggml.pre", "gpt-2")
    if kind != "gpt2" or pre not in _PRE_TOKENIZERS:
        raise InputError(
            f"{path}: tokenizer.ggml.model, pre: found {kind!r}, {pre!r}, expected 'gpt2' and one "
            f"of {', '.join(_PRE_TOKENIZERS)}; give a folder with its tokenizer.json beside it"
        )
    tokens = metadata("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ", 1)) for merge in metadata("tokenizer.ggml.merges")]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    backend = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre == "llama-bpe")
    )
    pattern, digits = _PRE_TOKENIZERS[pre]
    split: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    if pattern:
        split.append(pre_tokenizers.Split(Regex(pattern), behavior="isolated"))
    split.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(split)
    backend.decoder = decoders.ByteLevel()
    types = metadata("tokenizer.ggml.token_type", [])
    for index, token_type in enumerate(types):
        if token_type in (_CONTROL_TOKEN, _USER_TOKEN):
            special = token_type == _CONTROL_TOKEN
            backend.add_tokens([AddedToken(tokens[index], special=special, normalized=False)])

    from transformers import PreTrainedTokenizerFast

    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    ids = {name: metadata(f"tokenizer.ggml.{key}_token_id") for key, name in names.items()}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        **{name: tokens[index] for name, index in ids.items() if index is not None},
    )
    tokenizer.chat_template = metadata("tokenizer.chat_template")
    if metadata("tokenizer.ggml.add_bos_token", False):
        _prepend_bos(tokenizer)
    return tokenizer


def _prepend_bos(tokenizer: Any) -> None:
    from tokenizers import processors

    bos = tokenizer.bos_token
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A",
        pair=f"{bos} $A {bos} $B",
        special_tokens=[(bos, tokenizer.bos_token_id)],
    )
