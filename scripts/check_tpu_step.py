#!/usr/bin/env python3
"""Compiles a speculative step for TPUs, kernels switched on, and reads the compiler's estimate.

    scripts/check_tpu --step                      four kinds of chip, batch 1 and 8
    scripts/check_tpu --step --chip v6e --batch 1 --reference

The target has the widths of Llama 3 8B but 8 layers, so that it fits every chip; the P-EAGLE
drafter has 4. Programs: a verification of 1, 8 and 9 rows up to the argmax, one draft pass of
K = 1 and K = 8, and the whole step of K = 8, as a chain and as a tree (compiled only: their
estimates would add up branches of which one is taken).

An estimate is the sum of `estimated_cycles` over the optimised program, over the clock, plus the
bytes that the Pallas calls declare over the HBM bandwidth, at full caches. Both parts are
printed, beside the floor: every weight and every cache byte once. Rows of 1 are lowered as
matrix-vector products, which the compiler estimates far above their floor: compare with the
floor before believing a ratio to them.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"}
# Only the compiler is used: no device to be fought over by two processes.
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
os.environ.setdefault("TPU_STDERR_LOG_LEVEL", "3")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax  # after the settings above
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from pallas_kernels.chips import CHIPS, Chip
from pallas_kernels.program_text import compile_with_text, read_estimates
from pallas_kernels.target import Target, compile_for
from peagle_jax.config import BlockConfig, DrafterConfig, Method, ModelConfig
from peagle_jax.decoding.draft import Drafting
from peagle_jax.decoding.sampling import RequestArrays
from peagle_jax.decoding.speculate import Speculator
from peagle_jax.models import decoder, drafter
from peagle_jax.models.cache import KVCache
from peagle_jax.models.decoder import Decoder

TPUS = {chip.name: kind for kind, chip in CHIPS.items() if chip.topology}
BLOCK = BlockConfig(4096, 14336, 8, 32, 8, 128)
TARGET = ModelConfig(BLOCK, 128256, max_positions=65536)
DRAFTER = DrafterConfig(
    block=BlockConfig(4096, 14336, 4, 32, 8, 128),
    parallel=True,
    vocab_size=TARGET.vocab_size,
    draft_vocab_size=32000,
    target_hidden_size=4096,
    aux_layer_ids=(2, 4, 6),
    mask_token_id=TARGET.vocab_size - 1,
)
DTYPE = jnp.bfloat16
CONTEXT = 4096


def speculator(k: int, method: Method = "p-eagle") -> Speculator:
    """The P-EAGLE step of K drafts."""
    return Speculator(TARGET, DRAFTER, method, k, draft_sampling="greedy", dtype="bfloat16")


def requests(batch: int) -> Any:
    """Abstract sampling parameters."""

    def entry(dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((batch,), dtype)

    kinds = {"temperature": jnp.float32, "top_k": jnp.int32, "top_p": jnp.float32}
    kinds |= {"min_p": jnp.float32, "seed": jnp.uint32, "max_new_tokens": jnp.int32}
    kinds |= {"ignore_eos": jnp.bool_}
    return RequestArrays(**{name: entry(dtype) for name, dtype in kinds.items()})


def verify(batch: int, rows: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The target's pass over `rows` rows, and the argmax of each."""

    def run(cache: Any, params: Any, tokens: Any, start: Any) -> Any:
        network = Decoder(TARGET, DTYPE)
        out = network.apply({"params": params}, tokens, start, cache, DRAFTER.aux_layer_ids)
        best = network.apply({"params": params}, out.hidden, method="best")
        return out.cache, best, out.features

    return run, (
        jax.eval_shape(lambda: KVCache.init(BLOCK, batch, CONTEXT, DTYPE)),
        decoder.abstract_params(TARGET, DTYPE),
        jax.ShapeDtypeStruct((batch, rows), jnp.int32),
        jax.ShapeDtypeStruct((batch,), jnp.int32),
    )


def state_of(k: int, batch: int) -> Any:
    return jax.eval_shape(lambda: speculator(k).init_state(batch, CONTEXT - 1024, 512))


def both_params() -> dict[str, Any]:
    return {
        "target": decoder.abstract_params(TARGET, DTYPE),
        "drafter": drafter.abstract_params(DRAFTER, DTYPE),
    }


