"""Tensor names to parameters: the four layouts agree, and nothing is left over or missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from peagle_jax.convert.checkpoint import load_drafter
from peagle_jax.convert.layouts import flatten, unflatten
from peagle_jax.convert.lazy_tensor import LazyTensor
from peagle_jax.convert.readers import open_reader
from peagle_jax.errors import InputError
from tests.convert.test_drafter_configs import EAGLE3_JSON, SPECULATORS_JSON
from tests.convert.tiny import BF16, DRAFTER_JSON, TARGET, VOCAB, drafter_tensors, write_checkpoint


def renamed(tensors: dict[str, np.ndarray], old: str, new: str) -> dict[str, np.ndarray]:
    return {name.replace(old, new, 1): value for name, value in tensors.items()}


def nemo(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    moved = {f"model.{k}" if k.startswith(("layers.", "norm.", "fc.")) else k: v
             for k, v in tensors.items()}  # fmt: skip
    return moved | {"mask_hidden": tensors["mask_hidden"].reshape(1, -1)}


def load(folder: Path) -> dict[str, np.ndarray]:
    return jax.tree.map(np.asarray, flatten(load_drafter(folder, TARGET)[1]))


def test_every_tensor_lands_where_it_belongs(tmp_path: Path) -> None:
    tensors = drafter_tensors(own_embedding=True)
    found = load(write_checkpoint(tmp_path, DRAFTER_JSON, tensors))
    ids = tensors["d2t"] + np.arange(12)
    assert np.array_equal(found.pop("draft_to_target"), ids)
    assert np.array_equal(found.pop("mask_hidden"), tensors["mask_hidden"].reshape(-1))
    for path, value in found.items():
        module, leaf = path.rsplit(".", 1)
        name = f"{module.replace('layers_', 'layers.')}.{'bias' if leaf == 'bias' else 'weight'}"
        assert np.array_equal(value, tensors[name]), path
    assert len(found) == len(tensors) - 3  # d2t, t2d, mask_hidden


@pytest.mark.parametrize("layout", ["midlayer", "speculators", "nemo"])
def test_layouts_give_the_same_parameters(tmp_path: Path, layout: str) -> None:
    tensors = drafter_tensors()
    config: dict[str, Any] = DRAFTER_JSON
    moved = tensors
    if layout == "midlayer":
        moved = renamed(tensors, "layers.0.", "midlayer.")
    elif layout == "speculators":
        config = SPECULATORS_JSON
    else:
        config = {**DRAFTER_JSON, "architectures": ["LlamaEagle3DraftModel"]}
        moved = nemo(tensors)
    expected = load(write_checkpoint(tmp_path / "vllm", DRAFTER_JSON, tensors))
    found = load(write_checkpoint(tmp_path / layout, config, moved))
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[path], expected[path]) for path in expected)


def test_eagle3_original_as_a_pickle(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    tensors = drafter_tensors(parallel=False, layers=1)
    config = {**EAGLE3_JSON, "num_hidden_layers": 1, "architectures": ["LlamaForCausalLM"]}
    expected = load(write_checkpoint(tmp_path / "vllm", config, tensors))
    folder = write_checkpoint(tmp_path / "original", config, {})
    (folder / "model.safetensors").unlink()
    state = renamed(tensors, "layers.0.", "midlayer.")
    torch.save({k: torch.tensor(v) for k, v in state.items()}, folder / "pytorch_model.bin")
    found = load(folder)
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[path], expected[path]) for path in expected)


@pytest.mark.parametrize(
    "flags",
    [
        {"norm_before_fc": True},
        {"fc_norm": True},
        {"bias": True},
        {"qk_norm": True},
        {"parallel": False, "layers": 1},
        {"draft_vocab": VOCAB},
    ],
)
def test_flags(tmp_path: Path, flags: dict[str, Any]) -> None:
    tensors = drafter_tensors(**flags)
    config: dict[str, Any] = {
        **(DRAFTER_JSON if flags.get("parallel", True) else EAGLE3_JSON),
        "norm_before_fc": flags.get("norm_before_fc", False),
        "fc_norm": flags.get("fc_norm", False),
        "attention_bias": flags.get("bias", False),
        "num_hidden_layers": flags.get("layers", 2),
        "draft_vocab_size": flags.get("draft_vocab", 12),
        "head_dim": 4,
    }
    if flags.get("qk_norm"):
        config["architectures"] = ["PeagleQwen3ForCausalLM"]
    found = load(write_checkpoint(tmp_path, config, tensors))
    assert len(found) == len([name for name in tensors if name != "t2d"])


def test_ignorable_tensors(tmp_path: Path) -> None:
    extra = {
        "layers.0.self_attn.rotary_emb.inv_freq": np.ones(2, np.float32),
        "verifier_norm.weight": np.ones(16, np.float32),
    }
    found = load(write_checkpoint(tmp_path, DRAFTER_JSON, drafter_tensors() | extra))
    assert len(found) == len(drafter_tensors()) - 1


def broken(change: str) -> dict[str, np.ndarray]:
    tensors = drafter_tensors()
    match change:
        case "missing":
            del tensors["layers.1.mlp.up_proj.weight"]
        case "extra":
            tensors["layers.1.mlp.up_proj.lora"] = np.ones(3, np.float32)
        case "ambiguous":
            tensors["midlayer.hidden_norm.weight"] = tensors["layers.0.hidden_norm.weight"]
        case "shape":
            tensors["fc.weight"] = tensors["fc.weight"][:, :-1].copy()
        case "mask shape":
            tensors["mask_hidden"] = tensors["mask_hidden"][..., :16].copy()
        case "nan":
            tensors["layers.1.mlp.up_proj.weight"][3, 2] = np.nan
        case "inf":
            tensors["mask_hidden"][0, 0, 5] = np.inf
        case "d2t high":
            tensors["d2t"][-1] = VOCAB
        case "d2t negative":
            tensors["d2t"][0] = -1
        case "d2t twice":
            tensors["d2t"][1] = tensors["d2t"][0] - 1
        case "d2t float":
            tensors["d2t"] = tensors["d2t"].astype(np.float32)
        case "int weight":
            tensors["norm.weight"] = tensors["norm.weight"].astype(np.int32)
    return tensors


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("missing", r"layers\.1\.mlp\.up_proj\.weight: found no such tensor, expected one"),
        ("extra", r"layers\.1\.mlp\.up_proj\.lora: found and not understood, expected no such"),
        ("ambiguous", r"layers\.0\.hidden_norm\.weight: found as both .*midlayer.*expected one"),
        ("shape", r"fc\.weight: found shape \[16, 47\], expected \[16, 48\]"),
        ("mask shape", r"mask_hidden: found shape \[1, 1, 16\], expected \[48\]"),
        ("nan", r"layers\.1\.mlp\.up_proj\.weight: found NaN or Inf, expected finite numbers"),
        ("inf", r"mask_hidden: found NaN or Inf, expected finite numbers"),
        ("d2t high", r"d2t: found target ids .* to 51, expected 0 to 39"),
        ("d2t negative", r"d2t: found target ids -1 to .*, expected 0 to 39"),
        ("d2t twice", r"d2t: found a target id twice, expected each at most once"),
        ("d2t float", r"d2t: found dtype float32, expected int32"),
        ("int weight", r"norm\.weight: found dtype int32, expected float32"),
    ],
)
def test_broken_drafter(tmp_path: Path, change: str, message: str) -> None:
    folder = write_checkpoint(tmp_path, DRAFTER_JSON, broken(change))
    with pytest.raises(InputError, match=rf"model\.safetensors: {message}") as info:
        load_drafter(folder, TARGET)
    assert "\n" not in str(info.value)


def test_mapping_without_a_draft_vocabulary(tmp_path: Path) -> None:
    tensors = drafter_tensors(draft_vocab=VOCAB)
    config = {**DRAFTER_JSON, "draft_vocab_size": None}
    zeros = tensors | {"d2t": np.zeros(VOCAB, np.int64)}
    load(write_checkpoint(tmp_path / "zeros", config, zeros))  # says nothing, so is ignored
    shifted = tensors | {"d2t": np.ones(VOCAB, np.int64)}
    with pytest.raises(InputError, match="d2t: found a mapping, expected none without a draft"):
        load(write_checkpoint(tmp_path / "shifted", config, shifted))


def test_part_reads_any_box_in_small_chunks(tmp_path: Path) -> None:
    value = np.arange(60, dtype=np.float32).reshape(10, 6)
    reader = open_reader(write_checkpoint(tmp_path, None, {"w": value}))
    reader.chunk_bytes = 3 * 6 * 4
    tensor = LazyTensor(reader, "w", (10, 6), np.dtype(np.float32))
    assert tensor.chunks() == [(0, 3), (3, 6), (6, 9), (9, 10)]
    assert np.array_equal(tensor.part(), value)
    assert np.array_equal(tensor.part((slice(2, 8), slice(1, 4))), value[2:8, 1:4])
    assert tensor.part().ctypes.data % 64 == 0


def test_cast_that_overflows_is_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, None, {"w": np.array([1e30], np.float32)})
    reader = open_reader(folder)
    with np.errstate(over="ignore"), pytest.raises(InputError, match="w: found NaN or Inf"):
        LazyTensor(reader, "w", (1,), np.dtype(np.float16)).part()
    assert LazyTensor(reader, "w", (1,), BF16).part().astype(np.float32)[0] == pytest.approx(
        1e30, rel=0.01
    )


def test_flatten_and_back() -> None:
    tree = {"a": {"b": 1, "c": {"d": 2}}, "e": 3}
    assert flatten(tree) == {"a.b": 1, "a.c.d": 2, "e": 3}
    assert unflatten(flatten(tree)) == tree
