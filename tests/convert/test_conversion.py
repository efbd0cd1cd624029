"""Conversion there and back: bit-exact, atomic, refusing what it must."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from peagle_jax.convert import orbax_file, shipped
from peagle_jax.convert.checkpoint import load_drafter, load_target
from peagle_jax.convert.conversion import convert
from peagle_jax.convert.layouts import flatten
from peagle_jax.convert.lazy_tensor import LazyTensor
from peagle_jax.errors import InputError
from tests.convert.test_checkpoint import CASES, save_with_transformers
from tests.convert.test_drafter_configs import EAGLE3_JSON
from tests.convert.tiny import BF16, DRAFTER_JSON, TARGET, VOCAB, drafter_tensors, write_checkpoint

Loaded = tuple[Any, dict[str, Any]]

FLAGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "bf16, own embedding": ({"dtype": BF16, "own_embedding": True}, {}),
    "norm_before_fc": (
        {"norm_before_fc": True},
        {"norm_before_fc": True, "norm_before_residual": True, "norm_output": True},
    ),
    "fc_norm, bias": ({"fc_norm": True, "bias": True}, {"fc_norm": True, "attention_bias": True}),
    "qwen3": ({"qk_norm": True}, {"architectures": ["PeagleQwen3ForCausalLM"], "head_dim": 4}),
    "full vocabulary": ({"draft_vocab": VOCAB}, {"draft_vocab_size": None}),
    "eagle3": ({"parallel": False}, {"ptd_token_id": None}),
}


@pytest.fixture
def drafter(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "drafter", DRAFTER_JSON, drafter_tensors())


def assert_same(a: Loaded, b: Loaded) -> None:
    assert a[0] == b[0]
    flat_a, flat_b = flatten(a[1]), flatten(b[1])
    assert flat_a.keys() == flat_b.keys()
    for path, value in flat_a.items():
        assert value.dtype == flat_b[path].dtype
        assert np.asarray(value).tobytes() == np.asarray(flat_b[path]).tobytes(), path


@pytest.mark.parametrize("case", list(FLAGS))
def test_drafter_round_trip_is_bit_exact(tmp_path: Path, case: str) -> None:
    kwargs, keys = FLAGS[case]
    tensors = drafter_tensors(**kwargs)
    source = write_checkpoint(tmp_path / "source", {**DRAFTER_JSON, **keys}, tensors)
    orbax = convert(source, tmp_path / "orbax", target=TARGET)
    assert_same(load_drafter(source, TARGET), load_drafter(orbax, TARGET))
    back = convert(orbax, tmp_path / "vllm", to="vllm")
    assert_same(load_drafter(source, TARGET), load_drafter(back))
    written = load_file(back / "model.safetensors")
    assert written.keys() == tensors.keys()
    for name, value in tensors.items():
        assert written[name].dtype == value.dtype
        assert written[name].shape == value.shape
        assert written[name].tobytes() == value.tobytes(), name


def test_shipped_drafter_comes_back_byte_for_byte(tmp_path: Path) -> None:
    source = shipped.path("smollm2-135m-p-eagle")
    orbax = convert(source, tmp_path / "orbax")
    back = convert(orbax, tmp_path / "vllm", to="vllm")
    weights = "model.safetensors"
    assert (back / weights).read_bytes() == (source / weights).read_bytes()
    assert (back / "config.json").read_bytes() == (source / "config.json").read_bytes()


@pytest.mark.parametrize("case", list(CASES))
def test_target_round_trip(tmp_path: Path, case: str) -> None:
    torch = pytest.importorskip("torch")
    import transformers

    state = save_with_transformers(tmp_path / "source", case)
    orbax = convert(tmp_path / "source", tmp_path / "orbax")
    assert_same(load_target(tmp_path / "source"), load_target(orbax))
    back = convert(orbax, tmp_path / "hf", to="vllm")
    assert_same(load_target(tmp_path / "source"), load_target(back))
    model = transformers.AutoModelForCausalLM.from_pretrained(back, dtype=torch.float32)
    assert type(model).__name__ == f"{CASES[case][0]}ForCausalLM"
    reread = model.state_dict()
    assert reread.keys() == state.keys()
    assert all(np.array_equal(reread[name].numpy(), state[name]) for name in state)


def test_orbax_itself_restores_what_was_written(drafter: Path, tmp_path: Path) -> None:
    import orbax.checkpoint as ocp

    out = convert(drafter, tmp_path / "orbax", target=TARGET)
    _, params = load_drafter(drafter, TARGET)
    abstract = jax.eval_shape(lambda: params)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), abstract
    )
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(out / "params", abstract)
    assert jax.tree.all(jax.tree.map(np.array_equal, params, restored))


def test_manifest(drafter: Path, tmp_path: Path) -> None:
    out = convert(drafter, tmp_path / "orbax", target=TARGET)
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["format"] == "peagle_jax checkpoint"
    assert manifest["kind"] == "drafter"
    assert manifest["config"]["aux_layer_ids"] == [2, 4, 5]
    assert manifest["tensors"]["fc.kernel"] == {"shape": [16, 48], "dtype": "float32"}
    weights = (drafter / "model.safetensors").read_bytes()
    assert manifest["source"]["files"] == [
        {
            "name": "model.safetensors",
            "size": len(weights),
            "sha256": hashlib.sha256(weights).hexdigest(),
        }
    ]


def test_dtype_and_progress(drafter: Path, tmp_path: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    out = convert(
        drafter,
        tmp_path / "orbax",
        target=TARGET,
        dtype="bfloat16",
        progress=lambda *call: calls.append(call),
    )
    _, params = load_drafter(out)
    assert params["fc"]["kernel"].dtype == "bfloat16"
    assert params["draft_to_target"].dtype == "int32"
    counted = [done for _, done, _ in calls]
    assert counted == sorted(counted)
    written = sum(value.nbytes for value in flatten(params).values())
    hashed = (drafter / "model.safetensors").stat().st_size
    assert counted[-1] == written + hashed
    assert {total for _, _, total in calls} == {written + hashed}
    assert {name for name, _, _ in calls} == {*flatten(params), "model.safetensors"}


def test_tokenizer_files_come_along(tmp_path: Path) -> None:
    source = tmp_path / "source"
    save_with_transformers(source, "llama")
    (source / "tokenizer.json").write_text("{}")
    (source / "chat_template.jinja").write_text("{{ messages }}")
    out = convert(source, tmp_path / "orbax")
    assert (out / "chat_template.jinja").read_text() == "{{ messages }}"
    assert (out / "tokenizer.json").exists()


class Stopped:
    """Makes reading stop at tensors of a name, and notes which were read whole before."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: str, error: BaseException):
        read = LazyTensor.rows
        self.read: list[str] = []

        def rows(tensor: LazyTensor, start: int, stop: int) -> np.ndarray:
            if at in tensor.name:
                raise error
            self.read.append(tensor.name)
            return read(tensor, start, stop)

        monkeypatch.setattr(LazyTensor, "rows", rows)


