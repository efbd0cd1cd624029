"""Plans against byte counts and times that were worked out by hand."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import pytest

from pallas_kernels.chips import CHIPS, Chip
from peagle_jax.config import BlockConfig, ModelConfig, MoEConfig
from peagle_jax.decoding.speculate import Speculator
from peagle_jax.errors import InputError
from peagle_jax.mesh_shape import ONE_DEVICE, MeshShape
from peagle_jax.models import drafter
from peagle_jax.plan import memory
from peagle_jax.plan.estimate import GIB, Job, all_meshes, best, estimate
from peagle_jax.plan.floors import hit_share, step_floor
from peagle_jax.plan.memory import Weights, drafter_weights, target_weights
from peagle_jax.plan.models import describe_drafter, describe_target
from peagle_jax.plan.topology import Topology
from peagle_jax.serving import engine
from tests.decoding import tiny

# Two layers of 8 wide, 4 query heads and 2 key heads of 2, a feed-forward of 12, 10 tokens.
TARGET = ModelConfig(BlockConfig(8, 12, 2, 4, 2, 2), vocab_size=10, max_positions=64)
ATTENTION = 8 * 8 + 2 * (4 * 8) + 8 * 8
LAYER = ATTENTION + 3 * 8 * 12 + 2 * 8
CHIP = Chip("made up", hbm_gb_s=1e-3, bf16_tflops=1e-6, hbm_gib=1.0, ici_gb_s=1e-4)
LOOKUP = Speculator(TARGET, None, "prompt-lookup", 3, dtype="bfloat16")


def test_weights_of_a_target() -> None:
    whole = target_weights(TARGET, "float32", ONE_DEVICE)
    assert whole == Weights(4 * 80, 4 * 80, 0, 4 * (2 * LAYER + 8))
    split = target_weights(TARGET, "bfloat16", MeshShape(data=3, model=2))
    norms = 2 * 2 * 8 + 8  # whole on every device
    assert split == Weights(2 * 40, 2 * 40, 0, (2 * (LAYER - 16) + 2 * norms))
    assert split.total == 2 * 80 + 2 * (LAYER - 16) + 2 * norms
    tied = dataclasses.replace(TARGET, tie_embeddings=True)
    assert target_weights(tied, "float32", ONE_DEVICE).head == 0


def test_weights_of_experts() -> None:
    moe = MoEConfig(num_experts=4, experts_per_token=2, intermediate_size=6)
    block = dataclasses.replace(TARGET.block, moe=moe)
    config = dataclasses.replace(TARGET, block=block)
    expert = 3 * 8 * 6
    whole = target_weights(config, "float32", ONE_DEVICE)
    assert whole.experts == 4 * 2 * 4 * expert
    assert whole.layers == 4 * (2 * (ATTENTION + 16 + 4 * 8) + 8)
    split = target_weights(config, "float32", MeshShape(expert=4, model=2))
    assert split.experts == 4 * 2 * expert // 2


def test_meshes_that_do_not_fit_a_model() -> None:
    with pytest.raises(InputError, match=r"mesh: model: found 4, expected a divisor of 2"):
        target_weights(TARGET, "float32", MeshShape(model=4))
    with pytest.raises(InputError, match="without experts, expected 1"):
        target_weights(TARGET, "float32", MeshShape(expert=2))


def test_weights_and_pages_of_gpt_oss() -> None:
    """A release, from its manifest: 24 layers, 32 experts, MXFP4 in the checkpoint."""
    target, described = describe_target("openai/gpt-oss-20b")
    assert described.packed_bytes == 13_761_264_768
    assert described.guesses == ()
    wide, width, queries, keys, experts = 2880, 2880, 64 * 64, 8 * 64, 32
    attention = 2 * wide * queries + 2 * wide * keys + queries + 2 * keys + wide + 64
    router = experts * wide + experts
    an_expert = 3 * wide * width + 2 * width + wide
    found = target_weights(target, "bfloat16", ONE_DEVICE)
    table = 2 * 201088 * wide
    layers = 2 * (24 * (attention + router + 2 * wide) + wide)
    assert found == Weights(table, table, 2 * 24 * experts * an_expert, layers)
    assert found.total == 41_829_514_368  # 20.9 billion parameters
    split = target_weights(target, "bfloat16", MeshShape(model=8))
    assert split.embedding == table // 8
    down_biases = 24 * experts * wide  # along the width of the model, whole on every device
    assert split.experts == 2 * ((24 * experts * an_expert - down_biases) // 8 + down_biases)
    # 2 * 24 layers * 8 heads * 64 * 2 bytes a position; 64 is less than a register is wide,
    # which costs nothing where pages fill its lanes, and doubles pages of 64.
    speculator = Speculator(target, dtype="bfloat16")
    a_position = 2 * 24 * 8 * 64 * 2
    assert memory.page_bytes(speculator, 128, ONE_DEVICE) == 128 * a_position
    assert memory.page_bytes(speculator, 128, MeshShape(model=4)) == 32 * a_position
    assert memory.page_bytes(speculator, 64, ONE_DEVICE) == 128 * a_position
    name = "amazon/gpt-oss-20b-p-eagle"
    config, described = describe_drafter(name, target)
    assert "intermediate_size" in described.guesses
    weights = drafter_weights(config, "bfloat16")
    assert (weights.embedding, weights.head) == (table, table)
    assert config.parallel
    drafted = Speculator(target, config, "p-eagle", 5, dtype="bfloat16")
    more = 2 * 4 * 8 * 64 * 2 * 128
    assert memory.page_bytes(drafted, 128, MeshShape(model=8)) == 16 * a_position + more


def test_pages_are_the_engine_s_own() -> None:
    models = tiny.make(max_positions=64)
    speculator = models.speculator("p-eagle", 3)
    config = dataclasses.replace(speculator, dtype="float32")
    # A page of 128 positions is padded in no layout.
    assert memory.page_bytes(config, 128, ONE_DEVICE) == engine.page_bytes(config, 128)
    assert memory.slot_bytes(config, 6, 48) == 2 * memory.slot_bytes(config, 3, 48)
    assert memory.working_bytes(config, 64, ONE_DEVICE) > memory.working_bytes(
        config, 64, MeshShape(model=2)
    )


def test_floor_of_a_step() -> None:
    """Bytes over bandwidth in milliseconds: this chip moves 10^6 bytes a second."""
    weights = target_weights(TARGET, "bfloat16", ONE_DEVICE)
    floor = step_floor(LOOKUP, weights, None, ONE_DEVICE, CHIP, slots=5, context=20)
    assert floor.weight_bytes == weights.layers + weights.head  # of the embedding few rows
    assert floor.cache_bytes == 5 * 20 * (2 * 2 * 2 * 2 * 2)
    assert floor.memory_ms == pytest.approx((floor.weight_bytes + floor.cache_bytes) / 1e3)
    rows = 5 * 4
    products = 2 * rows * (2 * LAYER + 8 + 80)
    scores = rows * 2 * (4 * 4 * 2 * 20)
    assert floor.flops == products + scores
    assert floor.product_ms == pytest.approx(floor.flops / 1e3)
    assert (floor.sent_bytes, floor.sum_ms) == (0, 0)
    assert floor.ms == max(floor.memory_ms, floor.product_ms)
    plain = Speculator(TARGET, dtype="bfloat16")
    one = step_floor(plain, weights, None, ONE_DEVICE, CHIP, slots=5, context=20)
    assert one.memory_ms == floor.memory_ms
    assert one.flops == floor.flops / 4

    shared = MeshShape(model=2)
    split = target_weights(TARGET, "bfloat16", shared)
    half = step_floor(LOOKUP, split, None, shared, CHIP, slots=5, context=20)
    assert half.cache_bytes == floor.cache_bytes / 2
    # Two sums a layer and the embedding's, each sent once around half a ring and back.
    stream = rows * 8 * 2
    assert half.sent_bytes == 5 * stream
    assert half.sum_ms == pytest.approx(half.sent_bytes / 1e2)
    assert half.ms == max(half.memory_ms, half.product_ms) + half.sum_ms


def test_floor_with_windows_and_experts() -> None:
    block = dataclasses.replace(TARGET.block, windows=(6, None))
    windowed = Speculator(dataclasses.replace(TARGET, block=block), dtype="bfloat16")
    weights = target_weights(windowed.target, "bfloat16", ONE_DEVICE)
    floor = step_floor(windowed, weights, None, ONE_DEVICE, CHIP, slots=1, context=20)
    assert floor.cache_bytes == (6 + 20) * (2 * 2 * 2 * 2)
    assert hit_share(4, 2, 1) == 0.5
    assert hit_share(4, 2, 2) == 0.75
    assert hit_share(4, 4, 1) == 1
    moe = MoEConfig(num_experts=4, experts_per_token=2, intermediate_size=6)
    mixed = dataclasses.replace(TARGET, block=dataclasses.replace(TARGET.block, moe=moe))
    weights = target_weights(mixed, "bfloat16", ONE_DEVICE)
    floor = step_floor(
        Speculator(mixed, dtype="bfloat16"), weights, None, ONE_DEVICE, CHIP, slots=2, context=2
    )
    assert floor.weight_bytes == weights.layers + weights.head + 0.75 * weights.experts


@pytest.mark.parametrize(("method", "passes"), [("p-eagle", 1), ("eagle3", 3)])
def test_floor_of_a_drafter(method, passes) -> None:
    models = tiny.make(max_positions=64)
    speculator = models.speculator(method, 3)
    config = speculator.drafter
    assert config is not None
    assert config.own_head
    weights = target_weights(speculator.target, "float32", ONE_DEVICE)
    own = drafter_weights(config, "float32")
    params = drafter.abstract_params(config)
    assert own.total == 4 * sum(leaf.size for leaf in jax.tree.leaves(params))
    given = (speculator, weights)
    with_it = step_floor(*given, own, ONE_DEVICE, CHIP, slots=2, context=10)
    without = step_floor(*given, None, ONE_DEVICE, CHIP, slots=2, context=10)
    assert with_it.weight_bytes - without.weight_bytes == passes * (own.layers + own.head)
    assert with_it.cache_bytes > without.cache_bytes


def make_job(slots: int = 64, context: int = 8192, topology: str = "v6e:2x4") -> Job:
    target, _ = describe_target("openai/gpt-oss-20b")
    speculator = Speculator(target, None, "prompt-lookup", 4, dtype="bfloat16")
    return Job(speculator, Topology.parse(topology), slots, context, 128, 2.5)


def test_the_mesh_that_is_suggested() -> None:
    job = make_job()
    plans = all_meshes(job)
    assert len(plans) == 10  # 8 devices as a product of three sizes
    assert [plan.mesh.group_size for plan in plans] == [1, 2, 2, 4, 4, 4, 8, 8, 8, 8]
    alone = plans[0]
    assert (alone.mesh, alone.fits, alone.most_slots) == (MeshShape(data=8), False, 0)
    assert alone.hbm_bytes == int(31.24 * GIB)
    assert alone.fixed_bytes > alone.hbm_bytes
    chosen = best(plans)
    assert chosen.fits
    assert chosen.tokens_per_second == max(p.tokens_per_second for p in plans if p.fits)
    # 8192 tokens and 2K rows of scratch.
    assert job.pages_a_slot == 65
    assert chosen.pages_needed == 65 * 64 // chosen.mesh.data
    taken = chosen.fixed_bytes + (chosen.pages_that_fit + 1) * chosen.page_bytes
    assert 0 <= chosen.hbm_bytes - taken < chosen.page_bytes
    seconds = chosen.step.ms / 1e3
    assert chosen.tokens_per_second == pytest.approx(64 * 2.5 / seconds)
    assert chosen.to_json()["tokens_per_device_second_floor"] == pytest.approx(
        chosen.tokens_per_second / 8
    )
    # As many as fit do fit, and one more a group does not.
    most = dataclasses.replace(job, slots=chosen.most_slots)
    near = estimate(most, chosen.mesh)
    assert near.most_slots <= chosen.most_slots
    more = dataclasses.replace(job, slots=chosen.most_slots + chosen.mesh.data)
    assert not estimate(more, chosen.mesh).fits


def test_what_does_not_fit() -> None:
    plans = all_meshes(make_job(topology="v5e:1x1", slots=1, context=2))
    assert [plan.mesh for plan in plans] == [ONE_DEVICE]
    assert not best(plans).fits
    with pytest.raises(InputError, match="--batch: found 3, expected a multiple of 8"):
        estimate(make_job(slots=3), MeshShape(data=8))
    with pytest.raises(InputError, match="takes 4 devices, expected 8"):
        estimate(make_job(), MeshShape(data=4))
    job = make_job()
    for changes, message in (
        ({"slots": 0}, "--batch: found 0"),
        ({"page_size": 0}, "--page-size: found 0"),
        ({"context": 1}, "--context: found 1, expected 2 to 131072"),
        ({"context": 131073}, "--context: found 131073"),
        ({"acceptance_length": 5.1}, "--acceptance-length: found 5.1, expected 1 to 5"),
    ):
        with pytest.raises(InputError, match=message):
            dataclasses.replace(job, **changes)


def test_topologies() -> None:
    found = Topology.parse("v6e:2x4")
    assert (found.kind, found.num_chips, found.num_devices) == ("TPU v6 lite", 8, 8)
    assert found.name == "v6e:2x4"
    assert Topology.parse("v5p:2x2x4").num_devices == 16
    # Two devices a chip.
    assert Topology.parse("tpu7x:2x2x1").num_devices == 8
    for text, message in (
        ("v9x:2x2", "found 'v9x:2x2', expected one of v5e, v6e, v5p, tpu7x and a grid"),
        ("H200:1x1", "expected one of v5e"),
        ("v6e", "found 'v6e', expected 2 sizes of v6e's grid, as in v6e:2x2"),
        ("v6e:2x2x2", "expected 2 sizes"),
        ("v6e:2xx", "expected 2 sizes"),
        ("v6e:2x3", "expected a slice of v6e: 1x1, 2x2, 2x4"),
        ("v5p:2x2x3", "expected sizes of 1, 2 or a multiple of 4"),
        ("v5p:0x2x2", "expected sizes"),
    ):
        with pytest.raises(InputError, match=message):
            Topology.parse(text)
    for chip in CHIPS.values():
        assert not chip.topology or (chip.hbm_gib > 15 and chip.ici_gb_s >= 200)


def test_models_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="none/such: found no such"):
        describe_target("none/such")
    target, _ = describe_target("openai/gpt-oss-120b")
    with pytest.raises(InputError, match="found a drafter for openai/gpt-oss-20b"):
        describe_drafter("amazon/gpt-oss-20b-p-eagle", target)
