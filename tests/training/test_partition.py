"""Segments trained one after the other against the whole sequence at once."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cod_attention import reference
from peagle_jax.training.cod import Chains, ChainSampling, sample_chains
from peagle_jax.training.loss import LossConfig
from peagle_jax.training.p_eagle import PEagleObjective
from tests.training import dense_reference as dense

LENGTH = 48
# A document over every border, one within a segment, padding, and a document of a whole row.
DOCUMENTS = [[5, 18, 17, 4], [48]]
SAMPLING = ChainSampling(num_depths=4, keep_ratio=0.8, min_keep_ratio=0.3, over="all")
LOSS = LossConfig(kl=1.0, ce=0.3, block_size=32)


def in_one_segment(chains: Chains) -> Chains:
    return dense.chains_of(dense.elements_of(chains))


def make(num_layers: int, windows: tuple[int | None, ...] = ()) -> tuple[PEagleObjective, Any]:
    config = dense.drafter_config(num_layers, windows)
    batch = dense.packed_batch(DOCUMENTS, LENGTH)
    trained, frozen = dense.drafter_params(config)
    rest = (frozen, dense.target_params(), batch, dense.random_view(batch, config))
    return PEagleObjective(config, dense.TARGET, SAMPLING, LOSS), (trained, *rest)


@pytest.mark.parametrize(
    ("segments", "num_layers", "windows"),
    [(2, 1, ()), (3, 2, (6, None)), (4, 3, ())],
)
def test_segments_give_the_gradient_of_the_whole(
    segments: int, num_layers: int, windows: tuple[int | None, ...]
) -> None:
    objective, inputs = make(num_layers, windows)
    sampling = dataclasses.replace(SAMPLING, segments=segments)
    chains = sample_chains(sampling, inputs[3], dense.row_keys(segments, inputs[3]))
    # Each segment has elements below depth 1, and some look back over its border.
    assert (np.asarray(chains.length).max(axis=-1) >= 2).all()
    gradient = dense.quick_jit(objective.gradient)
    loss, sums, found = gradient(*inputs, chains, 3.0)
    whole_loss, whole_sums, expected = gradient(*inputs, in_one_segment(chains), 3.0)
    np.testing.assert_allclose(loss, whole_loss, rtol=1e-5)
    np.testing.assert_array_equal(sums.count, whole_sums.count)
    np.testing.assert_allclose(sums.loss, whole_sums.loss, rtol=1e-5)
    dense.assert_trees_close(found, expected, 1e-5)


def test_earlier_segments_matter() -> None:
    """The comparison above is not one of parts that do not meet: without the gradient through
    kept keys and values it would fail by far."""
    objective, inputs = make(2)
    trained, frozen, target, batch, view = inputs
    sampling = dataclasses.replace(SAMPLING, segments=4)
    chains = sample_chains(sampling, batch, dense.row_keys(0, batch))
    gradient = dense.quick_jit(objective.gradient)
    whole = gradient(*inputs, chains, 1.0)[2]
    # Cut at every border: documents of their own in each segment see nothing before it.
    cut = batch.documents * 10 + jnp.arange(LENGTH) // 12
    alone = gradient(
        trained, frozen, target, dataclasses.replace(batch, documents=cut), view, chains, 1.0
    )[2]
    key, value = (
        [tree["layers_0"]["self_attn"][name]["kernel"] for tree in (whole, alone)]
        for name in ("k_proj", "v_proj")
    )
    for one, other in (key, value):
        assert float(jnp.abs(one - other).max()) > 0.01 * float(jnp.abs(one).max())


def test_memory_falls_with_the_number_of_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """The temporary memory of the compiled step: parameters are small here, and blocks of
    scores too, so that it is the activations'. It must fall nearly as 1 / S; what is kept of
    every position, and the target's states, stay."""
    monkeypatch.setattr(reference, "SCORES", 1 << 17)
    config = dense.drafter_config()
    length = 4096
    batch = dense.packed_batch([[length]], length)
    trained, frozen = dense.drafter_params(config)
    view = dense.random_view(batch, config)
    temporary = {}
    for segments in (1, 4, 8):
        sampling = ChainSampling(num_depths=4, segments=segments)
        objective = PEagleObjective(config, dense.TARGET, sampling, LOSS)
        chains = jax.eval_shape(
            lambda key, how=sampling: sample_chains(how, batch, key), dense.row_keys(0, batch)
        )
        lowered = dense.quick_jit(objective.gradient).lower(
            trained, frozen, dense.target_params(), batch, view, chains, 1.0
        )
        # Buffers are assigned before machine code is made: a quick compilation tells the same.
        analysis: Any = lowered.compile().memory_analysis()
        temporary[segments] = analysis.temp_size_in_bytes
    assert temporary[4] < 0.35 * temporary[1]
    assert temporary[8] < 0.7 * temporary[4]
