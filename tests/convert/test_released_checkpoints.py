"""The released checkpoints scaled down: same names, same config keys, converted end to end."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from peagle_jax.convert import releases, synthetic
from peagle_jax.convert.checking import check
from peagle_jax.convert.checkpoint import load_drafter, load_target
from peagle_jax.convert.conversion import convert
from peagle_jax.convert.layouts import flatten
from peagle_jax.convert.lazy_tensor import LazyTensor
from peagle_jax.convert.mxfp4 import dequantize
from peagle_jax.convert.opening import open_config
from peagle_jax.convert.releases import Release
from peagle_jax.errors import InputError
from tests.convert.peak import PEAK
from tests.convert.test_checking import change_tensor
from tests.convert.tiny import BF16

VOCAB = 96
ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
GPT_OSS = {
    **ATTENTION,
    "num_hidden_layers": 8,
    "hidden_size": 64,
    "intermediate_size": 32,
    "vocab_size": VOCAB,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "eos_token_id": 2,
    "pad_token_id": None,
}
QWEN = {
    **ATTENTION,
    "num_hidden_layers": 8,
    "hidden_size": 32,
    "vocab_size": VOCAB,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "eos_token_id": 3,
}
DRAFTER = {
    **ATTENTION,
    "intermediate_size": 48,
    "vocab_size": VOCAB,
    "draft_vocab_size": VOCAB,
    "ptd_token_id": 5,
}
SCALES: dict[str, dict[str, Any]] = {
    "openai/gpt-oss-20b": GPT_OSS,
    "openai/gpt-oss-120b": {**GPT_OSS, "num_hidden_layers": 12, "num_local_experts": 6},
    "Qwen/Qwen3-Coder-30B-A3B-Instruct": QWEN,
    "amazon/gpt-oss-20b-p-eagle": {**DRAFTER, "hidden_size": 64},
    "amazon/GPT-OSS-120B-P-EAGLE": {**DRAFTER, "hidden_size": 64},
    "amazon/Qwen3-Coder-30B-A3B-Instruct-P-EAGLE": {**DRAFTER, "hidden_size": 32},
}
TARGETS = [name for name in SCALES if not name.startswith("amazon")]
DRAFTERS = [name for name in SCALES if name.startswith("amazon")]
GPT_OSS_20B, GPT_OSS_120B, QWEN3 = TARGETS


@pytest.fixture(autouse=True)
def scaled(monkeypatch: pytest.MonkeyPatch) -> dict[str, Release]:
    """The manifests scaled down, in place of the shipped ones."""
    shipped = {release.repository: release for release in releases.shipped_releases()}
    small = {name: shipped[name].scaled(**values) for name, values in SCALES.items()}
    monkeypatch.setattr(releases, "shipped_releases", lambda: tuple(small.values()))
    return small


@pytest.fixture
def write(scaled: dict[str, Release], tmp_path: Path) -> Any:
    """Writes a scaled release under its own name, in shards."""

    def written(name: str) -> Path:
        folder = tmp_path / name.partition("/")[2]
        return synthetic.write_release(folder, scaled[name], shard_bytes=100_000)

    return written


def stored(folder: Path) -> dict[str, np.ndarray]:
    """All tensors of a folder's shards."""
    found: dict[str, np.ndarray] = {}
    for shard in folder.glob("*.safetensors"):
        found |= load_file(shard)
    return found


@pytest.mark.parametrize("name", list(SCALES))
def test_described_releases_are_understood(name: str) -> None:
    """What `peagle convert --check REPOSITORY` does, without any file."""
    report = check(name)
    assert report.problems == ()
    assert report.passed
    assert dict(report.facts)["checked"] == "no files: the description alone"


@pytest.mark.parametrize("name", TARGETS)
def test_target_end_to_end(write: Any, tmp_path: Path, name: str) -> None:
    source = write(name)
    assert len(list(source.glob("*.safetensors"))) > 1
    assert check(source).passed
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = convert(source, tmp_path / "out")
    config, params = load_target(source)
    again, converted = load_target(out)
    assert config == again
    flat, other = flatten(params), flatten(converted)
    assert flat.keys() == other.keys()
    for path, value in flat.items():
        assert value.dtype == BF16
        assert np.asarray(value).tobytes() == np.asarray(other[path]).tobytes(), path


