"""Files to named tensors: every format's values, and every way a file can be broken."""

from __future__ import annotations

import json
import pickle
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from peagle_jax.convert.base_reader import row_chunks
from peagle_jax.convert.readers import open_reader
from peagle_jax.convert.safetensors_file import Output, write_safetensors
from peagle_jax.errors import InputError
from tests.convert.tiny import BF16

VALUES: dict[str, np.ndarray] = {
    "a": np.arange(12, dtype=np.float32).reshape(3, 4),
    "b": np.array([[1.5, -2.0], [0.25, 8.0]], np.float16),
    "c": np.array([0.5, 3.0, -7.0], BF16),
    "d": np.array([2**40, -1], np.int64),
    "e": np.array([True, False, True]),
}


def shard(folder: Path, parts: list[dict[str, np.ndarray]], weight_map: dict[str, str]) -> Path:
    for index, part in enumerate(parts):
        save_file(part, folder / f"model-{index}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def test_safetensors_values_shapes_and_dtypes(tmp_path: Path) -> None:
    save_file(VALUES, tmp_path / "model.safetensors")
    reader = open_reader(tmp_path)
    assert sorted(reader.names()) == sorted(VALUES)
    for name, value in VALUES.items():
        assert reader.shape(name) == value.shape
        assert reader.dtype(name) == value.dtype
        assert np.array_equal(reader.read(name), value)
        assert np.array_equal(reader.rows(name, 1, 2), value[1:2])
    assert [reader.storage(n) for n in "abcde"] == ["F32", "F16", "BF16", "I64", "BOOL"]
    assert reader.nbytes("a") == 48


def test_shards_are_read_as_one(tmp_path: Path) -> None:
    parts = [{"a": VALUES["a"]}, {"c": VALUES["c"], "d": VALUES["d"]}]
    names = {"a": "model-0.safetensors", "c": "model-1.safetensors", "d": "model-1.safetensors"}
    reader = open_reader(shard(tmp_path, parts, names))
    assert np.array_equal(reader.read("c"), VALUES["c"])
    assert [path.name for path in reader.files] == ["model-0.safetensors", "model-1.safetensors"]


def test_missing_shard(tmp_path: Path) -> None:
    shard(tmp_path, [{"a": VALUES["a"]}], {"a": "model-0.safetensors", "b": "model-1.safetensors"})
    with pytest.raises(InputError, match=r"model-1\.safetensors: found no such shard, expected"):
        open_reader(tmp_path)


def test_index_entry_without_tensor(tmp_path: Path) -> None:
    shard(tmp_path, [{"a": VALUES["a"]}], {"a": "model-0.safetensors", "z": "model-0.safetensors"})
    with pytest.raises(InputError, match=r"z: found no such tensor, expected it in model-0"):
        open_reader(tmp_path)


def test_tensor_in_two_shards(tmp_path: Path) -> None:
    parts = [{"a": VALUES["a"]}, {"a": VALUES["a"], "c": VALUES["c"]}]
    shard(tmp_path, parts, {"a": "model-0.safetensors", "c": "model-1.safetensors"})
    with pytest.raises(InputError, match=r"a: found in both model-0.* and model-1.*expected once"):
        open_reader(tmp_path)


@pytest.mark.parametrize(
    ("keep", "found"),
    [
        (0, "0 bytes, which end within the header"),
        (5, "5 bytes, which end within the header"),
        (60, "60 bytes, which end within the header"),
        (-3, "{short} bytes, where the header speaks of {whole}"),
    ],
)
def test_truncated_safetensors(tmp_path: Path, keep: int, found: str) -> None:
    path = tmp_path / "model.safetensors"
    save_file(VALUES, path)
    whole = path.read_bytes()
    path.write_bytes(whole[:keep])
    found = found.format(short=len(whole) - 3, whole=len(whole))
    with pytest.raises(InputError) as info:
        open_reader(tmp_path)
    assert str(info.value) == f"{path}: found {found}, expected a whole safetensors file"


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"no safetensors, but some text", "29 bytes, which end within the header"),
        (struct.pack("<Q", 8) + b"[1, 2]  ", "a damaged header (.*)"),
        (struct.pack("<Q", 8) + b"{1: 2 }} ", "a damaged header (.*)"),
    ],
)
def test_other_files_named_safetensors(tmp_path: Path, content: bytes, found: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(InputError, match=f"found {found}, expected a whole safetensors") as info:
        open_reader(tmp_path)
    assert "\n" not in str(info.value)


def test_key_twice_in_a_safetensors_header(tmp_path: Path) -> None:
    entry = '"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
    header = ("{" + entry + "," + entry + "}").encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    with pytest.raises(InputError, match="a: found twice, expected once"):
        open_reader(path)


def test_dtype_that_is_not_read(tmp_path: Path) -> None:
    save_file({"a": np.zeros(2, np.float64)}, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match="a: found dtype F64, expected one of F32"):
        open_reader(tmp_path)


def test_folder_without_weights(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"found no weights, expected model\.safetensors"):
        open_reader(tmp_path)


def test_two_weight_files_without_an_index(tmp_path: Path) -> None:
    for name in "xy":
        save_file({"a": VALUES["a"]}, tmp_path / f"{name}.safetensors")
    with pytest.raises(InputError, match=r"found 2 \.safetensors files and no index"):
        open_reader(tmp_path)


def test_unknown_suffix(tmp_path: Path) -> None:
    path = tmp_path / "weights.h5"
    path.touch()
    with pytest.raises(InputError, match=r"found suffix '\.h5', expected \.safetensors or \.gguf"):
        open_reader(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "expected a JSON object"),
        ("[1]", "found a list, expected a JSON object"),
        ('{"a": 1, "a": 2}', "a: found twice, expected once"),
        (b"\xff\xfe\xfd", "expected a JSON object"),
    ],
)
def test_broken_config_json(tmp_path: Path, text: str | bytes, message: str) -> None:
    save_file({"a": VALUES["a"]}, tmp_path / "model.safetensors")
    raw = text.encode() if isinstance(text, str) else text
    (tmp_path / "config.json").write_bytes(raw)
    with pytest.raises(InputError, match=rf"config\.json: .*{message}"):
        open_reader(tmp_path)


