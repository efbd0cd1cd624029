"""Folders that are filled in steps: what a stopped run leaves, and what the next one does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from peagle_jax.convert.folders import Journal, resumable_folder
from peagle_jax.errors import InputError


def stop_after(folder: Path, plan: object, *steps: str, error: BaseException) -> None:
    with resumable_folder(folder, plan) as journal:
        for step in steps:
            (journal.folder / step).write_text(step)
            journal.add(step, {"of": step})
        raise error


def test_steps_are_remembered(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        stop_after(folder, "plan", "a", "b", error=KeyboardInterrupt())
    assert not folder.exists()
    with resumable_folder(folder, "plan") as journal:
        assert journal.done == {"a": {"of": "a"}, "b": {"of": "b"}}
        (journal.folder / "c").touch()
    assert sorted(path.name for path in folder.iterdir()) == ["a", "b", "c"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_another_plan_begins_anew(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        stop_after(tmp_path / "out", "plan", "a", error=KeyboardInterrupt())
    with resumable_folder(tmp_path / "out", "another") as journal:
        assert journal.done == {}
    assert list((tmp_path / "out").iterdir()) == []


def test_bad_input_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="bad"):
        stop_after(tmp_path / "out", "plan", "a", error=InputError("bad"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("torn", ['{"c": {"of"', '{"c": 1}'])
def test_a_line_cut_short_is_not_a_step(tmp_path: Path, torn: str) -> None:
    """Not even one that is whole but for its end: `add` had not returned."""
    with Journal(tmp_path, "plan") as journal:
        journal.add("a")
    with (tmp_path / "journal.jsonl").open("a") as file:
        file.write(torn)
    with Journal(tmp_path, "plan") as journal:
        assert journal.done == {"a": True}
        journal.add("d")
    with Journal(tmp_path, "plan") as journal:
        assert journal.done == {"a": True, "d": True}
    lines = (tmp_path / "journal.jsonl").read_text().splitlines()
    assert json.loads(lines[-1]) == {"d": True}


def test_one_at_a_time(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    with resumable_folder(folder, "plan") as journal:
        journal.add("a")
        with pytest.raises(InputError, match="out: found another conversion at work"):
            stop_after(folder, "plan", error=AssertionError())
        assert journal.done == {"a": True}
        assert journal.folder.is_dir()
    assert folder.is_dir()


def test_replaces_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old").touch()
    with resumable_folder(tmp_path / "out", "plan") as journal:
        (journal.folder / "new").touch()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["new"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