def test_mxfp4_experts_become_parameters(write: Any) -> None:
    source = write(GPT_OSS_20B)
    tensors = stored(source)
    _, params = load_target(source)
    experts = params["layers_3"]["mlp"]["experts"]
    stem = "model.layers.3.mlp.experts."
    fused = dequantize(tensors[f"{stem}gate_up_proj_blocks"], tensors[f"{stem}gate_up_proj_scales"])
    down = dequantize(tensors[f"{stem}down_proj_blocks"], tensors[f"{stem}down_proj_scales"])
    bias = tensors[f"{stem}gate_up_proj_bias"]
    expected = {
        ("gate_proj", "kernel"): fused[:, ::2],
        ("up_proj", "kernel"): fused[:, 1::2],
        ("down_proj", "kernel"): down,
        ("gate_proj", "bias"): bias[:, ::2],
        ("up_proj", "bias"): bias[:, 1::2],
        ("down_proj", "bias"): tensors[f"{stem}down_proj_bias"],
    }
    for (module, leaf), value in expected.items():
        found = np.asarray(experts[module][leaf])
        assert found.shape == value.shape
        assert found.tobytes() == np.ascontiguousarray(value).tobytes()


def test_separate_experts_become_parameters(write: Any) -> None:
    source = write(QWEN3)
    tensors = stored(source)
    _, params = load_target(source)
    for module in ("gate_proj", "up_proj", "down_proj"):
        kernel = np.asarray(params["layers_5"]["mlp"]["experts"][module]["kernel"])
        for expert in range(4):
            value = tensors[f"model.layers.5.mlp.experts.{expert}.{module}.weight"]
            assert kernel[expert].tobytes() == value.tobytes()


@pytest.mark.parametrize("name", DRAFTERS)
def test_drafter_end_to_end(
    write: Any, scaled: dict[str, Release], tmp_path: Path, name: str
) -> None:
    """Its config leaves the layer ids out: they come from the manifest's target."""
    source = write(name)
    out = convert(source, tmp_path / "out")
    config, params = load_drafter(out)
    target = scaled[name].target
    assert target is not None
    layers = scaled[target].config["num_hidden_layers"]
    assert config.aux_layer_ids == (2, layers // 2, layers - 3)
    assert config.parallel
    assert config.own_embedding
    assert params["mask_hidden"].shape == (3 * config.target_hidden_size,)
    back = convert(out, tmp_path / "back", to="vllm")
    written = load_file(back / "model.safetensors")
    for tensor, value in stored(source).items():
        if tensor not in ("d2t", "t2d"):  # no draft vocabulary: none is written
            renamed = tensor.replace("midlayer.", "layers.0.")
            assert written[renamed].tobytes() == value.tobytes(), tensor


def test_drafter_of_the_other_gpt_oss(write: Any, tmp_path: Path) -> None:
    """Their drafters have the same shapes; nothing large is read before the error."""
    target, drafter = write(GPT_OSS_20B), write("amazon/GPT-OSS-120B-P-EAGLE")
    with pytest.raises(InputError, match="found a drafter for openai/gpt-oss-120b") as info:
        convert(drafter, tmp_path / "out", target=target)
    assert "expected one for a target with num_hidden_layers 8" in str(info.value)
    with pytest.raises(InputError, match="found a drafter for openai/gpt-oss-120b"):
        load_drafter(drafter, open_config(target))


def test_layer_ids_past_the_target(write: Any, tmp_path: Path) -> None:
    """Without a name that tells, the ids do."""
    target = write(GPT_OSS_20B)
    drafter = write("amazon/GPT-OSS-120B-P-EAGLE").rename(tmp_path / "drafter")
    path = drafter / "config.json"
    ids = {"eagle_aux_hidden_state_layer_ids": [2, 6, 9]}
    path.write_text(json.dumps(json.loads(path.read_text()) | ids))
    with pytest.raises(InputError, match=r"found \[2, 6, 9\], expected ids up to the target's 8"):
        convert(drafter, tmp_path / "out", target=target)


BLOCKS = "model.layers.1.mlp.experts.down_proj_blocks"
SCALE = "model.layers.1.mlp.experts.down_proj_scales"
BAD: dict[str, tuple[str, Any, str]] = {
    "no scales": (SCALE, None, r"down_proj_scales: found no such tensor, expected it beside"),
    "no blocks": (BLOCKS, None, r"down_proj_blocks: found no such tensor, expected it beside"),
    "other experts": ("num_local_experts", 6, r"found shape \[4, 64\], expected \[6, 64\]"),
    "another quantisation": (
        "quantization_config",
        {"quant_method": "gptq"},
        r"quant_method: found 'gptq', expected 'mxfp4'",
    ),
    "another layer type": ("layer_types", ["chunked_attention"] * 8, r"layer_types: found"),
    "another rope": ("rope_scaling", {"rope_type": "dynamic"}, r"found rope type 'dynamic'"),
}


@pytest.mark.parametrize("case", list(BAD))
def test_bad_targets_are_refused_before_weights_are_read(
    scaled: dict[str, Release], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    key, value, message = BAD[case]
    source = synthetic.write_release(tmp_path / "source", scaled[GPT_OSS_20B])
    if key.startswith("model."):
        change_tensor(source, key, value)
    else:
        path = source / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))

    def refuse(tensor: LazyTensor, start: int, stop: int) -> np.ndarray:
        raise AssertionError("weights were read")

    monkeypatch.setattr(LazyTensor, "rows", refuse)
    with pytest.raises(InputError, match=message) as info:
        convert(source, tmp_path / "out")
    assert "\n" not in str(info.value)
    assert not (tmp_path / "out").exists()
    (problem,) = check(source).problems
    assert problem == str(info.value)


