"""A tiny target on disk with its tokenizer, and answers for it: what `peagle train` is given."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from peagle_jax.config import BlockConfig, ModelConfig
from peagle_jax.convert import layouts
from peagle_jax.convert.export import write_huggingface
from peagle_jax.convert.in_memory import ArraysReader
from peagle_jax.convert.lazy_tensor import LazyTensor
from peagle_jax.convert.opening import Checkpoint
from peagle_jax.models import decoder
from peagle_jax.training.answers import tokenizer_sha256
from tests.training.folders import write_folder

VOCAB, EOS, MASK = 64, 1, 2
TARGET = ModelConfig(
    BlockConfig(32, 48, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=8),
    vocab_size=VOCAB,
    max_positions=128,
    tie_embeddings=True,
    eos_token_ids=(EOS,),
)
# Small enough for a step of milliseconds. `test_trainer` and `test_cli_train` change the rest.
CONFIG = """
[drafter]
num_draft_tokens = 3
draft_vocab_size = 40
[data]
length = 32
batch = 8
[optimizer]
learning_rate = 0.01
warmup_steps = 2
[train]
steps = 12
tensorboard = false
[mesh]
data = 1
[checkpoint]
every = 4
"""


def write_target(folder: Path) -> Path:
    """A Hugging Face folder: config.json, model.safetensors and tokenizer files."""
    folder.mkdir(parents=True)
    params = layouts.flatten(decoder.init(TARGET, jax.random.key(0)))
    arrays = {path: np.asarray(array) * 3 for path, array in params.items()}
    reader = ArraysReader(folder, arrays)
    tensors = {p: LazyTensor(reader, p, a.shape, a.dtype) for p, a in arrays.items()}
    write_huggingface(folder, Checkpoint("target", "hf", reader, TARGET, tensors), 128)
    words = {"<unk>": 0, "<eos>": EOS, "<reserved_0>": MASK}
    words |= {f"w{index}": index for index in range(3, VOCAB)}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["<unk>", "<eos>", "<reserved_0>"])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", eos_token="<eos>"
    )
    tokenizer.save_pretrained(folder)
    return folder


def write_answers(folder: Path, target: Path, count: int = 60, seed: int = 0) -> Path:
    """Answers that count upwards from the prompt's last token: easy to learn."""
    rng = np.random.default_rng(seed)
    answers = []
    for _ in range(count):
        start, size = rng.integers(3, VOCAB), rng.integers(4, 16)
        answer = 3 + (start - 3 + 1 + np.arange(size)) % (VOCAB - 3)
        answers.append(([*rng.integers(3, VOCAB, 3).tolist(), int(start)], answer.tolist()))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(target)
    return write_folder(
        folder, answers, vocab_size=VOCAB, tokenizer_sha256=tokenizer_sha256(tokenizer)
    )


def write_prompts(path: Path, count: int = 6) -> Path:
    """A prompts file of token ids."""
    rng = np.random.default_rng(9)
    lines = [json.dumps({"token_ids": rng.integers(3, VOCAB, 4).tolist()}) for _ in range(count)]
    path.write_text("\n".join(lines) + "\n")
    return path
