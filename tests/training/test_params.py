"""What is trained, taken apart and put together; the networks that use the parts."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from peagle_jax.errors import InputError
from peagle_jax.models import drafter
from peagle_jax.models.drafter import Drafter
from peagle_jax.training.networks import Networks
from peagle_jax.training.params import Trainable, export, merge, split
from tests.decoding.tiny import HIDDEN, VOCAB, drafter_config, target_config, target_params

TARGET = target_config()
TARGET_PARAMS = jax.device_put(target_params(TARGET))
DRAFT_VOCAB = 9
IDS = jnp.array([3, 22, 0, 8, 15, 1, 7, 20, 11], jnp.int32)
MASK = VOCAB - 1
CHOICES = [Trainable(e, h) for e in ("frozen", "mask_row", "all") for h in ("frozen", "all")]


def make(**changes: Any) -> tuple[Any, dict[str, Any]]:
    config = drafter_config(TARGET, parallel=True, **{"draft_vocab_size": DRAFT_VOCAB, **changes})
    params = drafter.init(config, jax.random.key(3))
    if "draft_to_target" in params:
        params["draft_to_target"] = IDS
    return config, params


def names(params: dict[str, Any]) -> set[str]:
    return set(flatten_dict(params, sep="."))


def full_logits(config: Any, params: Any, tokens: jax.Array) -> jax.Array:
    """The drafter's own logits of something that uses embedding and head."""
    apply = Drafter(config).apply
    table = TARGET_PARAMS["embed_tokens"]["embedding"]
    vectors = apply({"params": params}, tokens, table, method="embed")
    return apply({"params": params}, vectors, TARGET_PARAMS["lm_head"]["kernel"], method="logits")


@pytest.mark.parametrize("trainable", CHOICES, ids=lambda t: f"{t.embedding}-{t.head}")
@pytest.mark.parametrize("own", [False, True])
def test_splitting_changes_no_output(trainable, own):
    config, params = make(own_embedding=own, own_head=own)
    parts = split(config, params, TARGET, TARGET_PARAMS, trainable)
    trained, frozen = names(parts.trained), names(parts.frozen)
    assert not trained & frozen
    assert "draft_to_target" in frozen
    assert {"fc.kernel", "mask_hidden", "norm.scale", "layers_0.mlp.up_proj.kernel"} <= trained
    assert ("embed_tokens.embedding" in trained) == (trainable.embedding == "all")
    assert ("embed_tokens.embedding" in frozen) == (trainable.embedding != "all" and own)
    assert ("mask_embedding" in trained) == (trainable.embedding == "mask_row")
    assert ("lm_head.kernel" in trained) == (trainable.head == "all")
    assert ("lm_head.kernel" in frozen) == (trainable.head != "all" and own)

    tokens = jnp.array([0, 5, MASK, 22, 7], jnp.int32)
    nets = Networks(
        TARGET, parts.config, parts.trained, parts.frozen, TARGET_PARAMS, jnp.dtype("float32")
    )
    logits = nets.draft_logits(nets.embed(tokens))
    np.testing.assert_allclose(logits, full_logits(config, params, tokens), atol=1e-5)
    again, whole = export(parts.config, parts.trained, parts.frozen, TARGET_PARAMS, jnp.float32)
    assert names(whole) == names(drafter.abstract_params(again))
    np.testing.assert_allclose(full_logits(again, whole, tokens), logits, atol=1e-5)
    # Untrained, a mask row is no reason to own an embedding.
    assert again.own_embedding == (own or trainable.embedding == "all")


@pytest.mark.parametrize("own", [False, True])
def test_a_trained_mask_row_is_exported_in_an_embedding(own):
    config, params = make(own_embedding=own)
    parts = split(config, params, TARGET, TARGET_PARAMS, Trainable("mask_row"))
    row = jnp.arange(HIDDEN, dtype=jnp.float32)
    trained = {**parts.trained, "mask_embedding": row}
    again, whole = export(parts.config, trained, parts.frozen, TARGET_PARAMS, jnp.float32)
    assert again == dataclasses.replace(config, own_embedding=True)
    before = params if own else TARGET_PARAMS
    table = np.array(before["embed_tokens"]["embedding"])
    assert np.any(table[MASK] != row)
    table[MASK] = row
    np.testing.assert_array_equal(whole["embed_tokens"]["embedding"], table)
    assert names(whole) == names(drafter.abstract_params(again))
    # Going on from the export starts from the trained row.
    resumed = split(again, whole, TARGET, TARGET_PARAMS, Trainable("mask_row"))
    np.testing.assert_array_equal(resumed.trained["mask_embedding"], row)
    assert names(merge(resumed.trained, resumed.frozen)) == names(whole) | {"mask_embedding"}


