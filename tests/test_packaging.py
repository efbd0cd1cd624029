"""The wheel holds all that an installed `peagle` needs: both packages and the drafters."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Names in a wheel built from this checkout, and its entry points; needs no network."""
    if importlib.util.find_spec("hatchling") is None:
        pytest.skip("hatchling is not installed (it is in the test extra)")
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index"]
    command += ["--no-build-isolation", "--wheel-dir", str(out), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (path,) = out.glob("peagle_jax-*.whl")
    with zipfile.ZipFile(path) as archive:
        entry_points = next(n for n in archive.namelist() if n.endswith("entry_points.txt"))
        return set(archive.namelist()), archive.read(entry_points).decode()


@pytest.mark.parametrize("package", ["peagle_jax", "pallas_kernels"])
def test_packages_are_whole(wheel, package):
    names, _ = wheel
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / package).rglob("*.py")}
    assert files <= names
    assert f"{package}/__init__.py" in names


def test_checkpoints_are_inside(wheel):
    names, _ = wheel
    shipped = {
        path.relative_to(ROOT / "checkpoints").as_posix()
        for path in (ROOT / "checkpoints").rglob("*")
        if path.is_file()
    }
    assert any(name.endswith(".safetensors") for name in shipped)
    assert {f"peagle_jax/_checkpoints/{name}" for name in shipped} <= names


def test_nothing_else_is_inside(wheel):
    names, _ = wheel
    tops = {name.partition("/")[0] for name in names if ".dist-info/" not in name}
    assert tops == {"peagle_jax", "pallas_kernels"}


def test_command_is_registered(wheel):
    assert "peagle = peagle_jax.cli:command" in wheel[1]


def test_readme_tree_names_every_file_of_the_library():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    tree = readme[readme.index("## What is where") :]
    missing = [
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "peagle_jax").rglob("*.py")
        if path.name != "__init__.py" and f" {path.name} " not in tree
    ]
    assert missing == []
