"""TPU slices by name, as in "v6e:2x4"."""

from __future__ import annotations

import dataclasses
import math

from pallas_kernels.chips import CHIPS, Chip
from peagle_jax.errors import InputError

# Of the chips whose slices are flat; the others' are boxes.
_FLAT = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
_BOXES = "sizes of 1, 2 or a multiple of 4"
_KINDS = {chip.name: kind for kind, chip in CHIPS.items() if chip.topology}


@dataclasses.dataclass(frozen=True)
class Topology:
    """A slice.

    Attributes:
        kind: `jax.Device.device_kind` of its devices.
        chip: their rates.
        grid: chips along each dimension.
    """

    kind: str
    chip: Chip
    grid: tuple[int, ...]

    @property
    def name(self) -> str:
        """As `parse` reads it, and as `jax.experimental.topologies` does."""
        return f"{self.chip.name}:{'x'.join(map(str, self.grid))}"

    @property
    def num_chips(self) -> int:
        """Chips of the slice."""
        return math.prod(self.grid)

    @property
    def num_devices(self) -> int:
        """Devices that jax sees."""
        return self.num_chips * self.chip.devices

    @classmethod
    def parse(cls, text: str) -> Topology:
        """From "v6e:2x4". Raises InputError for what is no slice of a known chip."""
        name, _, shape = text.partition(":")
        if name not in _KINDS:
            raise InputError(
                f"--topology: found {text!r}, expected one of {', '.join(_KINDS)} and a grid of "
                "chips, as in v6e:2x4"
            )
        chip = CHIPS[_KINDS[name]]
        sizes = shape.split("x")
        dimensions = chip.topology.partition(":")[2].count("x") + 1
        if len(sizes) != dimensions or not all(one.isascii() and one.isdigit() for one in sizes):
            raise InputError(
                f"--topology: found {text!r}, expected {dimensions} sizes of {name}'s grid, as in "
                f"{chip.topology}"
            )
        grid = tuple(map(int, sizes))
        if dimensions == 2 and grid not in _FLAT:
            known = ", ".join("x".join(map(str, one)) for one in _FLAT)
            raise InputError(f"--topology: found {text!r}, expected a slice of {name}: {known}")
        if any(size < 1 or (size > 2 and size % 4) for size in grid):
            raise InputError(f"--topology: found {text!r}, expected {_BOXES}")
        return cls(_KINDS[name], chip, grid)
