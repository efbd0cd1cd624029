"""GGUF: values against the gguf package, and llama.cpp's row order undone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from peagle_jax.convert.checkpoint import load_target
from peagle_jax.convert.gguf_file import GGUFFileReader
from peagle_jax.convert.readers import open_reader
from peagle_jax.convert.sources import smollm2_gguf
from peagle_jax.errors import InputError

HIDDEN, HEADS, KV_HEADS, VOCAB, INTERMEDIATE = 64, 4, 2, 48, 96


def llama_cpp_rows(weight: np.ndarray, heads: int) -> np.ndarray:
    """Hugging Face's q or k rows as llama.cpp's converter stores them."""
    head_dim = weight.shape[0] // heads
    split = weight.reshape(heads, 2, head_dim // 2, *weight.shape[1:])
    return split.swapaxes(1, 2).reshape(weight.shape)


def hf_weights(seed: int = 0, tied: bool = True) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    kv = HIDDEN // HEADS * KV_HEADS
    shapes = {
        "token_embd.weight": (VOCAB, HIDDEN),
        "output_norm.weight": (HIDDEN,),
        "blk.0.attn_norm.weight": (HIDDEN,),
        "blk.0.ffn_norm.weight": (HIDDEN,),
        "blk.0.attn_q.weight": (HIDDEN, HIDDEN),
        "blk.0.attn_k.weight": (kv, HIDDEN),
        "blk.0.attn_v.weight": (kv, HIDDEN),
        "blk.0.attn_output.weight": (HIDDEN, HIDDEN),
        "blk.0.ffn_gate.weight": (INTERMEDIATE, HIDDEN),
        "blk.0.ffn_up.weight": (INTERMEDIATE, HIDDEN),
        "blk.0.ffn_down.weight": (HIDDEN, INTERMEDIATE),
    }
    if not tied:
        shapes["output.weight"] = (VOCAB, HIDDEN)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def write_llama(
    path: Path, weights: dict[str, np.ndarray], kind: Kind | None = None, **extra: Any
) -> Path:
    """A GGUF file of Llama type; `kind` quantises the matrices."""
    writer = gguf.GGUFWriter(path, extra.pop("architecture", "llama"))
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_context_length(128)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(5000.0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, value in extra.items():
        getattr(writer, name)(value)
    for name, weight in weights.items():
        heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(name.split(".")[-2])
        stored = llama_cpp_rows(weight, heads) if heads else weight
        if kind is not None and weight.ndim == 2:
            writer.add_tensor(name, gguf.quantize(stored, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_config_comes_from_the_metadata(tmp_path: Path) -> None:
    config, _ = load_target(write_llama(tmp_path / "m.gguf", hf_weights()))
    block = config.block
    assert (block.hidden_size, block.intermediate_size, block.num_layers) == (64, 96, 1)
    assert (block.num_heads, block.num_kv_heads, block.head_dim) == (4, 2, 16)
    assert block.rope.theta == 5000.0
    assert block.rms_norm_eps == pytest.approx(1e-5)
    assert (config.vocab_size, config.max_positions, config.tie_embeddings) == (48, 128, True)
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2,))


def test_rows_are_in_hugging_face_order(tmp_path: Path) -> None:
    weights = hf_weights(tied=False)
    config, params = load_target(write_llama(tmp_path / "m.gguf", weights))
    assert not config.tie_embeddings
    layer = params["layers_0"]
    for name, short in {"q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output"}.items():
        found = np.asarray(layer["self_attn"][f"{name}_proj"]["kernel"])
        assert np.array_equal(found, weights[f"blk.0.{short}.weight"]), name
    assert np.array_equal(params["lm_head"]["kernel"], weights["output.weight"])
    assert np.array_equal(layer["mlp"]["down_proj"]["kernel"], weights["blk.0.ffn_down.weight"])
    scale = layer["post_attention_layernorm"]["scale"]
    assert np.array_equal(scale, weights["blk.0.ffn_norm.weight"])


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1])
def test_types_equal_the_gguf_package(tmp_path: Path, kind: Kind) -> None:
    weights = hf_weights()
    _, params = load_target(write_llama(tmp_path / "m.gguf", weights, kind), dtype="float32")
    for name, path in {"attn_q": ("self_attn", "q_proj"), "ffn_up": ("mlp", "up_proj")}.items():
        quantised = gguf.quantize(weights[f"blk.0.{name}.weight"], kind)
        expected = gguf.dequantize(quantised, kind)
        found = np.asarray(params["layers_0"][path[0]][path[1]]["kernel"])
        assert np.array_equal(found, expected)
        assert not np.array_equal(found, weights[f"blk.0.{name}.weight"])  # it was quantised


@pytest.mark.parametrize("kind", [Kind.Q4_K, Kind.Q6_K])
def test_k_quants_equal_the_gguf_package(tmp_path: Path, kind: Kind) -> None:
    """The package only reads these: random blocks, with scales that are finite."""
    rows, columns = 300, 512
    block, size = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 256, (rows, columns // block, size), np.uint8)
    halves = rng.normal(size=(rows, columns // block, 2)).astype(np.float16).view(np.uint8)
    if kind == Kind.Q4_K:
        raw[..., :4] = halves  # d, dmin
    else:
        raw[..., -2:] = halves[..., :2]  # d
    raw = raw.reshape(rows, -1)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("w", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    reader = GGUFFileReader(tmp_path / "m.gguf")
    expected = gguf.dequantize(raw, kind)
    assert reader.shape("w") == (rows, columns)
    assert reader.storage("w") == kind.name
    assert np.array_equal(reader.read("w"), expected)
    assert np.array_equal(reader.rows("w", 17, 130), expected[17:130])


def test_half_precision_stays_half(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "m.gguf", hf_weights(), Kind.BF16)
    _, params = load_target(path)
    assert params["embed_tokens"]["embedding"].dtype == ml_dtypes.bfloat16


def test_long_arrays_are_read_as_the_library_reads_them(tmp_path: Path) -> None:
    tokens = [f"token {i} é" for i in range(2000)]
    scores = [i / 7 for i in range(2000)]
    path = write_llama(
        tmp_path / "m.gguf", hf_weights(), add_token_list=tokens, add_token_scores=scores
    )
    reader = GGUFFileReader(path)
    library = gguf.GGUFReader(path)
    for key in ("tokenizer.ggml.tokens", "tokenizer.ggml.scores"):
        field = library.get_field(key)
        assert field is not None
        assert reader.metadata(key) == field.contents()
    assert reader.metadata("tokenizer.ggml.tokens") == tokens


@pytest.mark.parametrize(
    ("keep", "found"),
    [
        (0, "b'' at its start"),
        (3, "b'GGU' at its start"),
        (20, r"20 bytes, cut short or damaged \(.*\)"),
        (200, r"200 bytes, cut short or damaged \(.*\)"),
        (-100, r"\d+ bytes, cut short or damaged \(.*\)"),
    ],
)
def test_truncated(tmp_path: Path, keep: int, found: str) -> None:
    path = write_llama(tmp_path / "m.gguf", hf_weights())
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(InputError, match=rf"m\.gguf: found {found}, expected a whole G") as info:
        open_reader(path)
    assert "\n" not in str(info.value)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"architecture": "mamba"}, r"general\.architecture: found 'mamba', expected one of llama"),
        ({"add_expert_count": 8}, r"llama\.expert_count: found experts, expected none"),
        (
            {"add_rope_scaling_type": gguf.RopeScalingType.YARN},
            r"rope\.scaling\.type: found rope type 'yarn', expected none or linear",
        ),
        ({"add_rope_dimension_count": 8}, r"rope\.dimension_count: found 8, expected.*16"),
    ],
)
def test_metadata_that_is_refused(tmp_path: Path, extra: dict[str, Any], message: str) -> None:
    path = write_llama(tmp_path / "m.gguf", hf_weights(), **extra)
    with pytest.raises(InputError, match=rf"m\.gguf: .*{message}"):
        load_target(path)


def test_llama3_scaling_is_refused_clearly(tmp_path: Path) -> None:
    weights = hf_weights() | {"rope_freqs.weight": np.ones(8, np.float32)}
    with pytest.raises(InputError, match=r"rope_freqs\.weight: found Llama 3 RoPE scaling.*safet"):
        load_target(write_llama(tmp_path / "m.gguf", weights))


def test_linear_scaling(tmp_path: Path) -> None:
    path = write_llama(
        tmp_path / "m.gguf",
        hf_weights(),
        add_rope_scaling_type=gguf.RopeScalingType.LINEAR,
        add_rope_scaling_factor=4.0,
    )
    rope = load_target(path)[0].block.rope
    assert (rope.kind, rope.factor) == ("linear", 4.0)


def test_type_that_is_not_read(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "m.gguf", hf_weights(), Kind.Q5_0)
    with pytest.raises(InputError, match=r"found type Q5_0, expected one of F32, F16, BF16, Q8_0"):
        open_reader(path)


def test_nan_in_a_quantised_tensor(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "m.gguf", hf_weights(), Kind.Q8_0)
    name = "blk.0.ffn_up.weight"
    (tensor,) = [t for t in gguf.GGUFReader(path).tensors if t.name == name]
    with path.open("r+b") as file:
        file.seek(int(tensor.data_offset))
        file.write(np.float16(np.nan).tobytes())  # the first block's scale
    with pytest.raises(InputError, match=rf"m\.gguf: {name}: found NaN or Inf"):
        load_target(path)


@pytest.mark.real_model
def test_smollm2_values() -> None:
    """Values that transformers reads from the same file (every tensor was compared once)."""
    path = smollm2_gguf()
    assert path is not None
    config, params = load_target(path)
    assert (config.block.num_layers, config.vocab_size, config.eos_token_ids) == (30, 49152, (2,))
    last, seventh = params["layers_29"], params["layers_7"]
    recorded = [  # first two values, value 12345 (modulo the size), sum
        (params["embed_tokens"]["embedding"], -0.106544494, 0.032978058, 0.031005859, -15353.0445),
        (last["self_attn"]["k_proj"]["kernel"], 0.062408447, 0.0043334961, 0.013122559, 87.892418),
        (seventh["mlp"]["down_proj"]["kernel"], -0.12759399, -0.12759399, -0.09558107, -198.98535),
        (params["norm"]["scale"], 1.7578125, 1.8203125, 1.8046875, 1038.33203),
    ]
    for array, *expected in recorded:
        flat = np.asarray(array).reshape(-1)
        found = [flat[0], flat[1], flat[12345 % flat.size], flat.sum(dtype=np.float64)]
        assert found == pytest.approx(expected, rel=1e-6)
