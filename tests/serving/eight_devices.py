"""Run by test_mesh.py in a process of its own, with eight virtual devices.

An engine on meshes against plain generation on one device: the same tokens, whatever is split.
Prints a JSON object a case: what differed, and what the scheduler did.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from peagle_jax.config import BlockConfig
from peagle_jax.decoding import placement
from peagle_jax.mesh_shape import MeshShape
from peagle_jax.serving import engine as engine_module
from peagle_jax.serving.engine import BackendSizes, PagedEngine
from peagle_jax.serving.engine_protocol import EngineShape
from peagle_jax.serving.scheduler import Policy, Scheduler
from peagle_jax.serving.sequence import Request
from peagle_jax.sharding import make_inference_mesh
from tests.decoding import tiny
from tests.decoding.test_families import GPT_OSS
from tests.decoding.tiny import PARAMS, Tiny
from tests.training.dense_reference import QUICK

VOCAB, CONTEXT = 24, 48
EIGHT_HEADS = BlockConfig(16, 24, 2, num_heads=8, num_kv_heads=4, head_dim=8)


# Parts of several prompts together: in pieces, or each as a whole.
IN_PIECES, WIDE = BackendSizes(4, 64, 16, 1), BackendSizes(4, 128, None, 1)


@dataclasses.dataclass(frozen=True)
class Case:
    """A mesh, and what runs on it; `num_pages` of a group, None = its slots can be full."""

    mesh: str
    method: str = "p-eagle"
    num_draft_tokens: int = 3
    slots: int = 8
    num_pages: int | None = None
    model: str = "dense"
    sizes: BackendSizes = IN_PIECES
    lengths: tuple[int, ...] = ()


# Few pages are what one whole context takes, and the null page.
CASES = (
    Case("model=2", slots=3),
    Case("data=2", num_pages=15, slots=6),
    Case("data=2,model=4", "eagle3", 2),
    Case("data=4,model=2", "prompt-lookup", num_pages=15, slots=12, sizes=WIDE),
    Case("data=8", "none", 0),
    Case("data=2,expert=2,model=2", model="experts", slots=4, lengths=(0, 1, 3)),
)


def requests() -> list[Request]:
    rng = np.random.default_rng(5)
    made = []
    for key in range(20):
        params = dataclasses.replace(
            PARAMS[key % len(PARAMS)],
            max_new_tokens=int(rng.integers(1, 25)),
            ignore_eos=key % 3 > 0,
        )
        ids = rng.integers(0, VOCAB - 1, rng.integers(1, 25))
        made.append(Request(key, tuple(ids.tolist()), params, seed=100 + key))
    return made


def plain(models: Tiny, asked: Sequence[Request]) -> dict[Any, tuple[int, ...]]:
    params = [dataclasses.replace(one.params, seed=one.seed) for one in asked]
    batch = tiny.make_batch([one.token_ids for one in asked], params, 32, 32)
    rows = tiny.run(models, models.speculator("none"), batch).rows()
    return {one.key: tuple(row) for one, row in zip(asked, rows, strict=True)}


def serve(models: Tiny, case: Case, asked: Sequence[Request]) -> tuple[Any, Scheduler]:
    wanted = MeshShape.parse(case.mesh)
    mesh = make_inference_mesh(wanted, jax.devices()[: wanted.size])
    speculator = models.speculator(case.method, case.num_draft_tokens, lengths=case.lengths)
    params = models.params(case.method)
    placed = {
        "target": jax.device_put(
            params["target"], placement.target_shardings(models.target, params["target"], mesh)
        )
    }
    if "drafter" in params:
        drafter = models.drafters[case.method]
        whole = placement.drafter_sharding(drafter, params["drafter"], mesh)
        placed["drafter"] = jax.device_put(params["drafter"], whole)
    shape = EngineShape(
        case.slots,
        2,
        4,
        CONTEXT,
        case.num_draft_tokens,
        wanted.data,
        speculator.pending_rows,
    )
    pages = case.num_pages or 1 + shape.slots_a_group * shape.pages_a_slot
    shape = dataclasses.replace(shape, num_pages=pages)
    engine = PagedEngine(speculator, placed, shape, mesh=mesh, sizes=case.sizes)
    scheduler = Scheduler(engine, Policy(1, 32), clock=lambda: 0.0)
    for one in asked:
        scheduler.submit(one)
    ends = {}
    while not scheduler.idle:
        for update in scheduler.visit():
            if update.finished:
                ends[update.key] = update.finished.token_ids
        scheduler.check_invariants()
    if case.method == "eagle3":
        check_traffic(engine)
    pools = engine._pools.target[0].keys
    assert pools.addressable_shards[0].data.shape[:2] == (pages, pools.shape[1] // wanted.model)
    return ends, scheduler


def check_traffic(engine: PagedEngine) -> None:
    """What devices tell one another in a step is sums and choices, never a weight or a page."""
    (step,) = (one for key, one in engine._executables.items() if key[0] == "step")
    sizes = []
    for line in step.as_text().splitlines():
        if found := re.search(r"= (.+) (all-|reduce-scatter|collective-permute)[a-z-]*\(", line):
            kinds = re.findall(r"\w+\[([\d,]*)\]", found[1])
            sizes += [math.prod(int(size) for size in kind.split(",") if size) for kind in kinds]
    assert sizes
    assert max(sizes) < VOCAB * tiny.HIDDEN, sizes


def main() -> None:
    def compiled(programs: dict[Any, Any], key: Any, lower: Any) -> tuple[Any, float]:
        if key not in programs:
            programs[key] = lower().compile(compiler_options=QUICK)
        return programs[key], 0.0

    engine_module.compiled = compiled  # type: ignore[attr-defined]
    blocks = {
        "dense": EIGHT_HEADS,
        "experts": dataclasses.replace(GPT_OSS, num_heads=4, num_kv_heads=2),
    }
    models = {
        name: tiny.make(vocab_size=VOCAB, block=block, max_positions=CONTEXT, eos_token_ids=(5, 21))
        for name, block in blocks.items()
    }
    asked = requests()
    expected = {name: plain(one, asked) for name, one in models.items()}
    for case in CASES:
        ends, scheduler = serve(models[case.model], case, asked)
        wrong = [key for key, ids in expected[case.model].items() if ends[key] != ids]
        counters = scheduler.counters
        found = {"mesh": case.mesh, "wrong": wrong, "preemptions": counters.preemptions}
        print(json.dumps(found), flush=True)  # noqa: T201  # what the parent reads


if __name__ == "__main__":
    main()
