"""Engines on meshes of eight virtual devices give the tokens of one device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_mesh_gives_the_same_tokens() -> None:
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.serving.eight_devices"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert {one["mesh"]: one["wrong"] for one in found} == {
        "model=2": [],
        "data=2": [],
        "data=2,model=4": [],
        "data=4,model=2": [],
        "data=8": [],
        "data=2,expert=2,model=2": [],
    }
    preempted = {one["mesh"] for one in found if one["preemptions"]}
    assert preempted == {"data=2", "data=4,model=2"}
