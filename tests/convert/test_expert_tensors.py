"""Experts in both forms of checkpoints: the same parameters, and back again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from peagle_jax.config import ModelConfig
from peagle_jax.convert.checkpoint import load_target
from peagle_jax.convert.configs import model_config
from peagle_jax.convert.conversion import convert
from peagle_jax.convert.layouts import flatten
from peagle_jax.convert.opening import open_checkpoint
from peagle_jax.errors import InputError
from peagle_jax.models import decoder
from tests.convert.tiny import write_checkpoint

HIDDEN, WIDE, EXPERTS, VOCAB = 16, 12, 3, 20
SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": WIDE,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "vocab_size": VOCAB,
    "num_experts_per_tok": 2,
}
QWEN3_MOE = {
    **SIZES,
    "architectures": ["Qwen3MoeForCausalLM"],
    "intermediate_size": 24,
    "moe_intermediate_size": WIDE,
    "num_experts": EXPERTS,
    "mlp_only_layers": [0],
}
GPT_OSS = {
    **SIZES,
    "architectures": ["GptOssForCausalLM"],
    "num_local_experts": EXPERTS,
    "sliding_window": 4,
}


def stored(config: dict[str, Any]) -> dict[str, np.ndarray]:
    """A checkpoint's tensors under the names and shapes that Hugging Face's classes give them."""
    rng = np.random.default_rng(0)
    gpt_oss = config is GPT_OSS
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCAB, HIDDEN),
    }
    for i in range(2):
        layer = f"model.layers.{i}."
        for name, rows in {"q": 16, "k": 8, "v": 8}.items():
            shapes[f"{layer}self_attn.{name}_proj.weight"] = (rows, HIDDEN)
            if gpt_oss:
                shapes[f"{layer}self_attn.{name}_proj.bias"] = (rows,)
        shapes[f"{layer}self_attn.o_proj.weight"] = (HIDDEN, 16)
        shapes[f"{layer}input_layernorm.weight"] = (HIDDEN,)
        shapes[f"{layer}post_attention_layernorm.weight"] = (HIDDEN,)
        if gpt_oss:
            shapes |= {
                f"{layer}self_attn.o_proj.bias": (HIDDEN,),
                f"{layer}self_attn.sinks": (2,),
                f"{layer}mlp.router.weight": (EXPERTS, HIDDEN),
                f"{layer}mlp.router.bias": (EXPERTS,),
                f"{layer}mlp.experts.gate_up_proj": (EXPERTS, HIDDEN, 2 * WIDE),
                f"{layer}mlp.experts.gate_up_proj_bias": (EXPERTS, 2 * WIDE),
                f"{layer}mlp.experts.down_proj": (EXPERTS, WIDE, HIDDEN),
                f"{layer}mlp.experts.down_proj_bias": (EXPERTS, HIDDEN),
            }
            continue
        shapes |= {f"{layer}self_attn.{n}_norm.weight": (8,) for n in "qk"}
        names, wide = [""], 24
        if i == 1:
            shapes[f"{layer}mlp.gate.weight"] = (EXPERTS, HIDDEN)
            names, wide = [f"experts.{e}." for e in range(EXPERTS)], WIDE
        for name in names:
            shapes[f"{layer}mlp.{name}gate_proj.weight"] = (wide, HIDDEN)
            shapes[f"{layer}mlp.{name}up_proj.weight"] = (wide, HIDDEN)
            shapes[f"{layer}mlp.{name}down_proj.weight"] = (HIDDEN, wide)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


CONFIGS = {"separate": QWEN3_MOE, "interleaved": GPT_OSS}


def test_separate_tensors_are_stacked(tmp_path: Path) -> None:
    tensors = stored(QWEN3_MOE)
    _, params = load_target(write_checkpoint(tmp_path, QWEN3_MOE, tensors))
    dense = params["layers_0"]["mlp"]["up_proj"]["kernel"]
    assert np.array_equal(dense, tensors["model.layers.0.mlp.up_proj.weight"])
    mlp = params["layers_1"]["mlp"]
    assert np.array_equal(mlp["router"]["kernel"], tensors["model.layers.1.mlp.gate.weight"])
    for module in ("gate_proj", "up_proj", "down_proj"):
        for e in range(EXPERTS):
            expected = tensors[f"model.layers.1.mlp.experts.{e}.{module}.weight"]
            assert np.array_equal(mlp["experts"][module]["kernel"][e], expected)


def test_interleaved_tensors_are_taken_apart(tmp_path: Path) -> None:
    tensors = stored(GPT_OSS)
    _, params = load_target(write_checkpoint(tmp_path, GPT_OSS, tensors))
    stem = "model.layers.1.mlp.experts."
    experts = params["layers_1"]["mlp"]["experts"]
    for turn, module in enumerate(("gate_proj", "up_proj")):
        kernel = tensors[f"{stem}gate_up_proj"][:, :, turn::2].swapaxes(1, 2)
        assert np.array_equal(experts[module]["kernel"], kernel)
        assert np.array_equal(
            experts[module]["bias"], tensors[f"{stem}gate_up_proj_bias"][:, turn::2]
        )
    down = tensors[f"{stem}down_proj"].swapaxes(1, 2)
    assert np.array_equal(experts["down_proj"]["kernel"], down)
    assert np.array_equal(experts["down_proj"]["bias"], tensors[f"{stem}down_proj_bias"])
    sinks = tensors["model.layers.1.self_attn.sinks"]
    assert np.array_equal(params["layers_1"]["self_attn"]["sinks"], sinks)


@pytest.mark.parametrize("form", CONFIGS)
def test_there_and_back(tmp_path: Path, form: str) -> None:
    """Hugging Face's form to Orbax and back: the same bytes under the same names."""
    tensors = stored(CONFIGS[form])
    source = write_checkpoint(tmp_path / "source", CONFIGS[form], tensors)
    middle = convert(source, tmp_path / "orbax")
    back = convert(middle, tmp_path / "back", to="vllm")
    written = load_file(back / "model.safetensors")
    assert written.keys() == tensors.keys()
    assert all(np.array_equal(written[name], tensors[name]) for name in tensors)
    configs = [load_target(folder)[0] for folder in (source, middle, back)]
    assert configs[0] == configs[1] == configs[2]