def test_stopped_conversion_to_vllm_is_gone_on_with(
    drafter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In files of few tensors, as a large checkpoint is; those that are whole stay."""
    monkeypatch.setattr("peagle_jax.convert.export.SHARD_BYTES", 6_000)
    whole = convert(drafter, tmp_path / "whole", target=TARGET, to="vllm")
    files = sorted(path.name for path in whole.glob("*.safetensors"))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    first = Stopped(monkeypatch, "layers.1.mlp.up", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        convert(drafter, tmp_path / "out", target=TARGET, to="vllm")
    partial = tmp_path / ".out.partial"
    done = json.loads("".join((partial / "journal.jsonl").read_text().splitlines()[1:2]))
    assert set(done) == {files[0]}
    monkeypatch.undo()
    monkeypatch.setattr("peagle_jax.convert.export.SHARD_BYTES", 6_000)
    second = Stopped(monkeypatch, "no such tensor", KeyboardInterrupt())
    steps: list[tuple[int, int]] = []
    out = convert(
        drafter,
        tmp_path / "out",
        target=TARGET,
        to="vllm",
        progress=lambda what, done, total: steps.append((done, total)),
    )
    kept = set(load_file(whole / files[0]))
    assert kept & set(first.read)
    assert not kept & set(second.read)
    assert steps[-1][0] == steps[-1][1]
    assert {path.name for path in out.iterdir()} == {path.name for path in whole.iterdir()}
    for path in out.iterdir():
        assert path.read_bytes() == (whole / path.name).read_bytes(), path.name
    assert_same(load_drafter(drafter, TARGET), load_drafter(out))


def test_stopped_conversion_is_gone_on_with(
    drafter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = convert(drafter, tmp_path / "whole", target=TARGET)
    first = Stopped(monkeypatch, "layers.1.mlp", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        convert(drafter, tmp_path / "out", target=TARGET)
    monkeypatch.undo()
    assert not (tmp_path / "out").exists()
    assert (tmp_path / ".out.partial").is_dir()
    second = Stopped(monkeypatch, "no such tensor", KeyboardInterrupt())
    out = convert(drafter, tmp_path / "out", target=TARGET)
    assert first.read
    assert not set(first.read) & set(second.read)
    others = {"d2t", "t2d", "mask_hidden"}  # read in their own ways, or not at all
    assert {*first.read, *second.read} == set(load_file(drafter / "model.safetensors")) - others
    assert_same(load_drafter(whole), load_drafter(out))
    assert {path.name for path in out.iterdir()} == {path.name for path in whole.iterdir()}
    assert not (tmp_path / ".out.partial").exists()


@pytest.mark.parametrize("change", ["dtype", "source"])
def test_another_conversion_begins_anew(
    drafter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    first = Stopped(monkeypatch, "layers.1.mlp", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        convert(drafter, tmp_path / "out", target=TARGET)
    monkeypatch.undo()
    if change == "source":
        write_checkpoint(drafter, DRAFTER_JSON, drafter_tensors(seed=1))
    second = Stopped(monkeypatch, "no such tensor", KeyboardInterrupt())
    dtype = "bfloat16" if change == "dtype" else None
    out = convert(drafter, tmp_path / "out", target=TARGET, dtype=dtype)
    assert set(first.read) < set(second.read)
    monkeypatch.undo()
    assert_same(load_drafter(drafter, TARGET, dtype=dtype), load_drafter(out))


def test_killed_while_orbax_takes_the_arrays_over(
    drafter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The arrays lie in two places then; none is written again."""
    rename = Path.rename

    def killed(path: Path, target: Path) -> Path:
        if path.name == "layers_1.mlp.up_proj.kernel":
            raise KeyboardInterrupt
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        convert(drafter, tmp_path / "out", target=TARGET)
    monkeypatch.undo()
    stopped = Stopped(monkeypatch, "no such tensor", KeyboardInterrupt())
    out = convert(drafter, tmp_path / "out", target=TARGET)
    assert stopped.read == []
    assert_same(load_drafter(drafter, TARGET), load_drafter(out))


def test_full_disk_is_seen_before_anything_is_written(
    drafter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9, 9, 10**6))
    for to in ("orbax", "vllm"):
        with pytest.raises(
            InputError, match=r"out: found 0\.00 GB free on the disk, expected 0\.02"
        ):
            convert(drafter, tmp_path / "out", target=TARGET, to=to)
        assert [path.name for path in tmp_path.iterdir()] == ["drafter"]


