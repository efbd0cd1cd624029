#!/usr/bin/env python3
"""Compiles a training step for TPUs with the real compiler and reads how much memory it takes.

    scripts/check_tpu --train                            v5p and v6e; 1, 4 and 8 segments
    scripts/check_tpu --train --chip v6e --segments 8    one of them
    scripts/check_tpu --train --length 8192 --json FILE  another length; the table as JSON

The drafter is of the size of the P-EAGLE drafters released for gpt-oss-20b (4 layers, width 2880,
64 query and 8 key heads of 64) with a draft vocabulary of 32,000; a row of 20,480 tokens, K = 8,
AdamW, bfloat16 beside float32 masters. The program is the trainer's step on one chip but for the
target's pass: its features and final hidden states are arguments, as if a target that is spread
over other chips had made them. Its embedding and head are arguments too, whole.

Total is arguments, temporaries and what outputs do not take the place of. Of a program that the
compiler refuses, its message has the temporaries alone. Tflop are the matrix products of the
traced program, every loop's body as often as it runs; "anew" is what they would be if segments
computed the depth 0 of earlier ones anew, instead of finding its keys and values kept. Ends with 1
where nothing fits a chip.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import re
import sys
import time
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
from jax.extend.core import jaxprs_in_params
from jax.sharding import PartitionSpec, SingleDeviceSharding

from pallas_kernels.chips import CHIPS
from peagle_jax.config import BlockConfig, DrafterConfig, ModelConfig
from peagle_jax.models import drafter
from peagle_jax.sharding import make_mesh
from peagle_jax.training.batch import PackedBatch
from peagle_jax.training.cod import ChainSampling, sample_chains
from peagle_jax.training.masks import SegmentRows, no_keys
from peagle_jax.training.networks import Networks
from peagle_jax.training.optimizer import make_optimizer
from peagle_jax.training.p_eagle import PEagleObjective
from peagle_jax.training.params import Trainable, split
from peagle_jax.training.step import TrainState, make_step
from peagle_jax.training.target import TargetView
from peagle_jax.training.train_config import OptimizerSection

TPUS = {chip.name: kind for kind, chip in CHIPS.items() if chip.topology}
TARGET = ModelConfig(BlockConfig(2880, 2880, 24, 64, 8, 64), 201088, max_positions=131072)
DRAFTER = DrafterConfig(
    block=BlockConfig(2880, 14336, 4, 64, 8, 64),
    parallel=True,
    vocab_size=TARGET.vocab_size,
    draft_vocab_size=32000,
    target_hidden_size=2880,
    aux_layer_ids=(2, 12, 21),
    mask_token_id=201020,
)
K = 8
DTYPE = jnp.bfloat16
GIB = 2**30
MESSAGE = 4000  # characters of a refusal: its largest buffers come first


@dataclasses.dataclass(frozen=True)
class BesideTarget:
    """The objective of a target that ran elsewhere: its view is among its parameters."""

    objective: PEagleObjective

    def value_and_grad(
        self, trained: Any, frozen: Any, target: Any, batch: Any, key: Any, denominator: Any
    ) -> Any:
        chains = sample_chains(self.objective.sampling, batch, key)
        view = target["view"]
        return self.objective.gradient(trained, frozen, target, batch, view, chains, denominator)


@dataclasses.dataclass
class Row:
    """What the compiler made of a step; bytes of HBM.

    Attributes:
      outputs: all of them, `aliased` take the place of arguments.
      total: what is needed at once; 0 of a program that was refused.
      flops: of matrix products, loops multiplied out.
      flops_anew: the same if segments computed the depth 0 before them anew, instead of finding
        its keys and values kept.
      compiler_flops: the compiler's own, which counts the body of a loop once.
      trouble: "" where the program fits.
    """

    chip: str
    segments: int
    length: int
    arguments: int = 0
    outputs: int = 0
    aliased: int = 0
    temporaries: int = 0
    total: int = 0
    flops: float = 0.0
    flops_anew: float = 0.0
    compiler_flops: float = 0.0
    compile_seconds: float = 0.0
    trouble: str = ""


def arguments(segments: int, length: int) -> tuple[PEagleObjective, Any, tuple[Any, ...]]:
    """Objective, optimizer, and everything that a step is given, abstract."""

    def target() -> Any:
        table = jnp.zeros((TARGET.vocab_size, TARGET.block.hidden_size), DTYPE)
        return {"embed_tokens": {"embedding": table}, "lm_head": {"kernel": table}}

    def drafter_parts() -> Any:
        whole = drafter.init(DRAFTER, jax.random.key(0))
        parts = split(DRAFTER, whole, TARGET, target(), Trainable("mask_row", "all"))
        trained = jax.tree.map(lambda x: x.astype(jnp.float32), parts.trained)
        return TrainState(trained, optimizer.init(trained), jnp.int32(0)), parts.frozen

    def entry(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((1, length, *shape), dtype)

    optimizer = make_optimizer(OptimizerSection())
    sampling = ChainSampling(K, segments=segments)
    objective = PEagleObjective(DRAFTER, TARGET, sampling, dtype=DTYPE.dtype.name)
    state, frozen = jax.eval_shape(drafter_parts)
    batch = PackedBatch(*(entry(dtype) for dtype in (jnp.int32,) * 3), entry(jnp.bool_))
    view = TargetView(entry(DTYPE, DRAFTER.feature_size), entry(DTYPE, DRAFTER.target_hidden_size))
    given = {**jax.eval_shape(target), "view": view}
    key = jax.eval_shape(lambda: jax.random.key(0))
    rate = jax.ShapeDtypeStruct((), jnp.float32)
    return objective, optimizer, (state, frozen, given, batch, key, rate)


def product_flops(jaxpr: Any) -> float:
    """Floating-point operations of every matrix product, loops multiplied out, the larger of a
    conditional's branches."""
    total = 0.0
    for equation in jaxpr.eqns:
        name, found = equation.primitive.name, equation.params
        if name == "dot_general":
            (inner, _), _ = found["dimension_numbers"]
            contracted = math.prod(equation.invars[0].aval.shape[axis] for axis in inner)
            total += 2.0 * contracted * equation.outvars[0].aval.size
        elif name == "cond":
            total += max(product_flops(branch.jaxpr) for branch in found["branches"])
        else:
            inside = sum(map(product_flops, jaxprs_in_params(found)))
            total += inside * found.get("length", 1) if name == "scan" else inside
    return total


