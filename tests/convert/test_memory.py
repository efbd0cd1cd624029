"""Conversion streams: its peak memory is measured in a process of its own, on 3 GiB."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from peagle_jax.convert.base_reader import row_chunks
from peagle_jax.convert.safetensors_file import Output, write_safetensors
from tests.convert.peak import PEAK
from tests.convert.tiny import BF16

GIB = 1 << 30
VOCAB, HIDDEN, LAYERS, INTERMEDIATE = 98304, 4096, 8, 8192
CONVERT = f"""{PEAK}
import json, sys
from peagle_jax.convert.conversion import convert
source, out, to, dtype = sys.argv[1:]
before = peak()
convert(source, out, to=to, dtype=dtype)
after = peak()
print(json.dumps([before, after]))
"""


def ones(shape: tuple[int, ...]) -> Iterator[np.ndarray]:
    for start, stop in row_chunks(shape, BF16, 1 << 24):
        yield np.ones((stop - start, *shape[1:]), BF16)


def write_target(folder: Path) -> None:
    """A BF16 Llama of 3 GiB, its largest tensors the embedding and the head of 0.75 GiB."""
    heads = HIDDEN // 128
    shapes: dict[str, tuple[int, ...]] = {}
    shapes |= dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), (VOCAB, HIDDEN))
    for i in range(LAYERS):
        layer = f"model.layers.{i}."
        for name in ("q", "k", "v", "o"):
            rows = HIDDEN // 8 if name in "kv" else HIDDEN
            shapes[f"{layer}self_attn.{name}_proj.weight"] = (rows, HIDDEN)
        shapes[f"{layer}mlp.gate_proj.weight"] = (INTERMEDIATE, HIDDEN)
        shapes[f"{layer}mlp.up_proj.weight"] = (INTERMEDIATE, HIDDEN)
        shapes[f"{layer}mlp.down_proj.weight"] = (HIDDEN, INTERMEDIATE)
    norms = [f"model.layers.{i}.{name}" for i in range(LAYERS)
             for name in ("input_layernorm", "post_attention_layernorm")]  # fmt: skip
    shapes |= {f"{name}.weight": (HIDDEN,) for name in [*norms, "model.norm"]}
    outputs = {name: Output(shape, BF16, ones(shape)) for name, shape in shapes.items()}
    write_safetensors(folder / "model.safetensors", outputs)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 8,
        "vocab_size": VOCAB,
    }
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.slow
@pytest.mark.parametrize(("to", "dtype"), [("orbax", "float32"), ("vllm", "bfloat16")])
def test_peak_memory(tmp_path: Path, to: str, dtype: str) -> None:
    source = tmp_path / "source"
    source.mkdir()
    write_target(source)
    size = (source / "model.safetensors").stat().st_size
    assert size > 3 * GIB
    done = subprocess.run(
        [sys.executable, "-c", CONVERT, str(source), str(tmp_path / "out"), to, dtype],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    before, after = json.loads(done.stdout)
    largest = VOCAB * HIDDEN * (4 if dtype == "float32" else 2)
    assert after < largest + GIB, (before, after)
    # What is really used on top of the libraries themselves: some pieces of a tensor.
    assert after - before < GIB // 2, (before, after)