@pytest.mark.parametrize("form", CONFIGS)
def test_a_device_reads_its_own_part(tmp_path: Path, form: str) -> None:
    opened = open_checkpoint(write_checkpoint(tmp_path, CONFIGS[form], stored(CONFIGS[form])))
    whole = {path: tensor.part() for path, tensor in opened.tensors.items()}
    assert isinstance(opened.config, ModelConfig)
    assert whole.keys() == flatten(decoder.abstract_params(opened.config)).keys()
    path = "layers_1.mlp.experts.up_proj.kernel"
    box = (slice(1, 3), slice(3, 9), slice(0, HIDDEN))
    assert np.array_equal(opened.tensors[path].part(box), whole[path][box])


BROKEN: dict[str, tuple[str, str, tuple[int, ...] | None, str]] = {
    "expert missing": (
        "separate",
        "model.layers.1.mlp.experts.2.up_proj.weight",
        None,
        r"experts\.2\.up_proj\.weight: found no such tensor",
    ),
    "expert too many": (
        "separate",
        "model.layers.1.mlp.experts.3.up_proj.weight",
        (WIDE, HIDDEN),
        r"experts\.3\.up_proj\.weight: found and not understood",
    ),
    "expert too wide": (
        "separate",
        "model.layers.1.mlp.experts.2.up_proj.weight",
        (WIDE + 1, HIDDEN),
        r"experts\.2\.up_proj\.weight: found shape \[13, 16\], expected \[12, 16\]",
    ),
    "turned": (
        "interleaved",
        "model.layers.0.mlp.experts.gate_up_proj",
        (EXPERTS, 2 * WIDE, HIDDEN),
        r"gate_up_proj: found shape \[3, 24, 16\], expected \[3, 16, 24\]",
    ),
    "bias missing": (
        "interleaved",
        "model.layers.0.mlp.experts.down_proj_bias",
        None,
        r"down_proj_bias: found no such tensor",
    ),
    "router missing": (
        "interleaved",
        "model.layers.0.mlp.router.weight",
        None,
        r"router\.weight: found no such tensor",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken(tmp_path: Path, case: str) -> None:
    form, name, shape, message = BROKEN[case]
    tensors = stored(CONFIGS[form])
    tensors.pop(name, None)
    if shape is not None:
        tensors[name] = np.ones(shape, np.float32)
    with pytest.raises(InputError, match=message) as info:
        open_checkpoint(write_checkpoint(tmp_path, CONFIGS[form], tensors))
    assert "\n" not in str(info.value)


def test_nan_is_named(tmp_path: Path) -> None:
    tensors = stored(QWEN3_MOE)
    tensors["model.layers.1.mlp.experts.1.down_proj.weight"][2, 3] = np.nan
    with pytest.raises(InputError, match=r"experts\.1\.down_proj\.weight: found NaN or Inf"):
        load_target(write_checkpoint(tmp_path, QWEN3_MOE, tensors))


@pytest.mark.parametrize("form", CONFIGS)
def test_random_parameters_have_the_same_shapes(form: str) -> None:
    config = model_config(CONFIGS[form], "config.json")
    abstract = decoder.abstract_params(config)
    assert abstract == jax.eval_shape(lambda: decoder.init(config, jax.random.key(0)))
