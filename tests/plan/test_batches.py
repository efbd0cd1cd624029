"""Plans by batch size: which batches, and the largest of them that fits."""

from __future__ import annotations

import dataclasses

import pytest

from peagle_jax.decoding.speculate import Speculator
from peagle_jax.mesh_shape import MeshShape
from peagle_jax.plan.batches import by_batch
from peagle_jax.plan.estimate import Job, estimate
from peagle_jax.plan.topology import Topology
from tests.plan.test_estimate import CHIP, TARGET

MESH = MeshShape(data=2)


def make_job(hbm_bytes: int, method: str = "prompt-lookup") -> Job:
    """On two made-up chips; a request takes a page of 64 positions."""
    chip = dataclasses.replace(CHIP, hbm_gib=hbm_bytes / 2**30)
    topology = Topology("made up", chip, (1, 2))
    k = 3 if method != "none" else 0
    speculator = Speculator(TARGET, None, method, k, dtype="bfloat16")  # type: ignore[arg-type]
    return Job(speculator, topology, 6, 32, 64, 2.0 if k else 1.0)


@pytest.fixture(scope="module")
def size() -> int:
    """Bytes that let six requests a group fit: the scarcest, as seven do not."""
    roomy = make_job(2**30)
    seven = estimate(dataclasses.replace(roomy, slots=14), MESH)
    return seven.fixed_bytes + (seven.pages_needed + 1) * seven.page_bytes - 1


def test_the_largest_batch_that_fits(size: int) -> None:
    drafted, plain = by_batch(make_job(size), MESH)
    assert drafted.largest == 12
    # Drafts take room: logits of four rows a request instead of one.
    assert plain.largest > 12
    sizes = [plan.job.slots for plan in drafted.plans]
    doublings = [2, 4, 8, 16, 32, 64, 128, 256]
    end = next(one for one in doublings if one >= plain.largest)
    expected = {one for one in doublings if one <= end} | {6, 12, plain.largest}
    assert sizes == sorted(expected)
    for curve in (drafted, plain):
        assert [plan.job.slots for plan in curve.plans] == sizes
        assert [plan.fits for plan in curve.plans] == [one <= curve.largest for one in sizes]
    for one, other in zip(drafted.plans, plain.plans, strict=True):
        assert other.step == one.plain
        assert other.tokens_per_second == one.plain_tokens_per_second
    found = drafted.to_json()
    assert (found["method"], found["largest_batch"]) == ("prompt-lookup", 12)
    assert found["batches"][0] == {
        "batch": 2,
        "fits": True,
        "step_ms_floor": drafted.plans[0].step.ms,
        "tokens_per_second_floor": drafted.plans[0].tokens_per_second,
        "tokens_per_device_second_floor": drafted.plans[0].tokens_per_second / 2,
    }


def test_nothing_fits() -> None:
    drafted, plain = by_batch(make_job(100), MESH)
    assert (drafted.largest, plain.largest) == (0, 0)
    assert [plan.job.slots for plan in drafted.plans] == [2, 4, 6, 8]
    assert not any(plan.fits for plan in drafted.plans)


def test_plain_decoding_has_one_curve(size: int) -> None:
    (only,) = by_batch(make_job(size, "none"), MESH)
    assert only.largest == by_batch(make_job(size), MESH)[1].largest