def test_disk_that_fills_up_keeps_what_is_done(
    drafter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = Stopped(monkeypatch, "layers.1.mlp", OSError(errno.ENOSPC, "No space left on device"))
    with pytest.raises(InputError, match="out: found No space left on device, expected a folder"):
        convert(drafter, tmp_path / "out", target=TARGET)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9, 9, 0))
    with pytest.raises(InputError, match="GB free on the disk"):  # still full
        convert(drafter, tmp_path / "out", target=TARGET)
    monkeypatch.undo()
    again = Stopped(monkeypatch, "no such tensor", KeyboardInterrupt())
    convert(drafter, tmp_path / "out", target=TARGET)
    assert not set(stopped.read) & set(again.read)


def test_nothing_is_said_on_stderr(drafter: Path, tmp_path: Path) -> None:
    """Orbax logs through absl, which writes to the stderr that there was at its import."""
    config = {**DRAFTER_JSON, "eagle_aux_hidden_state_layer_ids": [1, 3, 5]}
    write_checkpoint(drafter, config, drafter_tensors())
    command = [
        sys.executable,
        "-m",
        "peagle_jax.cli",
        "convert",
        str(drafter),
        str(tmp_path / "out"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_nan_leaves_nothing(tmp_path: Path) -> None:
    tensors = drafter_tensors()
    tensors["layers.1.mlp.up_proj.weight"][0, 0] = np.nan
    source = write_checkpoint(tmp_path / "source", DRAFTER_JSON, tensors)
    with pytest.raises(InputError, match=r"up_proj\.weight: found NaN or Inf"):
        convert(source, tmp_path / "out", target=TARGET)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_folder_in_use(drafter: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "precious").touch()
    with pytest.raises(InputError, match="out: found a folder that is not empty, expected a new"):
        convert(drafter, out, target=TARGET)
    assert (out / "precious").exists()
    convert(drafter, out, target=TARGET, overwrite=True)
    assert not (out / "precious").exists()
    assert (out / "manifest.json").exists()
    with pytest.raises(InputError, match="found the source inside, expected another output"):
        convert(out, out, overwrite=True)
    with pytest.raises(InputError, match="found a file, expected a folder to make"):
        convert(drafter, drafter / "config.json", target=TARGET)


def test_output_that_cannot_be_written(drafter: Path, tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.touch()
    with pytest.raises(InputError, match=r"out: found Not a directory, expected a folder that"):
        convert(drafter, blocker / "out", target=TARGET)


@pytest.mark.parametrize("found", ["drafter", "target"])
def test_options_that_cannot_be_honoured(drafter: Path, tmp_path: Path, found: str) -> None:
    if found == "target":
        save_with_transformers(tmp_path / "target", "llama")
        with pytest.raises(InputError, match="found a target, expected a drafter, as a target"):
            convert(tmp_path / "target", tmp_path / "out", target=TARGET)
        return
    with pytest.raises(InputError, match="found none, expected ids, or the target at hand"):
        convert(drafter, tmp_path / "out")
    out = convert(drafter, tmp_path / "out", target=TARGET)
    with pytest.raises(InputError, match="aux_layer_shift: found a converted checkpoint"):
        load_drafter(out, TARGET, aux_layer_shift=1)


def test_aux_layer_shift_is_written(tmp_path: Path) -> None:
    config = {**EAGLE3_JSON, "eagle_aux_hidden_state_layer_ids": [1, 3, 5]}
    source = write_checkpoint(tmp_path / "source", config, drafter_tensors(parallel=False))
    out = convert(source, tmp_path / "out", aux_layer_shift=1)
    assert load_drafter(out, TARGET)[0].aux_layer_ids == (2, 4, 6)


class TestDamagedOrbax:
    """A converted folder that lost something is refused, never read as zeros."""

    @pytest.fixture
    def folder(self, drafter: Path, tmp_path: Path) -> Path:
        return convert(drafter, tmp_path / "out", target=TARGET)

    @pytest.mark.parametrize(
        ("file", "message"),
        [
            ("params/fc.kernel/0.0", r"fc\.kernel: found .*expected a whole array"),
            ("params/fc.kernel/.zarray", r"fc\.kernel: found .*expected a whole array"),
        ],
    )
    def test_lost_file(self, folder: Path, file: str, message: str) -> None:
        (folder / file).unlink()
        with pytest.raises(InputError, match=message) as info:
            load_drafter(folder, TARGET)
        assert "\n" not in str(info.value)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"format_version": 99}, "found 'peagle_jax checkpoint', 99, expected"),
            ({"kind": "verifier"}, "kind: found 'verifier', expected one of target, drafter"),
            ({"config": {}}, "config: found .*expected a whole configuration"),
            ({"config": {"paralel": True}}, "config: paralel: found and not understood"),
            ({"config": {"parallel": "yes"}}, "config: parallel: found 'yes', expected bool"),
            ({"tensors": None}, "tensors: found None, expected an object"),
        ],
    )
    def test_manifest(self, folder: Path, change: dict[str, Any], message: str) -> None:
        path = folder / "manifest.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
        with pytest.raises(InputError, match=rf"manifest\.json: .*{message}"):
            load_drafter(folder, TARGET)

    def test_tensor_that_differs_from_the_manifest(self, folder: Path) -> None:
        path = folder / "manifest.json"
        manifest = json.loads(path.read_text())
        manifest["tensors"]["fc.kernel"]["dtype"] = "bfloat16"
        path.write_text(json.dumps(manifest))
        with pytest.raises(InputError, match=r"fc\.kernel: found .*float32.*expected .*bfloat16"):
            load_drafter(folder, TARGET)


