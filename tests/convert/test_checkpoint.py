"""Targets against transformers, and where and in what dtype parameters arrive."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from peagle_jax.convert import layouts
from peagle_jax.convert.checkpoint import load_drafter, load_target
from peagle_jax.convert.opening import open_config
from peagle_jax.errors import InputError
from tests.convert.tiny import DRAFTER_JSON, TARGET, drafter_tensors, write_checkpoint

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 60,
    "max_position_embeddings": 64,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied-biased": (
        "Llama",
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "head_dim": 6},
    ),
    "mistral": ("Mistral", {"sliding_window": 5}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
}


def save_with_transformers(folder: Path, case: str, shard_size: str = "5GB") -> dict[str, Any]:
    """A tiny random model saved by transformers; gives its state dict."""
    torch = pytest.importorskip("torch")
    import transformers

    family, changes = CASES[case]
    config = getattr(transformers, f"{family}Config")(**SIZES, **changes)
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    for parameter in model.parameters():  # biases and norms start as constants
        torch.nn.init.normal_(parameter)
    model.save_pretrained(folder, max_shard_size=shard_size)
    return {name: tensor.numpy() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("case", list(CASES))
def test_target_equals_transformers(tmp_path: Path, case: str) -> None:
    state = save_with_transformers(tmp_path, case)
    config, params = load_target(tmp_path)
    assert config.block.num_kv_heads == 2
    assert config.block.windows == ((5, 5) if case == "mistral" else ())
    flat = layouts.flatten(params)
    for path, value in flat.items():
        name = layouts.tensor_name(path, layouts.TARGET_PATHS)
        assert np.array_equal(np.asarray(value), state.pop(name)), path
    assert set(state) <= ({"lm_head.weight"} if config.tie_embeddings else set())


def test_a_token_table_lies_as_by_rows_says(tmp_path: Path, monkeypatch: Any) -> None:
    """By columns here, as no CPU asks for it; a compiled program takes it as it lies."""
    by_columns = Layout((1, 0))
    monkeypatch.setattr(
        "peagle_jax.convert.checkpoint.by_rows", lambda ndim, place: Format(by_columns, place)
    )
    state = save_with_transformers(tmp_path, "llama")
    _, params = load_target(tmp_path)
    table: Any = params["embed_tokens"]["embedding"]
    assert table.format.layout.major_to_minor == (1, 0)
    assert params["lm_head"]["kernel"].format.layout.major_to_minor == (0, 1)
    taken: Any = jax.jit(lambda table: table[3]).lower(table).compile()
    assert taken.input_formats[0][0].layout.major_to_minor == (1, 0)
    np.testing.assert_array_equal(taken(table), state["model.embed_tokens.weight"][3])


def test_sharded_target(tmp_path: Path) -> None:
    state = save_with_transformers(tmp_path, "llama", shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    _, params = load_target(tmp_path)
    assert np.array_equal(params["lm_head"]["kernel"], state["lm_head.weight"])


def test_eos_ids_come_from_generation_config_too(tmp_path: Path) -> None:
    save_with_transformers(tmp_path, "llama")
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 17]}')
    assert load_target(tmp_path)[0].eos_token_ids == (2, 17)


def test_dtype(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, DRAFTER_JSON, drafter_tensors(dtype=np.float16))
    _, own = load_drafter(folder, TARGET)
    assert own["fc"]["kernel"].dtype == jnp.float16
    _, cast = load_drafter(folder, TARGET, dtype="float32")
    assert cast["fc"]["kernel"].dtype == jnp.float32
    assert cast["draft_to_target"].dtype == jnp.int32
    assert np.array_equal(cast["fc"]["kernel"], np.asarray(own["fc"]["kernel"], np.float32))
    with pytest.raises(InputError, match="dtype: found int8, expected float32, bfloat16 or"):
        load_drafter(folder, TARGET, dtype="int8")


def sharded(mesh: Mesh) -> Any:
    """Matrices cut along their columns, the rest whole."""

    def spec(leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(None, "x") if leaf.ndim == 2 else PartitionSpec())

    return lambda config, abstract: jax.tree.map(spec, abstract)


@pytest.mark.parametrize("kind", ["one", "tree", "function"])
def test_shardings(tmp_path: Path, kind: str) -> None:
    tensors = drafter_tensors()
    folder = write_checkpoint(tmp_path, DRAFTER_JSON, tensors)
    mesh = Mesh(np.array(jax.devices()[:1]), ("x",))
    _, whole = load_drafter(folder, TARGET)
    sharding: Any = sharded(mesh)
    if kind == "one":
        sharding = NamedSharding(mesh, PartitionSpec())
    elif kind == "tree":
        sharding = sharding(None, jax.eval_shape(lambda: whole))
    _, placed = load_drafter(folder, TARGET, sharding=sharding)
    assert jax.tree.all(jax.tree.map(lambda a, b: np.array_equal(a, b), whole, placed))
    expected = PartitionSpec() if kind == "one" else PartitionSpec(None, "x")
    assert placed["fc"]["kernel"].sharding.spec == expected


def test_a_drafter_is_not_a_target(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, DRAFTER_JSON, drafter_tensors())
    with pytest.raises(InputError, match="found a drafter, expected a target"):
        load_target(folder)


def test_a_target_is_not_a_drafter(tmp_path: Path) -> None:
    save_with_transformers(tmp_path, "llama")
    with pytest.raises(InputError, match="found a target, expected a drafter"):
        load_drafter(tmp_path, TARGET)


def test_missing_config(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, None, {"model.norm.weight": np.ones(3, np.float32)})
    with pytest.raises(InputError, match=r"found no config\.json, expected one beside"):
        load_target(folder)


def test_configuration_alone_needs_no_weights(tmp_path: Path) -> None:
    save_with_transformers(tmp_path, "qwen3")
    expected = load_target(tmp_path)[0]
    (tmp_path / "model.safetensors").unlink()
    assert open_config(tmp_path) == expected
