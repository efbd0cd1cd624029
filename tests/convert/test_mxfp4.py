"""MXFP4 against the definition and against transformers, bit by bit, and what is refused."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from peagle_jax.convert import mxfp4
from peagle_jax.convert.mxfp4 import Mxfp4Reader, dequantised, dequantize
from peagle_jax.convert.opening import open_source
from peagle_jax.convert.readers import open_reader
from peagle_jax.errors import InputError
from tests.convert.tiny import BF16, write_checkpoint

NAN_SCALE = 255
STEM = "model.layers.0.mlp.experts.down_proj"
CONFIG = {"quantization_config": {"quant_method": "mxfp4"}}


def bits(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values).view(np.uint16)


def every_case() -> tuple[np.ndarray, np.ndarray]:
    """[1, 256, 16, 16] blocks that hold every byte, under each of the 256 scales."""
    blocks = np.broadcast_to(np.arange(256, dtype=np.uint8).reshape(16, 16), (1, 256, 16, 16))
    scales = np.broadcast_to(np.arange(256, dtype=np.uint8)[:, None], (256, 16))[None]
    return np.ascontiguousarray(blocks), np.ascontiguousarray(scales)


def test_the_definition() -> None:
    """Each code's value as the MX specification's table has it, the low nibble first."""
    values = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    block = np.zeros((1, 16), np.uint8)
    block[0, :8] = [code << 4 | code + 8 for code in range(8)]  # code + 8: its negative, first
    found = dequantize(block, np.array([129], np.uint8))  # 2 ** 2
    assert found.dtype == BF16
    assert found.shape == (32,)
    assert found[1:16:2].tolist() == [4 * value for value in values]
    assert found[0:16:2].tolist() == [-4 * value for value in values]
    assert np.signbit(found[0])  # -0
    assert found[16:].tolist() == [0] * 16


def test_extreme_scales() -> None:
    one_of_each = (np.arange(16, dtype=np.uint8) * 0x11)[None]  # code c twice in byte c
    smallest = dequantize(one_of_each, np.array([0], np.uint8))[::2].astype(np.float64)
    assert smallest[1] == 2.0**-128  # a subnormal, still exact
    assert smallest[7] == 6 * 2.0**-127
    largest = dequantize(one_of_each, np.array([254], np.uint8))[::2].astype(np.float64)
    assert largest[3] == 1.5 * 2.0**127
    assert np.isposinf(largest[4:8]).all()
    assert np.isneginf(largest[12:]).all()
    assert np.isnan(dequantize(one_of_each, np.array([NAN_SCALE], np.uint8)).astype(float)).all()


def test_bit_identical_to_transformers() -> None:
    torch = pytest.importorskip("torch")
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    random = np.random.default_rng(0)
    shape = (3, 64, 5)  # experts, out, blocks
    for blocks, scales in (
        every_case(),
        (
            random.integers(0, 256, (*shape, 16), np.uint8),
            random.integers(0, NAN_SCALE, shape, np.uint8),
        ),
    ):
        reference = convert_moe_packed_tensors(torch.tensor(blocks), torch.tensor(scales))
        found = dequantize(blocks, scales).swapaxes(1, 2)  # as Mxfp4Reader.rows gives them
        assert found.shape == reference.shape
        same = bits(found) == reference.view(torch.int16).numpy().view(np.uint16)
        special = np.repeat(scales == NAN_SCALE, 32, axis=-1).swapaxes(1, 2)
        assert same[~special].all()
        # transformers takes the scale 255 for 2 ** 128; the definition says NaN.
        assert np.isnan(found[special].astype(np.float32)).all()
    assert reference.shape == (3, 160, 64)


def test_pieces_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks, scales = every_case()
    whole = dequantize(blocks, scales)
    monkeypatch.setattr(mxfp4, "_PIECE", 48)
    assert np.array_equal(bits(whole), bits(dequantize(blocks, scales)))


def packed(experts: int = 4, out: int = 6, blocks: int = 2) -> dict[str, np.ndarray]:
    random = np.random.default_rng(1)
    return {
        f"{STEM}_blocks": random.integers(0, 256, (experts, out, blocks, 16), np.uint8),
        f"{STEM}_scales": random.integers(120, 130, (experts, out, blocks), np.uint8),
        f"{STEM}_bias": np.ones((experts, out), BF16),
    }


def test_reader_shows_what_the_packed_tensors_stand_for(tmp_path: Path) -> None:
    tensors = packed()
    reader = open_source(write_checkpoint(tmp_path, CONFIG, tensors))
    assert sorted(reader.names()) == [STEM, f"{STEM}_bias"]
    assert (reader.shape(STEM), reader.dtype(STEM)) == ((4, 64, 6), BF16)
    assert (reader.storage(STEM), reader.nbytes(STEM)) == ("MXFP4", 4 * 6 * 2 * 17)
    whole = dequantize(tensors[f"{STEM}_blocks"], tensors[f"{STEM}_scales"]).swapaxes(1, 2)
    assert np.array_equal(reader.read(STEM), whole)
    assert np.array_equal(reader.rows(STEM, 1, 3), whole[1:3])
    odd = slice(1, None, 2)
    assert np.array_equal(reader.rows_at(STEM, 1, 3, odd), whole[1:3, :, odd])
    assert reader.rows_at(f"{STEM}_bias", 0, 2, odd).shape == (2, 3)
    assert reader.rows(f"{STEM}_bias", 0, 2).tolist() == [[1] * 6] * 2
    assert sorted(reader.stored().names()) == sorted(tensors)
    assert reader.config == CONFIG


def test_a_row_reads_one_expert(tmp_path: Path) -> None:
    """The peak beyond the row's own values is a fraction of the tensor."""
    tensors = packed(experts=64, out=64, blocks=16)
    reader = open_source(write_checkpoint(tmp_path, CONFIG, tensors))
    row = 64 * 16 * 32 * 2
    reader.rows(STEM, 0, 1)  # the table is made once
    tracemalloc.start()
    values = reader.rows(STEM, 5, 6)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert values.nbytes == row
    assert peak < 8 * row < 64 * row


