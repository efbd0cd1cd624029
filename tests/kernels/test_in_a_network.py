"""A network with kernels switched on computes what it computes without them."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.target import Target, compile_for
from peagle_jax.config import BlockConfig, ModelConfig, SamplingParams
from peagle_jax.decoding import generate
from peagle_jax.models import decoder
from peagle_jax.models.cache import KVCache
from peagle_jax.models.decoder import Decoder
from peagle_jax.training.cod import ChainSampling, sample_chains
from peagle_jax.training.loss import LossConfig
from peagle_jax.training.p_eagle import PEagleObjective
from tests.decoding import tiny
from tests.kernels.contract import QUICK
from tests.training import dense_reference as dense

BLOCK = BlockConfig(32, 32, 2, 2, 1, 128, windows=(None, 12))
CONFIG = ModelConfig(BLOCK, 64, max_positions=256)


@pytest.mark.parametrize("platform", ["tpu", "gpu"])
def test_a_pass_of_a_network(platform):
    params = decoder.init(CONFIG, jax.random.key(0))
    rng = np.random.default_rng(0)
    empty = KVCache.init(BLOCK, 2, 64, jnp.float32)
    cache = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), empty)
    tokens = jnp.asarray(rng.integers(0, 64, (2, 4)))
    start = jnp.asarray([7, 40], jnp.int32)

    def run(target: Target) -> tuple[str, jax.Array]:
        def network(params: Any, cache: KVCache) -> jax.Array:
            return (
                Decoder(CONFIG, jnp.float32).apply({"params": params}, tokens, start, cache).hidden
            )

        with compile_for(target):
            traced = jax.jit(network).trace(params, cache)
            return str(traced.jaxpr), jax.jit(network)(params, cache)

    plain, want = run(Target("cpu"))
    program, got = run(Target(platform, interpret=True))
    assert "pallas_call" not in plain
    assert program.count("name=verify_attention") == BLOCK.num_layers
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("platform", ["tpu", "gpu"])
def test_a_gradient_of_training_in_segments(platform):
    """Packed documents, chains, keys of an earlier segment, a layer with a window."""
    config = dense.drafter_config()
    block = dataclasses.replace(config.block, head_dim=64, windows=(9,))
    config = dataclasses.replace(config, block=block)
    batch = dense.packed_batch([[5, 18, 9]], 32)
    sampling = ChainSampling(3, 0.8, 0.3, over="all", segments=2)
    chains = sample_chains(sampling, batch, jax.random.key(1))
    objective = PEagleObjective(config, dense.TARGET, sampling, LossConfig(block_size=32))
    trained, frozen = dense.drafter_params(config)
    view = dense.random_view(batch, config)

    def run(target: Target) -> tuple[str, Any]:
        def gradient(trained: Any) -> Any:
            return objective.gradient(
                trained, frozen, dense.target_params(), batch, view, chains, 3.0
            )

        with compile_for(target):
            program = jax.jit(gradient, compiler_options=QUICK)
            return str(program.trace(trained).jaxpr), program(trained)

    plain, (loss, _, want) = run(Target("cpu"))
    program, (got_loss, _, got) = run(Target(platform, interpret=True))
    assert "pallas_call" not in plain
    for kernel in ("cod_attention", "cod_attention_d_queries", "cod_attention_d_keys"):
        assert f"name={kernel}\n" in program or f"name={kernel} " in program
    np.testing.assert_allclose(got_loss, loss, rtol=1e-5)
    dense.assert_trees_close(got, want, 1e-5)


@pytest.mark.parametrize(
    "verification", ["coupled", pytest.param("rejection", marks=pytest.mark.slow)]
)
def test_a_generation_draws_the_same_tokens(verification):
    """Whole generations: the first token, drafts of a smaller vocabulary, and either rule."""
    models = tiny.make(vocab_size=24, draft_vocab_size=17, head_noise=0.5)
    speculator = models.speculator("p-eagle", 3, verification=verification)
    params = models.params("p-eagle")
    asked = [
        SamplingParams(max_new_tokens=8, temperature=0.8, top_k=9, top_p=0.9, seed=1),
        SamplingParams(max_new_tokens=8, temperature=1.2, min_p=0.1, seed=2),
        SamplingParams(max_new_tokens=8),
    ]
    tokens, lengths, table = tiny.make_batch([[1, 2, 3], [4, 5], [6]], asked, 3, 8).arrays()

    def run(target: Target) -> tuple[str, Any]:
        def generation(params: Any) -> Any:
            return generate.generate_tokens(
                params, tokens, lengths, table, speculator=speculator, max_new_tokens=8
            )[:2]

        with compile_for(target):
            traced = jax.jit(generation).trace(params)
            return str(traced.jaxpr), traced.lower().compile()(params)

    plain, want = run(Target("cpu"))
    program, got = run(Target("tpu", interpret=True))
    assert "pallas_call" not in plain
    # The first token; the step's target, and its drafter where the draws are shared.
    assert program.count("name=verify_sample") == (3 if verification == "coupled" else 2)
    jax.tree.map(np.testing.assert_array_equal, got, want)