def test_pieces_are_written_and_read_whole(
    drafter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orbax_file, "PIECE_BYTES", 1000)
    monkeypatch.setattr(orbax_file.OrbaxReader, "chunk_bytes", 700)
    out = convert(drafter, tmp_path / "out", target=TARGET)
    assert len(list((out / "params" / "fc.kernel").glob("[0-9]*"))) > 1
    assert_same(load_drafter(drafter, TARGET), load_drafter(out, TARGET))


ON_A_MESH = """
import sys
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from peagle_jax.convert.checkpoint import load_drafter
from peagle_jax.convert.layouts import flatten
_, whole = load_drafter(sys.argv[1])
mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("x", "y"))
for spec in (P("x", "y"), P(None, ("x", "y")), P("y")):
    shardings = lambda config, abstract: jax.tree.map(
        lambda leaf: NamedSharding(mesh, spec if leaf.ndim == 2 else P()), abstract
    )
    _, placed = load_drafter(sys.argv[1], sharding=shardings)
    assert len(placed["fc"]["kernel"].addressable_shards) == 4
    print(placed["fc"]["kernel"].addressable_shards[0].data.shape)
    for path, value in flatten(placed).items():
        assert np.array_equal(value, flatten(whole)[path]), path
"""


@pytest.mark.parametrize("form", ["safetensors", "orbax"])
def test_restored_onto_a_mesh(tmp_path: Path, form: str) -> None:
    config = {**DRAFTER_JSON, "eagle_aux_hidden_state_layer_ids": [1, 3, 5]}
    source = write_checkpoint(tmp_path / "source", config, drafter_tensors())
    folder = source if form == "safetensors" else convert(source, tmp_path / "out")
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    done = subprocess.run(
        [sys.executable, "-c", ON_A_MESH, str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["(8, 24)", "(16, 12)", "(8, 48)"]