def test_row_chunks_cover_every_row_once() -> None:
    chunks = row_chunks((10, 1000), np.dtype(np.float32), chunk_bytes=12_000)
    assert chunks == [(0, 3), (3, 6), (6, 9), (9, 10)]
    assert row_chunks((10, 1000), BF16, chunk_bytes=12_000) == chunks
    assert row_chunks((2, 10**6), BF16, chunk_bytes=10) == [(0, 1), (1, 2)]


def test_writer_gives_the_library_s_bytes(tmp_path: Path) -> None:
    """So that a round trip can be compared file by file."""
    save_file(VALUES, tmp_path / "library.safetensors", metadata={"format": "pt"})
    outputs = {name: Output(v.shape, v.dtype, [v[:1], v[1:]]) for name, v in VALUES.items()}
    write_safetensors(tmp_path / "ours.safetensors", outputs)
    ours = (tmp_path / "ours.safetensors").read_bytes()
    assert ours == (tmp_path / "library.safetensors").read_bytes()


class TestPyTorch:
    """pytorch_model.bin: with torch and `weights_only=True`, or not at all."""

    def test_values(self, tmp_path: Path) -> None:
        torch = pytest.importorskip("torch")
        state = {
            "a": torch.arange(6.0).reshape(2, 3).T,  # not contiguous
            "c": torch.tensor([0.5, 3.0], dtype=torch.bfloat16),
            "d": torch.tensor([2**40]),
        }
        torch.save(state, tmp_path / "pytorch_model.bin")
        reader = open_reader(tmp_path)
        assert reader.format == "pytorch"
        assert reader.read("a").tolist() == [[0, 3], [1, 4], [2, 5]]
        assert reader.dtype("c") == BF16
        assert reader.read("c").astype(np.float32).tolist() == [0.5, 3.0]
        assert reader.rows("d", 0, 1).tolist() == [2**40]

    def test_without_torch(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "pytorch_model.bin").write_bytes(b"x")
        monkeypatch.setitem(sys.modules, "torch", None)
        with pytest.raises(InputError, match=r"pytorch_model\.bin: found a PyTorch pickle and no"):
            open_reader(tmp_path)

    def test_pickle_that_runs_code_is_refused(self, tmp_path: Path) -> None:
        torch = pytest.importorskip("torch")
        marker = tmp_path / "ran"

        class Payload:
            def __reduce__(self) -> tuple[object, ...]:
                return (Path.touch, (marker,))

        torch.save({"a": Payload()}, tmp_path / "pytorch_model.bin")
        with pytest.raises(InputError, match=r"found a file that torch\.load\(weights_only=True\)"):
            open_reader(tmp_path)
        (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps({"a": Payload()}))
        with pytest.raises(InputError, match=r"expected plain tensors"):
            open_reader(tmp_path)
        assert not marker.exists()

    def test_truncated(self, tmp_path: Path) -> None:
        torch = pytest.importorskip("torch")
        path = tmp_path / "pytorch_model.bin"
        torch.save({"a": torch.zeros(100)}, path)
        path.write_bytes(path.read_bytes()[:300])
        with pytest.raises(InputError, match="expected plain tensors"):
            open_reader(tmp_path)
