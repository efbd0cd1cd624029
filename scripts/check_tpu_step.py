#!/usr/bin/env python3
"""Compiles a speculative step for TPUs, kernels switched on, and reads the compiler's estimate.

    scripts/check_tpu --step                      four kinds of chip, batch 1 and 8
    scripts/check_tpu --step --chip v6e --batch 1 --reference
    scripts/check_tpu --step --chip v6e --batch 1 --model llama-8b --model gpt-oss-20b

Models, each with a P-EAGLE drafter of the released size: `llama-8b-short`, the default, has the
widths of Llama 3 8B but 8 layers, so that it fits every chip; `llama-8b` has all 32; `gpt-oss-20b`
is the released pair, its experts in MXFP4. Programs: a verification of 1, 8 and 9 rows up to the
argmax; one draft pass of K = 1 and K = 8 and the 8 passes of an EAGLE-3 drafter of the same size;
the whole step of K = 8, as a chain and as a tree.

An estimate is the sum of `estimated_cycles` over the optimised program, over the clock, plus the
bytes that the Pallas calls declare over the HBM bandwidth, at full caches. Both parts are
printed, beside the floor: every weight and every cache byte once. Of experts the floor counts those
that some row chose, were all as likely; a kernel must declare as many as the rows can choose at
most, so what is more than the floor's is taken off the sum. Of a whole step the estimates of all
branches add up, of which one is taken: its own time is put together from the parts below the table.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import sys
import time
import warnings
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

from pallas_kernels.chips import CHIPS
from pallas_kernels.program_text import compile_with_text, read_estimates
from pallas_kernels.target import Target, compile_for
from peagle_jax.config import BlockConfig, DrafterConfig, Method, ModelConfig, WeightForm
from peagle_jax.convert.layouts import BY_ROWS
from peagle_jax.decoding.draft import Drafting
from peagle_jax.decoding.sampling import Draws, RequestArrays
from peagle_jax.decoding.speculate import Speculator
from peagle_jax.mesh_shape import MeshShape
from peagle_jax.models import decoder, drafter, kernel_forms
from peagle_jax.models.cache import KVCache
from peagle_jax.models.decoder import Decoder
from peagle_jax.plan import memory
from peagle_jax.plan.floors import cache_bytes, hit_share
from peagle_jax.plan.models import describe_drafter, describe_target
from peagle_jax.sharding import by_rows

TPUS = {chip.name: kind for kind, chip in CHIPS.items() if chip.topology}
DTYPE = jnp.bfloat16
ITEM = DTYPE.dtype.itemsize
CONTEXT = 4096
K = 8

Program = tuple[Callable[..., Any], tuple[Any, ...]]


@dataclasses.dataclass(frozen=True)
class Pair:
    """A target with the form of its weights, and a P-EAGLE drafter for it."""

    target: ModelConfig
    drafter: DrafterConfig
    weights: WeightForm = "full"

    def speculator(self, k: int, method: Method = "p-eagle") -> Speculator:
        """The step of K drafts; an EAGLE-3 drafter is as large as the P-EAGLE one."""
        one = self.drafter
        if method == "eagle3":
            one = dataclasses.replace(one, parallel=False, mask_token_id=None)
        return Speculator(self.target, one, method, k, draft_sampling="greedy", dtype="bfloat16")

    def target_params(self) -> Any:
        """Abstract."""
        return kernel_forms.abstract(decoder.abstract_params(self.target, DTYPE), self.weights)

    def both_params(self, method: Method = "p-eagle") -> dict[str, Any]:
        """Abstract."""
        config = self.speculator(1, method).drafter
        assert config is not None
        return {
            "target": self.target_params(),
            "drafter": drafter.abstract_params(config, DTYPE),
        }


def llama(num_layers: int) -> Pair:
    """The widths of Llama 3 8B."""
    target = ModelConfig(
        BlockConfig(4096, 14336, num_layers, 32, 8, 128), 128256, max_positions=65536
    )
    draft_model = DrafterConfig(
        block=BlockConfig(4096, 14336, 4, 32, 8, 128),
        parallel=True,
        vocab_size=target.vocab_size,
        draft_vocab_size=32000,
        target_hidden_size=4096,
        aux_layer_ids=(2, num_layers // 2, num_layers - 3),
        mask_token_id=target.vocab_size - 1,
    )
    return Pair(target, draft_model)


def gpt_oss() -> Pair:
    """As released."""
    target, _ = describe_target("openai/gpt-oss-20b")
    draft_model, _ = describe_drafter("amazon/gpt-oss-20b-p-eagle", target)
    return Pair(target, draft_model, "mxfp4")


PAIRS: dict[str, Callable[[], Pair]] = {
    "llama-8b-short": lambda: llama(8),
    "llama-8b": lambda: llama(32),
    "gpt-oss-20b": gpt_oss,
}


def greedy(batch: int) -> RequestArrays:
    """Constants, so that the compiler drops what only sampling takes."""
    none = jnp.zeros(batch)
    return RequestArrays(
        temperature=none,
        top_k=none.astype(jnp.int32),
        top_p=none + 1,
        min_p=none,
        seed=none.astype(jnp.uint32),
        max_new_tokens=none.astype(jnp.int32) + 512,
        ignore_eos=none.astype(bool),
    )


def verify(pair: Pair, batch: int, rows: int) -> Program:
    """The target's pass over `rows` rows, and the argmax of each."""

    def run(cache: Any, params: Any, tokens: Any, start: Any) -> Any:
        network = Decoder(pair.target, DTYPE)
        aux = pair.drafter.aux_layer_ids
        out = network.apply({"params": params}, tokens, start, cache, aux)
        best = network.apply({"params": params}, out.hidden, method="best")
        return out.cache, best, out.features

    return run, (
        jax.eval_shape(lambda: KVCache.init(pair.target.block, batch, CONTEXT, DTYPE, span=rows)),
        pair.target_params(),
        jax.ShapeDtypeStruct((batch, rows), jnp.int32),
        jax.ShapeDtypeStruct((batch,), jnp.int32),
    )


