"""How many devices an inference mesh has along each axis, as `data=2,model=4`. No jax."""

from __future__ import annotations

import dataclasses
import math

from peagle_jax.errors import InputError


@dataclasses.dataclass(frozen=True)
class MeshShape:
    """Devices along each axis.

    data: groups that each have all weights, and requests of their own.
    expert: parts into which a layer's experts are split.
    model: parts into which single weights are split.
    """

    data: int = 1
    expert: int = 1
    model: int = 1

    @classmethod
    def parse(cls, text: str) -> MeshShape:
        """From "data=2,model=4": axes that are not named have 1. Raises InputError."""
        names = [field.name for field in dataclasses.fields(cls)]
        sizes: dict[str, int] = {}
        for part in text.split(","):
            name, equals, number = (piece.strip() for piece in part.partition("="))
            if not equals or not (number.isascii() and number.isdigit()) or int(number) < 1:
                raise InputError(
                    f"--mesh: found {part!r} in {text!r}, expected axis=devices, as in "
                    "data=2,model=4"
                )
            if name not in names:
                raise InputError(
                    f"--mesh: found the axis {name!r}, expected one of {', '.join(names)}"
                )
            if name in sizes:
                raise InputError(f"--mesh: found {name} twice in {text!r}, expected it once")
            sizes[name] = int(number)
        return cls(**sizes)

    def __str__(self) -> str:
        """As `parse` reads it."""
        sizes = dataclasses.asdict(self)
        return ",".join(f"{name}={size}" for name, size in sizes.items() if size > 1) or "data=1"

    @property
    def size(self) -> int:
        """Devices in all."""
        return math.prod(dataclasses.astuple(self))

    @property
    def group_size(self) -> int:
        """Devices that share one copy of the weights."""
        return self.expert * self.model

    def check_devices(self, count: int) -> None:
        """Raises InputError unless the mesh takes exactly so many devices."""
        if self.size != count:
            raise InputError(
                f"--mesh: found {self}, which takes {self.size} device{'s' * (self.size > 1)}, "
                f"expected {count}, as many as there are"
            )


ONE_DEVICE = MeshShape()
