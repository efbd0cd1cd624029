"""Checkpoints: what is kept, what a full disk and a killed process leave."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from peagle_jax.training.checkpoints import CheckpointError, Checkpoints, _reason


def state(value, size=64):
    return {"w": jnp.full((size, 16), value), "opt": (jnp.full((3,), -value), jnp.int32(value))}


def test_state_and_progress_come_back(tmp_path):
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        assert checkpoints.latest() is None
        checkpoints.save(5, state(5.0), {"data": {"batches": 5}, "best": None})
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        assert checkpoints.latest() == 5
        found = checkpoints.restore(5, state(0.0))
    assert found.progress == {"data": {"batches": 5}, "best": None}
    assert jax.tree.structure(found.state) == jax.tree.structure(state(5.0))
    jax.tree.map(np.testing.assert_array_equal, found.state, state(5.0))


def test_a_state_that_is_donated_right_after_is_saved_as_it_was(tmp_path):
    grow = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    current = state(0.0, size=20_000)
    with Checkpoints(tmp_path, keep=10) as checkpoints:
        for step in range(1, 5):
            current = grow(current)
            checkpoints.save(step, current, {})
            current = grow(current)
        checkpoints.wait()
        for step in range(1, 5):
            saved = checkpoints.restore(step, current).state
            np.testing.assert_array_equal(saved["w"], 2.0 * step - 1)


def test_the_last_ones_and_the_best_stay(tmp_path):
    lengths = {3: 1.5, 6: 1.9, 9: 1.7}
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        for step in range(1, 9):
            checkpoints.save(step, state(step), {}, acceptance_length=lengths.get(step))
    with Checkpoints(tmp_path, keep=2) as checkpoints:  # the metrics are on the disk
        for step in range(9, 12):
            checkpoints.save(step, state(step), {}, acceptance_length=lengths.get(step))
        checkpoints.wait()
        assert checkpoints.steps() == [6, 10, 11]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["10", "11", "6"]


def test_a_save_that_fails_names_cause_and_last_good_step(tmp_path):
    """The limit on file sizes stands for the full disk: both stop the writing midway."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    noise = {"w": jax.random.normal(jax.random.key(0), (400, 400))}
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        checkpoints.save(1, noise, {"data": 1})
        checkpoints.wait()
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
        try:
            checkpoints.save(2, noise, {"data": 2})
            with pytest.raises(CheckpointError) as error:
                checkpoints.wait()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert str(error.value) == (
            f"{tmp_path}: a checkpoint could not be saved (File too large); "
            "the last good checkpoint is step 1"
        )
        assert [p.name for p in tmp_path.iterdir()] == ["1"]
        assert checkpoints.restore(1, noise).progress == {"data": 1}
        checkpoints.save(3, noise, {})  # there is room again
        checkpoints.wait()
        assert checkpoints.latest() == 3


def test_the_reason_is_the_operating_systems_own_words():
    wrapped = ValueError(
        'RESOURCE_EXHAUSTED: Error writing "w/0" in OCDBT database: Failed to write 70 bytes to '
        "file 7: No space left on device [os_error_code='28'] [source locations]"
    )
    assert _reason(wrapped) == "No space left on device"
    assert _reason(OSError(errno.ENOSPC, "No space left on device")) == "No space left on device"


KILLED = """
import sys, jax, jax.numpy as jnp
from pathlib import Path
from peagle_jax.training.checkpoints import Checkpoints
checkpoints = Checkpoints(Path(sys.argv[1]), keep=2)
state = {"w": jax.random.normal(jax.random.key(0), (4000, 2000))}
for step in range(1, 1000):
    checkpoints.save(step, {"w": state["w"] * 0 + step}, {"data": step})
    print(step, flush=True)
"""


def test_a_killed_process_leaves_whole_checkpoints_only(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    for line in process.stdout:
        if int(line) == 3:
            break
    time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    like = {"w": jnp.zeros((4000, 2000))}
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        assert checkpoints.latest() >= 2
        for step in checkpoints.steps():
            found = checkpoints.restore(step, like)
            assert found.progress == {"data": step}
            np.testing.assert_array_equal(found.state["w"], step)
        assert {p.name for p in tmp_path.iterdir()} == {str(s) for s in checkpoints.steps()}
