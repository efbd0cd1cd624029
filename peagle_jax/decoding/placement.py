"""Where the networks' parameters lie on a mesh: the target split, the drafter on every device.

A drafter is small: split over `model` it would save little memory, and its passes would wait for
two sums over the devices a layer, as the target's do, for a fraction of the work.
"""

from __future__ import annotations

from typing import Any

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from peagle_jax import sharding
from peagle_jax.config import DrafterConfig, ModelConfig
from peagle_jax.errors import InputError
from peagle_jax.models import decoder, kernel_forms
from peagle_jax.sharding import EXPERT, Rules


def target_shardings(
    config: ModelConfig, abstract: Any, mesh: Mesh, rules: Rules = sharding.TENSOR_RULES
) -> Any:
    """The tree of shardings of a target's parameters, whose shapes `abstract` gives,
    some of them quantised or none.

    Raises InputError for a mesh that does not fit: heads or a dimension that its devices cannot
    share evenly, or experts' devices for a model without experts.
    """
    sharding.check_heads(config.block, mesh, rules)
    experts = mesh.shape.get(EXPERT, 1)
    if experts > 1 and config.block.moe is None:
        raise InputError(f"mesh: {EXPERT}: found {experts}, expected 1 for a model without experts")
    axes = kernel_forms.axes_like(decoder.logical_axes(config), abstract)
    specs = sharding.partition_specs(axes, abstract, mesh, rules)
    return sharding.named(mesh, specs)


def drafter_sharding(config: DrafterConfig, abstract: Any, mesh: Mesh) -> NamedSharding:
    """The sharding of each of a drafter's parameters: whole on every device."""
    del config, abstract
    return NamedSharding(mesh, PartitionSpec())
