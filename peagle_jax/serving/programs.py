"""An engine's programs: the functions of device.py on one device, or over a mesh.

Over a mesh every data group runs the same program on its own slots and pages, by hand
(`shard_map` over `data`): it sees arrays of one group's size, and takes its own branches and number
of steps. Within a group the compiler splits what it compiles, as the parameters and the target's
pages lie over `model` and `expert`; kernels are split by `sharding.per_device`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from peagle_jax.decoding.speculate import Speculator
from peagle_jax.serving import device
from peagle_jax.serving.device import Pools, SlotState
from peagle_jax.serving.engine_protocol import EngineShape
from peagle_jax.sharding import DATA, MODEL, named

# What the arguments and results of each function are. Pools and slots are donated: pages are
# written in place, without donation every call would copy them.
_SIGNATURES: dict[Callable[..., Any], tuple[tuple[str, ...], tuple[str, ...]]] = {
    device.prefill: (("params", "pools", "slots", "host"), ("pools", "slots")),
    device.insert: (("params", "slots", "host"), ("slots",)),
    device.step: (("params", "pools", "slots", "host"), ("pools", "slots", "host")),
    device.free: (("slots", "host"), ("slots",)),
}
_DONATED = ("pools", "slots")

_GROUPS = PartitionSpec(DATA)
_OF_SLOTS: Any = {
    field.name: PartitionSpec() if field.name == "step_costs" else _GROUPS
    for field in dataclasses.fields(SlotState)
}
# Of each kind what is split over `data`: all but parameters, and what slots have in common.
_SPECS: dict[str, Any] = {
    "params": PartitionSpec(),
    "pools": _GROUPS,
    "slots": SlotState(**_OF_SLOTS),
    "host": _GROUPS,
}


def lower(function: Callable[..., Any], mesh: Mesh | None, args: Any, **static: Any) -> Any:
    """`function` of device.py, lowered for arguments like these; `mesh` None = one device.

    Over a mesh the arrays of all groups are one after the other in each argument but `params`,
    and in each result. Results for the host are whole on every device.
    """
    given, results = _SIGNATURES[function]
    donated = tuple(index for index, kind in enumerate(given) if kind in _DONATED)

    def run(*args: Any) -> Any:
        out = function(*args, **static)
        return out if isinstance(out, tuple) else (out,)

    run.__name__ = function.__name__
    if mesh is None:
        return jax.jit(run, donate_argnums=donated).lower(*args)
    kinds = _placed(mesh)
    # Parameters are taken as they lie: where, and in which layout.
    inputs = tuple(None if kind == "params" else kinds[kind] for kind in given)
    spread = jax.shard_map(
        run,
        mesh=mesh,
        in_specs=tuple(_SPECS[kind] for kind in given),
        out_specs=tuple(_SPECS[kind] for kind in results),
        axis_names={DATA},
        check_vma=False,
    )
    return jax.jit(
        spread,
        donate_argnums=donated,
        in_shardings=inputs,
        out_shardings=tuple(kinds[kind] for kind in results),
    ).lower(*args)


def init(speculator: Speculator, shape: EngineShape, mesh: Mesh | None) -> tuple[Pools, SlotState]:
    """An engine's arrays without a sequence, where `lower`'s programs expect them."""

    def run() -> Any:
        return device.init(
            speculator, shape.slots_a_group, shape.num_pages, shape.page_size, shape.context
        )

    if mesh is None:
        return jax.jit(run)()
    kinds = _placed(mesh)
    spread = jax.shard_map(
        run,
        mesh=mesh,
        in_specs=(),
        out_specs=(_SPECS["pools"], _SPECS["slots"]),
        axis_names={DATA},
        check_vma=False,
    )
    return jax.jit(spread, out_shardings=(kinds["pools"], kinds["slots"]))()


def _placed(mesh: Mesh) -> dict[str, Any]:
    """Where arguments and results of each kind lie, but for the parameters."""
    heads = Pools(target=PartitionSpec(DATA, MODEL), drafter=_GROUPS)  # type: ignore[arg-type]
    specs = {"pools": heads, "slots": _SPECS["slots"], "host": PartitionSpec()}
    return {kind: named(mesh, spec) for kind, spec in specs.items()}