def draft(batch: int, k: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """One pass of the drafter as it is mostly taken, one token being confirmed, and its argmax."""

    def run(state: Any, params: Any) -> Any:
        one = speculator(k)
        networks = one.networks(params)
        drafting = Drafting(networks, one.method, k, one.draft_sampling, one.verification)
        stream, cache = drafting._parallel_pass(state, jnp.ones((batch,), jnp.int32), 1)
        return networks.draft_head(stream, "best"), cache

    return run, (state_of(k, batch), both_params())


def step(
    batch: int, k: int, method: Method = "p-eagle"
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The whole speculative step."""

    def run(state: Any, params: Any, asked: Any) -> Any:
        return speculator(k, method).step(params, state, asked)

    return run, (state_of(k, batch), both_params(), requests(batch))


PROGRAMS: dict[str, Callable[[int], tuple[Callable[..., Any], tuple[Any, ...]]]] = {
    "verify 1 row": lambda batch: verify(batch, 1),
    "verify 8 rows": lambda batch: verify(batch, 8),
    "verify 9 rows": lambda batch: verify(batch, 9),
    "draft K=1": lambda batch: draft(batch, 1),
    "draft K=8": lambda batch: draft(batch, 8),
    "step K=8": lambda batch: step(batch, 8),
    "step tree K=8": lambda batch: step(batch, 8, "p-eagle+tree"),
}


def floor_us(name: str, batch: int, chip: Chip) -> float:
    """Every weight that the program multiplies with and every cache byte, read once."""
    config: Any = DRAFTER if name.startswith("draft") else TARGET
    abstract = (drafter if name.startswith("draft") else decoder).abstract_params(config, DTYPE)
    leaves = jax.tree_util.tree_leaves_with_path(abstract)
    weights = sum(
        leaf.size * leaf.dtype.itemsize
        for path, leaf in leaves
        if "embed_tokens" not in jax.tree_util.keystr(path)
    )
    block = config.block
    cache = 2 * batch * block.num_layers * block.num_kv_heads * CONTEXT * block.head_dim * 2
    return chip.floor_us(weights + cache)


def report(name: str, batch: int, kind: str, device: Any, on: bool) -> str:
    """Compiles a program; a line of the table."""
    chip = CHIPS[kind]
    function, arguments = PROGRAMS[name](batch)
    place = SingleDeviceSharding(device)
    arguments = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), arguments
    )
    target = Target("tpu" if on else "cpu", kind, chip.cores)
    began = time.monotonic()
    with compile_for(target):
        program, text = compile_with_text(jax.jit(function, donate_argnums=0).lower(*arguments))
    seconds = time.monotonic() - began
    found = read_estimates(text)
    cells = f"{chip.name:6}{batch:6}  {name:15}{'kernels' if on else 'XLA':9}{found.kernels:6}"
    temporary = program.memory_analysis().temp_size_in_bytes / 2**20
    xla, pallas = found.compiled_us(chip), found.kernels_us(chip)
    if name.startswith("step") or xla is None:
        return f"{cells}{'':36}{temporary:10.1f}{seconds:8.1f}s"
    floor = floor_us(name, batch, chip)
    cells += f"{xla:9.0f}{pallas:9.0f}{xla + pallas:9.0f}{floor:9.0f}"
    return f"{cells}{temporary:10.1f}{seconds:8.1f}s"


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chip", action="append", choices=sorted(TPUS), help="default: all")
    parser.add_argument("--batch", action="append", type=int, help="default: 1 and 8")
    parser.add_argument("--match", action="append", help="part of a program's name")
    parser.add_argument("--reference", action="store_true", help="XLA alone too")
    options = parser.parse_args()
    print(
        f"{'chip':6}{'batch':>6}  {'program':15}{'':9}{'calls':>6}{'XLA us':>9}{'calls us':>9}"
        f"{'sum us':>9}{'floor us':>9}{'temp MiB':>10}{'compile':>9}"
    )
    for name in options.chip or TPUS:
        kind = TPUS[name]
        topology = topologies.get_topology_desc(platform="tpu", topology_name=CHIPS[kind].topology)
        for batch in options.batch or (1, 8):
            for program in PROGRAMS:
                if options.match and not any(part in program for part in options.match):
                    continue
                for on in (True, False) if options.reference else (True,):
                    print(report(program, batch, kind, topology.devices[0], on), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