def test_exports_are_in_the_asked_dtype():
    config, params = make()
    parts = split(config, params, TARGET, TARGET_PARAMS, Trainable("all", "all"))
    again, whole = export(parts.config, parts.trained, parts.frozen, TARGET_PARAMS, jnp.bfloat16)
    assert again.own_embedding
    assert whole["embed_tokens"]["embedding"].dtype == jnp.bfloat16
    assert whole["draft_to_target"].dtype == jnp.int32


def test_a_trained_copy_of_a_lent_table_shares_no_memory_with_it():
    """The trainer donates what is trained; the target must outlive it."""
    config, params = make(own_head=False, draft_vocab_size=VOCAB)
    parts = split(config, params, TARGET, TARGET_PARAMS, Trainable("all", "all"))
    for mine, lent in (
        (parts.trained["embed_tokens"]["embedding"], TARGET_PARAMS["embed_tokens"]["embedding"]),
        (parts.trained["lm_head"]["kernel"], TARGET_PARAMS["lm_head"]["kernel"]),
    ):
        np.testing.assert_array_equal(mine, lent)
        assert mine.unsafe_buffer_pointer() != lent.unsafe_buffer_pointer()


def test_gradients_reach_the_mask_row_alone():
    config, params = make()
    parts = split(config, params, TARGET, TARGET_PARAMS, Trainable("mask_row"))
    tokens = jnp.array([4, MASK, MASK], jnp.int32)

    def total(trained: Any) -> jax.Array:
        nets = Networks(
            TARGET, parts.config, trained, parts.frozen, TARGET_PARAMS, jnp.dtype("float32")
        )
        return jnp.sum(nets.embed(tokens))

    grads = jax.grad(total)(parts.trained)
    np.testing.assert_array_equal(grads["mask_embedding"], np.full(HIDDEN, 2.0))


def test_wide_master_parameters_compute_in_the_asked_dtype():
    config, params = make()
    parts = split(config, params, TARGET, TARGET_PARAMS, Trainable("mask_row"))
    nets = Networks(
        TARGET, parts.config, parts.trained, parts.frozen, TARGET_PARAMS, jnp.dtype("bfloat16")
    )
    assert nets.embed(jnp.array([1, MASK])).dtype == jnp.bfloat16
    assert nets.mask_feature().dtype == jnp.bfloat16
    assert nets.draft_logits(jnp.ones((2, HIDDEN), jnp.bfloat16)).dtype == jnp.float32


def test_draft_ids():
    config, params = make()
    parts = split(config, params, TARGET, TARGET_PARAMS, Trainable())
    nets = Networks(
        TARGET, parts.config, parts.trained, parts.frozen, TARGET_PARAMS, jnp.dtype("float32")
    )
    np.testing.assert_array_equal(nets.draft_ids(IDS), np.arange(DRAFT_VOCAB))
    np.testing.assert_array_equal(nets.draft_ids(jnp.array([2, 3, 21])), [-1, 0, -1])
    hidden = jnp.ones((1, HIDDEN))
    full = hidden @ TARGET_PARAMS["lm_head"]["kernel"].T
    np.testing.assert_allclose(nets.target_logits(hidden), full[:, IDS], atol=1e-5)


def test_choices_that_make_no_sense_are_refused():
    with pytest.raises(InputError, match="trainable: head: found 'mask_row', expected one of"):
        Trainable(head="mask_row")
    eagle3 = drafter_config(TARGET, parallel=False)
    with pytest.raises(InputError, match="found 'mask_row', expected 'frozen' or 'all'"):
        split(eagle3, {}, TARGET, TARGET_PARAMS, Trainable("mask_row"))