@pytest.mark.parametrize("missing", ["one expert", "one too many"])
def test_experts_that_are_not_as_many_as_the_config_says(
    scaled: dict[str, Release], tmp_path: Path, missing: str
) -> None:
    source = synthetic.write_release(tmp_path / "source", scaled[QWEN3])
    stem = "model.layers.2.mlp.experts"
    if missing == "one expert":
        change_tensor(source, f"{stem}.3.up_proj.weight", None)
        message = rf"{stem}\.3\.up_proj\.weight: found no such tensor"
    else:
        change_tensor(source, f"{stem}.3.up_proj.weight", np.ones((24, 32), BF16))
        path = source / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"num_experts": 3}))
        message = r"found shape \[4, 32\], expected \[3, 32\]|found and not understood"
    with pytest.raises(InputError, match=message):
        convert(source, tmp_path / "out")


def test_logits_of_a_packed_checkpoint_are_transformers_own(write: Any) -> None:
    torch = pytest.importorskip("torch")
    import jax.numpy as jnp
    import transformers
    from transformers.utils.quantization_config import Mxfp4Config

    from peagle_jax.models.cache import KVCache
    from peagle_jax.models.decoder import Decoder

    source = write(GPT_OSS_20B)
    quantisation = Mxfp4Config(dequantize=True)
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        source, dtype=torch.float32, quantization_config=quantisation, attn_implementation="eager"
    )
    tokens = np.random.default_rng(0).integers(0, VOCAB, (1, 24))
    with torch.no_grad():
        expected = reference(torch.tensor(tokens)).logits.numpy()
    config, params = load_target(source, dtype="float32")
    model = Decoder(config, jnp.float32)
    bound = {"params": params}
    cache = KVCache.init(config.block, 1, 32, jnp.float32)
    out = model.apply(bound, jnp.asarray(tokens), jnp.zeros(1, jnp.int32), cache)
    found = model.apply(bound, out.hidden, method="logits")
    assert np.abs(np.asarray(found) - expected).max() < 1e-4


CONVERT = f"""{PEAK}
import json, sys
from peagle_jax.convert.conversion import convert
before = peak()
convert(sys.argv[1], sys.argv[2])
after = peak()
print(json.dumps([before, after]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", [GPT_OSS_20B, QWEN3])
def test_memory_does_not_grow_with_the_checkpoint(
    scaled: dict[str, Release], tmp_path: Path, name: str
) -> None:
    """A layer of 32 experts is 300 MB and more once it is written in bfloat16."""
    values = {"hidden_size": 1024, "num_hidden_layers": 2, "vocab_size": 20_000}
    experts = {"num_local_experts": 32, "intermediate_size": 1024}
    separate = {"num_experts": 48, "moe_intermediate_size": 1024}
    release = scaled[name].scaled(**values, **(experts if name == GPT_OSS_20B else separate))
    source = synthetic.write_release(tmp_path / "source", release)
    command = [sys.executable, "-c", CONVERT, str(source), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    before, after = json.loads(done.stdout)
    written = sum(path.stat().st_size for path in (tmp_path / "out").rglob("*") if path.is_file())
    assert written > 450e6
    assert after - before < 250e6