def test_plain_checkpoints_are_left_alone(tmp_path: Path) -> None:
    reader = open_reader(write_checkpoint(tmp_path, {}, {"a": np.ones(3, BF16)}))
    assert dequantised(reader) is reader
    assert reader.stored() is reader


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no scales": ({f"{STEM}_scales": None}, r"down_proj_scales: found no such tensor, expected"),
    "no blocks": ({f"{STEM}_blocks": None}, r"down_proj_blocks: found no such tensor, expected"),
    "one scale a row": (
        {f"{STEM}_scales": np.ones((4, 6, 1), np.uint8)},
        r"down_proj_scales: found shape \[4, 6, 1\], expected \[4, 6, 2\], one scale a block",
    ),
    "blocks of 16": (
        {f"{STEM}_blocks": np.ones((4, 6, 4, 8), np.uint8)},
        r"down_proj_blocks: found shape \[4, 6, 4, 8\], expected \[experts, out, blocks, 16\]",
    ),
    "scales as floats": (
        {f"{STEM}_scales": np.ones((4, 6, 2), np.float32)},
        r"down_proj_scales: found dtype float32, expected uint8",
    ),
    "both forms": ({STEM: np.ones((4, 64, 6), BF16)}, r"down_proj: found packed and unpacked"),
}


@pytest.mark.parametrize("case", list(WRONG))
def test_blocks_and_scales_that_do_not_fit(tmp_path: Path, case: str) -> None:
    change, message = WRONG[case]
    tensors = {name: value for name, value in {**packed(), **change}.items() if value is not None}
    with pytest.raises(InputError, match=message) as info:
        open_source(write_checkpoint(tmp_path, CONFIG, tensors))
    assert "\n" not in str(info.value)


@pytest.mark.parametrize(
    ("quantisation", "message"),
    [
        ({"quant_method": "awq"}, "found 'awq', expected 'mxfp4' or no such key"),
        ({"bits": 4}, "found None, expected 'mxfp4'"),
        ({"quant_method": "mxfp4"}, r"found 'mxfp4' and no \*_blocks tensors, expected some"),
    ],
)
def test_quantisation_that_is_not_known(
    tmp_path: Path, quantisation: dict[str, object], message: str
) -> None:
    config = {"quantization_config": quantisation}
    folder = write_checkpoint(tmp_path, config, {"a": np.ones(3, BF16)})
    with pytest.raises(InputError, match=rf"config\.json: quantization_config.*{message}"):
        open_source(folder)
    assert json.loads((folder / "config.json").read_text()) == config


def test_nan_scale_is_found_when_the_values_are_read(tmp_path: Path) -> None:
    tensors = packed()
    tensors[f"{STEM}_scales"][2, 3, 1] = NAN_SCALE
    reader = open_source(write_checkpoint(tmp_path, CONFIG, tensors))
    assert isinstance(reader, Mxfp4Reader)
    reader.check_finite(STEM, reader.rows(STEM, 0, 2))
    with pytest.raises(InputError, match="down_proj: found NaN or Inf"):
        reader.check_finite(STEM, reader.rows(STEM, 2, 3))
