"""Estimates and collectives are read from a program's text."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, PartitionSpec

from pallas_kernels.chips import CHIPS
from pallas_kernels.program_text import Collectives, read_estimates

V6E = CHIPS["TPU v6 lite"]
# Instructions as the TPU compiler prints them, shortened.
TEXT = """
  %fusion.1 = bf16[8,4096]{1,0:T(8,128)(2,1)} fusion(%a), kind=kOutput, \
backend_config={"estimated_cycles":"1200","other":"5"}
  %call = bf16[8,64]{1,0} custom-call(%b), custom_call_target="tpu_custom_call", \
backend_config={"custom_call_config":{"cost_estimate":{"bytes_accessed":"820000"}}}
  %ar = (bf16[8,4096]{1,0}, f32[]) all-reduce(%fusion.1, %c), to_apply=%add
  %ag-start = (s32[4]{0}, s32[16]{0}) all-gather-start(%d), dimensions={0}
  %ag-done = s32[16]{0} all-gather-done(%ag-start)
  %copy = f32[2]{0} copy(%e), backend_config={"estimated_cycles":"550"}
  %sort = f32[2]{0} sort(%e), backend_config={"estimated_cycles":"9223372036854775807"}
"""


def test_sums_over_a_text() -> None:
    found = read_estimates(TEXT)
    assert found.cycles == 1750
    assert found.kernels == 1
    assert found.kernel_bytes == 820_000
    assert found.collectives == {
        "all-gather": Collectives(1, 64),
        "all-reduce": Collectives(1, 8 * 4096 * 2),
    }
    assert found.compiled_us(V6E) == pytest.approx(1.0)
    assert found.kernels_us(V6E) == pytest.approx(0.5)
    assert found.sent_us(V6E) == pytest.approx((2 * 65536 + 64) / 400e3)


def test_a_clock_that_is_not_known_gives_no_time() -> None:
    found = read_estimates(TEXT)
    assert found.compiled_us(CHIPS["TPU7x"]) is None
    assert read_estimates("").sent_us(CHIPS["NVIDIA H200"]) == 0.0


def test_collectives_of_a_program_over_a_mesh() -> None:
    mesh = Mesh(jax.devices("cpu")[:1], ("model",))

    @jax.jit
    @partial(
        jax.shard_map, mesh=mesh, in_specs=PartitionSpec("model"), out_specs=PartitionSpec("model")
    )
    def sums(x: jax.Array) -> jax.Array:
        total = jax.lax.psum(x, "model")
        return jax.lax.ppermute(total * 2, "model", [(0, 0)])

    text = sums.lower(jnp.ones((4, 6))).compile().as_text()
    assert text is not None
    assert read_estimates(text).collectives["all-reduce"] == Collectives(1, 96)