def state_of(one: Speculator, batch: int) -> Any:
    """Abstract, with caches of CONTEXT positions or little more."""
    return jax.eval_shape(lambda: one.init_state(batch, CONTEXT - 1024, 512))


def drafting(one: Speculator, params: Any) -> Drafting:
    """Of a step's own."""
    return Drafting(
        one.networks(params), one.method, one.num_draft_tokens, "greedy", one.verification
    )


def draft(pair: Pair, batch: int, k: int, *, most: bool = False) -> Program:
    """One P-EAGLE pass over as many rows as a step mostly takes, or at most, and its argmax."""
    one = pair.speculator(k)

    def run(state: Any, params: Any) -> Any:
        own = drafting(one, params)
        rows = one.pending_rows if most else own.tiled_rows(state)
        confirmed = jnp.ones((batch,), jnp.int32)
        stream, cache = own._parallel_pass(state, confirmed, rows)
        return own.networks.draft_head(stream, "best"), cache

    return run, (state_of(one, batch), pair.both_params())


def draft_in_passes(pair: Pair, batch: int, k: int) -> Program:
    """The K passes of an EAGLE-3 drafter."""
    one = pair.speculator(k, "eagle3")

    def run(state: Any, params: Any) -> Any:
        none = Draws(jnp.zeros((batch, k, 2), jnp.uint32), None)  # argmax needs no noise
        drafted = drafting(one, params)._in_passes(state, greedy(batch), none)
        return drafted.tokens, drafted.cache

    return run, (state_of(one, batch), pair.both_params("eagle3"))


def step(pair: Pair, batch: int, k: int, method: Method = "p-eagle") -> Program:
    """The whole speculative step of greedy requests."""
    one = pair.speculator(k, method)

    def run(state: Any, params: Any) -> Any:
        return one.step(params, state, greedy(batch))

    return run, (state_of(one, batch), pair.both_params())


PLAIN, VERIFY, DRAFT_1, DRAFT_K = "verify 1 row", "verify 9 rows", "draft K=1", "draft K=8"
DRAFT_MOST, EAGLE3, STEP = "draft K=8, most", "eagle3 K=8", "step K=8"

