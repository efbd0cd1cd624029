"""What kernels are traced for, and which implementation that means.

A kernel needs to know its device before it is compiled: which backend, and which block sizes.
Where nothing is said that is the device at hand. Compiling ahead of time for another one, and
running in interpret mode, say it with `compile_for`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
from jax.sharding import AbstractDevice, AbstractMesh

Implementation = Literal["reference", "xla_cpu", "pallas_tpu", "pallas_gpu"]
Platform = Literal["cpu", "tpu", "gpu"]

NATIVE: Mapping[Platform, Implementation] = {"tpu": "pallas_tpu", "gpu": "pallas_gpu"}
# Where a platform has no Pallas kernels: plain JAX that XLA makes more of than of the reference.
PLAIN: Implementation = "xla_cpu"


@dataclass(frozen=True)
class Target:
    """The device that kernels are traced for.

    Attributes:
      platform: "tpu", "gpu" (CUDA) or "cpu".
      device_kind: as `jax.Device.device_kind` spells it, e.g. "TPU v5 lite"; "" is unknown.
      cores: TensorCores (TPU) or streaming multiprocessors (GPU) of the device.
      interpret: run kernels in an interpreter, on whatever device there is: True, or
        `pltpu.InterpretParams` for a TPU's memories, DMAs and race detection.
    """

    platform: Platform
    device_kind: str = ""
    cores: int = 1
    interpret: Any = False


# Part of jax's own cache keys: a function traced for one target is traced again for another.
_context = jax.make_user_context(default_value=None)


@contextlib.contextmanager
def compile_for(target: Target) -> Iterator[None]:
    """Kernels traced and lowered inside are for `target`, whatever device is at hand."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(_context(target))
        if target.device_kind and not target.interpret:
            # Where Pallas itself looks for the device that it lowers for.
            device = AbstractDevice(target.device_kind, target.cores, target.platform)
            mesh = AbstractMesh((), (), abstract_device=device)
            stack.enter_context(jax.sharding.use_abstract_mesh(mesh))
        yield


def current_target() -> Target:
    """The target of `compile_for`, else the default device."""
    if _context.value is not None:
        return _context.value
    device = jax.devices()[0]
    known: Mapping[str, Platform] = {"tpu": "tpu", "gpu": "gpu"}
    return Target(known.get(device.platform, "cpu"), device.device_kind)


def choose(
    kernel: str,
    implementation: str | None,
    limits: Mapping[Implementation, Callable[[], str | None]],
) -> Implementation:
    """The implementation to run.

    Args:
      kernel: name for messages.
      implementation: the caller's choice; None takes the target's own kernel where it covers
        the arguments, else the reference.
      limits: for every implementation but the reference, a function that returns None where it
        covers the arguments, else what it supports and what was found.

    Raises:
      NotImplementedError: an explicit choice that does not exist, does not cover the
        arguments or is for another device: it never falls back.
    """
    target = current_target()
    native = NATIVE.get(target.platform, PLAIN)
    if implementation is None:
        return native if native in limits and limits[native]() is None else "reference"
    if implementation == "reference":
        return "reference"
    found = next((name for name in limits if name == implementation), None)
    if found is None:
        names = ", ".join(repr(name) for name in ("reference", *limits))
        raise NotImplementedError(
            f"{kernel}: implementation {implementation!r} is not available; supported: {names}"
        )
    limit = limits[found]()
    if limit is not None:
        raise NotImplementedError(f"{kernel}: implementation {implementation!r} {limit}")
    if found != native:
        wanted = next((name for name, one in NATIVE.items() if one == found), "cpu")
        raise NotImplementedError(
            f"{kernel}: implementation {implementation!r} runs on platform {wanted!r}, found "
            f"{target.platform!r}; here 'reference' is supported"
        )
    return found


def out_struct(shape: tuple[int, ...], dtype: Any, like: jax.Array) -> jax.ShapeDtypeStruct:
    """Description of a kernel's output, varying over the mesh axes that `like` varies over."""
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(like).manual_axis_type)
