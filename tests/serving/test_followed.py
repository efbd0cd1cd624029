"""What a team's other processes have in place of files."""

from __future__ import annotations

import jax
import pytest

from peagle_jax.hosts import Part, Team
from peagle_jax.mesh_shape import MeshShape
from peagle_jax.serving.errors_file import ErrorsFile
from peagle_jax.serving.followed import FollowedErrors, FollowedResults, open_results, share_done
from peagle_jax.serving.id_set import IdSet
from peagle_jax.serving.requests_file import BadLine
from peagle_jax.serving.results_file import ResultsFile
from peagle_jax.serving.run_files import run_files
from peagle_jax.sharding import make_inference_mesh


@pytest.mark.parametrize("keys", [[], ["a"], ["a", "b", "\ud800", "a long one" * 20]])
def test_ids_reach_every_device(keys) -> None:
    done = IdSet()
    for key in keys:
        done.add(key)
    mesh = make_inference_mesh(MeshShape(), jax.devices()[:1])
    found = share_done(done, mesh)
    assert len(found) == len(keys)
    assert all(key in found for key in keys)
    assert "c" not in found


def test_the_leader_has_files(tmp_path) -> None:
    files = run_files(tmp_path / "out.jsonl", None, Part())
    team = Team(Part(), MeshShape(), (0,), leads=True)
    with open_results(files, {}, team, None) as (results, errors):
        assert isinstance(results, ResultsFile)
        assert isinstance(errors, ErrorsFile)
        results.add("a", b'{"id": "a"}\n')
    assert files.output.read_bytes() == b'{"id": "a"}\n'


def test_the_others_have_none() -> None:
    results, errors = FollowedResults(IdSet()), FollowedErrors()
    results.add("a", b"{}\n")
    results.commit()
    assert "a" not in results.done
    errors.add(BadLine("in", 1, "why"))
    assert errors.count == 1