PROGRAMS: dict[str, Callable[[Pair, int], Program]] = {
    PLAIN: lambda pair, batch: verify(pair, batch, 1),
    "verify 8 rows": lambda pair, batch: verify(pair, batch, K),
    VERIFY: lambda pair, batch: verify(pair, batch, K + 1),
    DRAFT_1: lambda pair, batch: draft(pair, batch, 1),
    DRAFT_K: lambda pair, batch: draft(pair, batch, K),
    DRAFT_MOST: lambda pair, batch: draft(pair, batch, K, most=True),
    EAGLE3: lambda pair, batch: draft_in_passes(pair, batch, K),
    STEP: lambda pair, batch: step(pair, batch, K),
    "step tree K=8": lambda pair, batch: step(pair, batch, K, "p-eagle+tree"),
}


@dataclasses.dataclass(frozen=True)
class Floor:
    """Bytes that a program must read: of weights and caches, of experts that are likely, and of
    those that its kernels declare beyond these."""

    read: float
    experts: float = 0.0
    doubted: float = 0.0


def floor(pair: Pair, name: str, batch: int) -> Floor:
    """Every weight that a program multiplies with and every cache byte, read once a pass; of a
    whole step, a draft and a verification."""
    if name.startswith("step"):
        parts = [floor(pair, part, batch) for part in (DRAFT_K, VERIFY)]
        return Floor(*(sum(getattr(p, f.name) for p in parts) for f in dataclasses.fields(Floor)))
    if not name.startswith("verify"):
        config = pair.drafter
        weights = memory.drafter_weights(config, "bfloat16")
        k = int(name.partition("=")[2].partition(",")[0])
        head = weights.head or config.draft_vocab_size * config.block.hidden_size * ITEM
        a_pass = weights.layers + head
        a_pass += batch * cache_bytes(config.block, CONTEXT, k, ITEM)
        return Floor(a_pass * (k if name == EAGLE3 else 1))
    rows = int(name.split()[1])
    block, moe = pair.target.block, pair.target.block.moe
    weights = memory.target_weights(pair.target, "bfloat16", MeshShape(1, 1, 1), pair.weights)
    head = weights.embedding if pair.target.tie_embeddings else weights.head
    read = weights.layers + head + batch * cache_bytes(block, CONTEXT, rows, ITEM)
    if moe is None:
        return Floor(read)
    likely = hit_share(moe.num_experts, moe.experts_per_token, batch * rows)
    most = min(1.0, batch * rows * moe.experts_per_token / moe.num_experts)
    return Floor(read, likely * weights.experts, (most - likely) * weights.experts)


@dataclasses.dataclass(frozen=True)
class Found:
    """A compiled program. Microseconds: by the compiler, None where it gives no clock, of the
    Pallas calls, and the floor."""

    xla: float | None
    calls: float
    floor: float
    num_calls: int
    temporary_mib: float
    seconds: float

    @property
    def us(self) -> float:
        """Both parts."""
        return (self.xla or 0.0) + self.calls


def compiled(pair: Pair, name: str, batch: int, kind: str, device: Any, on: bool) -> Found:
    """Compiles a program."""
    chip = CHIPS[kind]
    function, arguments = PROGRAMS[name](pair, batch)
    place = SingleDeviceSharding(device)

    def placed(path: Any, leaf: Any) -> Any:
        rows = jax.tree_util.keystr(path, simple=True, separator=".").endswith(BY_ROWS)
        where = by_rows(leaf.ndim, place) if rows else place
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)

    arguments = jax.tree.map_with_path(placed, arguments)
    target = Target("tpu" if on else "cpu", kind, chip.cores)
    began = time.monotonic()
    with compile_for(target):
        program, text = compile_with_text(jax.jit(function, donate_argnums=0).lower(*arguments))
    seconds = time.monotonic() - began
    found, least = read_estimates(text), floor(pair, name, batch)
    return Found(
        xla=found.compiled_us(chip),
        calls=found.kernels_us(chip) - (chip.floor_us(least.doubted) if on else 0.0),
        floor=chip.floor_us(least.read + least.experts),
        num_calls=found.kernels,
        temporary_mib=program.memory_analysis().temp_size_in_bytes / 2**20,
        seconds=seconds,
    )


