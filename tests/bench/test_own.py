"""What a process has no room for is said before it ends the process."""

from __future__ import annotations

from pathlib import Path

import pytest

from peagle_jax.bench import own
from peagle_jax.errors import InputError


@pytest.mark.parametrize(("taken", "refused"), [(80, False), (81, True)])
def test_memory_maps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken, refused) -> None:
    maps, most = tmp_path / "maps", tmp_path / "max_map_count"
    maps.write_text("7f00-7f01 r--p\n" * taken)
    most.write_text("100\n")
    monkeypatch.setattr(own, "_MAPS", maps)
    monkeypatch.setattr(own, "_MOST_MAPS", most)
    if refused:
        with pytest.raises(InputError, match="found 81 of a process's 100 memory maps taken"):
            own.check_memory_maps("p-eagle K=3")
    else:
        own.check_memory_maps("p-eagle K=3")


def test_where_nothing_counts_maps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own, "_MAPS", tmp_path / "none")
    own.check_memory_maps("p-eagle K=3")
