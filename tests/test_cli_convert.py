"""`peagle convert` and `peagle inspect` on a tiny drafter of the goldens."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from peagle_jax import cli

DRAFTER = Path(__file__).resolve().parent / "goldens" / "drafters" / "peagle_base"


@pytest.fixture
def drafter(tmp_path):
    """A copy that may be spoiled."""
    folder = tmp_path / "drafter"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(DRAFTER / name, folder / name)
    return folder


def peagle(capsys, *argv):
    code = cli.main([str(argument) for argument in argv])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_there_and_back_is_bit_exact(capsys, drafter, tmp_path):
    orbax, vllm, again = tmp_path / "orbax", tmp_path / "vllm", tmp_path / "again"
    for source, out, to in ((drafter, orbax, "orbax"), (orbax, vllm, "vllm")):
        assert peagle(capsys, "convert", source, out, "--to", to) == (0, f"{out}\n", "")
    assert peagle(capsys, "convert", vllm, again, "--to", "vllm")[0] == 0
    written = (vllm / "model.safetensors").read_bytes()
    assert written == (again / "model.safetensors").read_bytes()
    before, after = (
        json.loads(peagle(capsys, "inspect", folder, "--json")[1]) for folder in (drafter, vllm)
    )
    assert after["config"] == before["config"]
    assert after["num_parameters"] == before["num_parameters"] > 0


def test_inspect_tells_kind_method_and_tensors(capsys):
    code, out, err = peagle(capsys, "inspect", DRAFTER, "--tensors")
    assert (code, err) == (0, "")
    lines = [line.split() for line in out.splitlines()]
    assert ["kind", "drafter", "(p-eagle)"] in lines
    assert any(line[0] == "mask_hidden" for line in lines)


def test_inspect_json_is_one_object(capsys):
    _, out, _ = peagle(capsys, "inspect", DRAFTER, "--json")
    found = json.loads(out)
    assert (found["kind"], found["method"], found["problems"]) == ("drafter", "p-eagle", [])
    assert "mask_hidden" in {tensor["name"] for tensor in found["tensors"]}


def test_what_would_not_load_is_shown_and_refused(capsys, drafter, tmp_path):
    config = json.loads((drafter / "config.json").read_text())
    config["mask_token_id"] = 10**6
    (drafter / "config.json").write_text(json.dumps(config))
    code, out, err = peagle(capsys, "inspect", drafter)
    assert code == 2
    assert "drafter" in out
    assert err.startswith("peagle: error: ")
    assert "1000000" in err

    code, out, err = peagle(capsys, "convert", drafter, tmp_path / "out")
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["drafter"]


def test_a_folder_in_use_is_kept(capsys, drafter, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("keep")
    assert peagle(capsys, "convert", drafter, out)[0] == 2
    assert [path.name for path in out.iterdir()] == ["mine.txt"]
    assert peagle(capsys, "convert", drafter, out, "--overwrite")[0] == 0
    assert not (out / "mine.txt").exists()