def table(pair: Pair, names: list[str], batch: int, kind: str, on: bool) -> dict[str, Found]:
    """Prints it; programs that do not fit the chip's memory are not in what comes back."""
    topology = topologies.get_topology_desc(platform="tpu", topology_name=CHIPS[kind].topology)
    found = {}
    for name in names:
        try:
            found[name] = compiled(pair, name, batch, kind, topology.devices[0], on)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            print(f"{name:17} does not fit the chip's memory", flush=True)
            continue
        print(line(name, found[name]), flush=True)
    return found


def line(name: str, found: Found) -> str:
    """Of the table."""
    cells = f"{name:17}{found.num_calls:6}"
    if found.xla is None:
        cells += f"{'':27}{found.floor:9.0f}"
    elif name.startswith("step"):
        cells += f"{'all branches':>18}{found.us:9.0f}{found.floor:9.0f}"
    else:
        cells += f"{found.xla:9.0f}{found.calls:9.0f}{found.us:9.0f}{found.floor:9.0f}"
    return f"{cells}{found.temporary_mib:10.1f}{found.seconds:8.1f}s"


def ratios(found: dict[str, Found]) -> list[str]:
    """What a draft and a step cost beside one row, where all parts are known."""
    parts = (PLAIN, VERIFY, DRAFT_1, DRAFT_K, DRAFT_MOST, EAGLE3, STEP)
    if any(name not in found or found[name].xla is None for name in parts):
        return []
    us = {name: found[name].us for name in parts}
    # A step has the draft twice, of few rows and of most, and takes one.
    whole = us[STEP] - us[DRAFT_MOST]

    def of(name: str, over: str, time: float) -> str:
        least = found[name].floor / found[over].floor
        return f"{time / us[over]:.2f}x (floor {least:.2f}x)"

    rest = whole - us[DRAFT_K] - us[VERIFY]
    sums = f"{whole:.0f} us, {rest:.0f} beside draft and verification"
    return [
        f"draft of {K} over one of 1: {of(DRAFT_K, DRAFT_1, us[DRAFT_K])}",
        f"EAGLE-3's {K} passes over it: {of(EAGLE3, DRAFT_1, us[EAGLE3])}",
        f"step of {K} drafts over a plain one: {of(STEP, PLAIN, whole)}, {sums}",
    ]


def main() -> int:
    """Returns the exit code: 1 where a program did not fit its chip."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", action="append", choices=PAIRS, help="default: llama-8b-short")
    parser.add_argument("--chip", action="append", choices=sorted(TPUS), help="default: all")
    parser.add_argument("--batch", action="append", type=int, help="default: 1 and 8")
    parser.add_argument("--match", action="append", help="part of a program's name")
    parser.add_argument(
        "--reference", action="store_true", help="too without what is for TPUs alone"
    )
    options = parser.parse_args()
    names = [name for name in PROGRAMS if any(part in name for part in options.match or ("",))]
    if not names:
        parser.error(f"--match: found {options.match}, expected a part of {', '.join(PROGRAMS)}")
    # Of a state that a draft is given only the cache comes back.
    warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
    models, chips = options.model or ("llama-8b-short",), options.chip or TPUS
    ways = (True, False) if options.reference else (True,)
    complete = True
    for model, chip, batch, on in itertools.product(models, chips, options.batch or (1, 8), ways):
        how = "kernels" if on else "traced as for a CPU"
        print(
            f"\n{model}, {chip}, batch {batch}, {how}\n"
            f"{'program':17}{'calls':>6}{'XLA us':>9}{'calls us':>9}{'sum us':>9}"
            f"{'floor us':>9}{'temp MiB':>10}{'compile':>9}"
        )
        found = table(PAIRS[model](), names, batch, TPUS[chip], on)
        complete &= len(found) == len(names)
        print(*ratios(found), sep="\n", flush=True)
    return 0 if complete else 1


if __name__ == "__main__":
    sys.exit(main())
