"""What a speculative step of each draft length costs on this machine, measured once and kept.

Costs depend on the device, the models, their dtypes and how many sequences are decoded together,
and are what `decoding.draft_length` weighs acceptance against. They are kept in the user's cache
folder beside compiled programs, so that a later run decides as this one did.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Float

from peagle_jax import __version__
from peagle_jax.compile_cache import cache_folder
from peagle_jax.files import replace_file

REPEATS = 3
# Costs among which one length is always the best, whatever is accepted.
_CHEAP, _DEAR = 1e-9, 1e9


def forced(lengths: Sequence[int], index: int) -> Float[np.ndarray, "lengths"]:
    """Costs that make every step take `lengths[index]`."""
    costs = np.full(len(lengths), _DEAR, np.float32)
    costs[index] = _CHEAP
    return costs


def measure(
    lengths: Sequence[int], seconds_of: Callable[[Float[np.ndarray, "lengths"]], float]
) -> Float[np.ndarray, "lengths"]:
    """Milliseconds of a step with each draft length: medians of interleaved repeats.

    seconds_of: runs steps under the costs it is given and returns the seconds of one.
    """
    times: list[list[float]] = [[] for _ in lengths]
    for repeat in range(REPEATS + 1):
        for index in range(len(lengths)):
            seconds = seconds_of(forced(lengths, index))
            if repeat:  # the first is a warm-up
                times[index].append(1e3 * seconds)
    # A clock's noise must not make a step look free.
    return np.array([max(statistics.median(one), 1e-3) for one in times], np.float32)


def remembered(
    subject: Any,
    lengths: Sequence[int],
    measured: Callable[[], Float[np.ndarray, "lengths"]],
) -> Float[np.ndarray, "lengths"]:
    """What was measured before for the same subject on this device, or `measured()`, kept.

    subject: something whose repr tells models, dtypes and sizes.
    """
    path = _path(subject)
    # Not there, or not whole: measured anew.
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        kept = np.array(json.loads(path.read_text())["milliseconds"], np.float32)
        if kept.shape == (len(lengths),) and np.isfinite(kept).all() and (kept > 0).all():
            return kept
    costs = measured()
    content = {"device": _device(), "subject": repr(subject), "milliseconds": costs.tolist()}
    # A folder that cannot be written costs the next run the same seconds.
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, (json.dumps(content) + "\n").encode())
    return costs


def _path(subject: Any) -> Path:
    key = json.dumps([_device(), jax.__version__, __version__, repr(subject)])
    return cache_folder() / "step_costs" / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"


def _device() -> str:
    device = jax.devices()[0]
    return f"{device.platform} {device.device_kind} x {jax.device_count()}, {os.cpu_count()} CPUs"
