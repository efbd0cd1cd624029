"""Run by test_multi_device.py in a process of its own, with eight virtual devices.

Kernels inside shard_map over the model axis, key heads sharded, against one device.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from pallas_kernels.cache_write import write_cache, write_cache_paged
from pallas_kernels.cod_attention import cod_attention
from pallas_kernels.mxfp4_matmul import mxfp4_matmul
from pallas_kernels.target import NATIVE, Target, compile_for
from pallas_kernels.verify_attention import verify_attention, verify_attention_paged
from pallas_kernels.verify_sample import Filters, sample_tokens

# Axis of the heads, or outputs, of each argument.
HEADS = {"q": 2, "new_keys": 2, "new_values": 2, "keys": 1, "values": 1, "sinks": 0}
HEADS |= {"key_pages": 1, "value_pages": 1, "own": 2, "packed": 2, "scales": 2}


def spec(name: str) -> P:
    return P(*(None,) * HEADS[name], "model") if name in HEADS else P()


def check(
    function: Any, arrays: dict[str, Any], out: Any, whole: bool = False, **static: Any
) -> None:
    mesh = Mesh(np.asarray(jax.devices()), ("model",))
    assert mesh.size == 8
    want = function(**arrays, **static, implementation="reference")
    for platform, implementation in NATIVE.items():
        call = functools.partial(function, **static, implementation=implementation)
        sharded = jax.shard_map(
            lambda given, call=call: call(**given),
            mesh=mesh,
            in_specs=({name: P() if whole else spec(name) for name in arrays},),
            out_specs=out,
            check_vma=False,  # the interpreter's own loops do not say what they vary over
        )
        with compile_for(Target(platform, interpret=True)):
            got = jax.jit(sharded)(arrays)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), got, want)


def main() -> None:
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    batch, rows, kv_heads, dim, capacity, page = 2, 3, 8, 128, 32, 16
    new = {"new_keys": normal(batch, rows, kv_heads, dim)}
    new["new_values"] = new["new_keys"] + 1
    start = jnp.asarray([5, 29], jnp.int32)
    cache = {"keys": normal(batch, kv_heads, capacity, dim)}
    cache["values"] = cache["keys"] - 1
    pages = {"key_pages": normal(5, kv_heads, page, dim)}
    pages["value_pages"] = pages["key_pages"] - 1
    table = jnp.asarray([[3, 1], [4, 2]], jnp.int32)
    q = {"q": normal(batch, rows, 16, dim), "sinks": normal(16), "start": start}
    heads, split = spec("q"), (spec("keys"), spec("values"))
    check(verify_attention, q | cache, heads, window=9)
    check(verify_attention_paged, q | pages | {"page_table": table}, heads)
    check(write_cache, new | cache | {"start": start}, split)
    check(write_cache_paged, new | pages | {"start": start, "page_table": table}, split)
    training = {
        "q": normal(batch, page, 16, dim),
        "own": normal(batch, page, kv_heads, 2, 1),
        "anchor": jnp.tile(jnp.arange(page), (batch, 1)) + 16,
        "depth": jnp.ones(page, jnp.int32),
        "documents": jnp.tile(jnp.arange(capacity) // 20, (batch, 1)),
    }
    check(cod_attention, training | cache, (heads, spec("own")))
    experts, width, outputs = 3, 64, 8 * 128
    product = {
        "x": normal(7, width),
        "sizes": jnp.asarray([4, 0, 3], jnp.int32),
        "packed": jnp.asarray(rng.integers(0, 256, (experts, width // 2, outputs)), jnp.uint8),
        "scales": jnp.asarray(rng.integers(120, 130, (experts, width // 32, outputs)), jnp.uint8),
    }
    check(mxfp4_matmul, product, P(None, "model"))
    # Whole on every device, as a step has them: each device draws what one device draws.
    words = jax.random.key_data(jax.random.split(jax.random.key(0), (batch, rows)))
    filters = Filters(*(jnp.full((batch,), value) for value in (0.8, 20, 0.9, 0.01)))
    drawn = {"logits": 3 * normal(batch, rows, 300), "filters": filters, "keys": words}
    check(sample_tokens, drawn, P(), whole=True)
    print("equal")  # noqa: T201  # what the parent looks for


if __name__ == "__main__":
    main()
