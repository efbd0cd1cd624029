"""Published rates of the chips that kernels are planned for: floors, not measurements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Chip:
    """One device as jax sees it.

    Attributes:
      name: short name.
      hbm_gb_s: bandwidth of its memory, 10^9 bytes a second.
      bf16_tflops: dense bfloat16 matrix products, 10^12 a second.
      cores: TensorCores that share one device's programs.
      clock_ghz: of the cores, to turn the compiler's cycles into time; 0 is unknown.
      topology: what `jax.experimental.topologies` calls a slice of it, "" for a GPU.
      hbm_gib: memory that a program can have, 2^30 bytes, as the TPU compiler says in refusing.
      ici_gb_s: what it can send over all its links to other chips, 10^9 bytes a second.
      devices: devices that jax sees of one chip.
    """

    name: str
    hbm_gb_s: float
    bf16_tflops: float
    cores: int = 1
    clock_ghz: float = 0.0
    topology: str = ""
    hbm_gib: float = 0.0
    ici_gb_s: float = 0.0
    devices: int = 1

    def floor_us(self, moved: float, flops: float = 0.0) -> float:
        """Least microseconds for `moved` bytes and `flops` operations."""
        return max(moved / self.hbm_gb_s / 1e3, flops / self.bf16_tflops / 1e6)


# By `jax.Device.device_kind`. tpu7x shows its two cores as two devices: half a chip each.
CHIPS: Mapping[str, Chip] = {
    "TPU v5 lite": Chip("v5e", 819.0, 197.0, 1, 1.5, "v5e:2x2", 15.75, 200.0),
    "TPU v6 lite": Chip("v6e", 1640.0, 918.0, 1, 1.75, "v6e:2x2", 31.24, 400.0),
    "TPU v5": Chip("v5p", 2765.0, 459.0, 2, 1.75, "v5p:2x2x1", 95.73, 600.0),
    "TPU7x": Chip("tpu7x", 3690.0, 1153.0, 1, 0.0, "tpu7x:2x2x1", 94.74, 300.0, 2),
    "NVIDIA H200": Chip("H200", 4800.0, 989.0),
}


def tensor_cores(device_kind: str) -> int:
    """TensorCores that share a grid's parallel dimension on a device; 1 where unknown."""
    chip = CHIPS.get(device_kind)
    return 1 if chip is None else chip.cores