def depth_0_flops(objective: PEagleObjective, given: tuple[Any, ...]) -> tuple[float, float]:
    """Of the layers over depth 0 of a whole row: forward, and forward and backward."""
    state, frozen, target, batch, key, _ = given

    def keys_of(trained: Any, frozen: Any, target: Any, batch: Any, key: Any) -> Any:
        length = batch.tokens.shape[1]
        chains = sample_chains(ChainSampling(K), batch, key).segment(0)
        rows = SegmentRows(batch.documents, 0, length, chains).depth_0
        networks = Networks(TARGET, objective.drafter, trained, frozen, target, DTYPE)
        kept = no_keys(DRAFTER.block, 1, length, DTYPE)
        return objective.run_rows(networks, batch, target["view"], rows, kept)

    def both(trained: Any, *rest: Any) -> Any:
        out, pull_back = jax.vjp(lambda trained: keys_of(trained, *rest), trained)
        return pull_back(out)

    forward, whole = (
        product_flops(jax.make_jaxpr(function)(state.params, frozen, target, batch, key).jaxpr)
        for function in (keys_of, both)
    )
    return forward, whole


def check(row: Row, device: Any) -> None:
    """Compiles a step and fills in the row."""
    objective, optimizer, given = arguments(row.segments, row.length)
    place = SingleDeviceSharding(device)
    given = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), given)
    unsplit = (PartitionSpec(),) * 3
    step = make_step(BesideTarget(objective), optimizer, make_mesh(1, 1, [device]), unsplit)
    began = time.monotonic()
    traced = jax.jit(step, donate_argnums=0).trace(*given)
    row.flops = product_flops(traced.jaxpr.jaxpr)
    forward, whole = depth_0_flops(objective, given)
    kept = forward * (row.segments - 1) / row.segments
    row.flops_anew = row.flops - kept + whole * (row.segments - 1) / 2
    try:
        program = traced.lower().compile()
    except jax.errors.JaxRuntimeError as error:
        row.trouble = str(error)
        if needed := re.search(r"temporaries \(([\d.]+)G\) exceeds available", row.trouble):
            row.temporaries = int(float(needed[1]) * GIB)
        return
    finally:
        row.compile_seconds = time.monotonic() - began
    memory = program.memory_analysis()
    row.arguments, row.outputs = memory.argument_size_in_bytes, memory.output_size_in_bytes
    row.aliased, row.temporaries = memory.alias_size_in_bytes, memory.temp_size_in_bytes
    row.total = row.arguments + row.outputs - row.aliased + row.temporaries
    row.compiler_flops = program.cost_analysis().get("flops", 0.0)


COLUMNS = f"{'chip':6}{'segments':>9}{'arguments':>11}{'outputs':>9}{'in place':>9}"
COLUMNS += f"{'temporary':>11}{'total GiB':>11}{'fits':>6}{'Tflop':>8}{'anew':>8}{'compile':>9}"


def line(row: Row) -> str:
    """A row of the table."""
    parts = (row.arguments, row.outputs, row.aliased, row.temporaries, row.total)
    shown = [f"{size / GIB:.2f}" if size else "-" for size in parts]
    cells = f"{row.chip:6}{row.segments:9}{shown[0]:>11}{shown[1]:>9}{shown[2]:>9}{shown[3]:>11}"
    cells += f"{shown[4]:>11}{'no' if row.trouble else 'yes':>6}"
    cells += f"{row.flops / 1e12:8.0f}{row.flops_anew / 1e12:8.0f}"
    return f"{cells}{row.compile_seconds:8.0f}s"


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chip", action="append", choices=sorted(TPUS), help="default: v5p, v6e")
    parser.add_argument("--segments", action="append", type=int, help="default: 1, 4 and 8")
    parser.add_argument("--length", type=int, default=20480, help="tokens of a row (20480)")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    options = parser.parse_args()
    rows = []
    print(COLUMNS)
    for name in options.chip or ("v5p", "v6e"):
        kind = TPUS[name]
        topology = topologies.get_topology_desc(platform="tpu", topology_name=CHIPS[kind].topology)
        for segments in options.segments or (1, 4, 8):
            rows.append(Row(name, segments, options.length))
            check(rows[-1], topology.devices[0])
            print(line(rows[-1]), flush=True)
            if rows[-1].trouble:
                print(rows[-1].trouble[:MESSAGE], file=sys.stderr)
            if options.json:
                partial = options.json.with_suffix(".part")
                partial.write_text(
                    json.dumps([dataclasses.asdict(row) for row in rows], indent=1) + "\n"
                )
                partial.replace(options.json)
    fitting = {row.chip for row in rows if not row.trouble}
    return 0 if fitting == {row.chip for row in rows} else 1


if __name__ == "__main__":
    sys.exit(main())
