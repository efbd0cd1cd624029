"""Sampling kernels: the reference's tokens, and jax's own noise."""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from pallas_kernels.target import NATIVE, Implementation, Target, compile_for
from pallas_kernels.verify_sample import (
    Blocks,
    Filters,
    drawn_by_jax,
    noise,
    own_kernel,
    reject_drafts,
    sample_tokens,
    shapes,
)
from tests.kernels.contract import Call, Case, KernelContract

SMALL: dict[Implementation, dict[str, Any]] = {
    "pallas_tpu": {"blocks": Blocks(128)},
    "pallas_gpu": {"blocks": Blocks(64, 4)},
}
# temperature, top_k, top_p, min_p
GREEDY, PLAIN = (0.0, 5, 0.5, 0.1), (1.0, 0, 1.0, 0.0)
TOP_K, TOP_P, MIN_P = (0.7, 12, 1.0, 0.0), (1.3, 0, 0.8, 0.0), (1.0, 0, 1.0, 0.05)
ALL, ONE = (0.8, 40, 0.9, 0.02), (2.0, 1, 0.3, 0.0)
MIXED = (GREEDY, PLAIN, TOP_K, TOP_P, MIN_P, ALL, ONE)


def filters_of(rows: tuple[tuple[float, int, float, float], ...]) -> Filters:
    columns = [jnp.asarray(column) for column in zip(*rows, strict=True)]
    return Filters(*(c.astype(d) for c, d in zip(columns, "fiff", strict=True)))


def draws(
    asked: tuple[Any, ...],
    rows: int,
    vocab: int,
    *,
    spread: float = 3.0,
    steps: int = 0,
    ids: bool = False,
) -> Any:
    """A builder of `sample_tokens` calls; with `steps` logits are rounded to so many a unit."""

    def build(rng: np.random.Generator, dtype: Any) -> Call:
        del dtype
        logits = spread * rng.normal(size=(len(asked), rows, vocab))
        logits = np.round(logits * steps) / steps if steps else logits
        arrays = {
            "logits": jnp.asarray(logits, jnp.float32),
            "filters": filters_of(asked),
            "keys": jnp.asarray(rng.integers(0, 2**32, (len(asked), rows, 2)), jnp.uint32),
        }
        if ids:
            chosen = rng.permutation(4 * vocab)[:vocab]
            arrays["token_ids"] = jnp.asarray(np.sort(chosen), jnp.int32)
        return Call(sample_tokens, arrays, tuned=SMALL)

    return build


def rejections(asked: tuple[Any, ...], drafts: int, vocab: int, *, sampled: bool) -> Any:
    """A builder of `reject_drafts` calls: drafts mostly near what the target would draw."""

    def build(rng: np.random.Generator, dtype: Any) -> Call:
        del dtype
        batch = len(asked)
        logits = 3 * rng.normal(size=(batch, drafts + 1, vocab))
        near = logits[:, :drafts] + rng.normal(size=(batch, drafts, vocab))
        near[..., rng.permutation(vocab)[: vocab // 3]] = -np.inf
        q = np.concatenate([near, np.full((batch, 1, vocab), np.nan)], axis=1)
        arrays = {
            "logits": jnp.asarray(logits, jnp.float32),
            "filters": filters_of(asked),
            "keys": jnp.asarray(rng.integers(0, 2**32, (batch, drafts + 1, 2)), jnp.uint32),
            "drafts": jnp.asarray(near.argmax(-1), jnp.int32),
            "draft_logits": jnp.asarray(q, jnp.float32) if sampled else None,
            "accept_noise": jnp.asarray(rng.random((batch, drafts)), jnp.float32),
        }
        return Call(reject_drafts, arrays, tuned=SMALL)

    return build


F32 = (jnp.float32,)


class TestVerifySample(KernelContract):
    CASES: ClassVar = [
        Case("mixed", draws(MIXED, 3, 300), F32),
        Case("unfiltered", draws((GREEDY, PLAIN), 5, 200, spread=40.0), F32),
        Case("draft-vocabulary", draws(MIXED, 2, 140, spread=1.0, steps=2, ids=True), F32),
        Case("reject-argmaxes", rejections(MIXED, 4, 270, sampled=False), F32),
        Case("reject-samples", rejections(MIXED, 3, 200, sampled=True), F32),
    ]

    @pytest.mark.parametrize("platform", ["tpu", "gpu"])
    def test_drawn_requests(self, platform):
        """One compiled call, whatever is asked for; quarters make equal logits common."""
        shape = (3, 2, 190)
        implementation = NATIVE[platform]
        own = functools.partial(
            sample_tokens, implementation=implementation, **SMALL[implementation]
        )
        wanted = jax.jit(functools.partial(sample_tokens, implementation="reference"))
        number = st.floats(0.0625, 1.0, width=32)
        one = st.tuples(
            st.sampled_from([0.0, 0.5, 1.0, 2.0]),
            st.integers(0, 30),
            st.just(1.0) | number,
            st.just(0.0) | number,
        )

        @settings(max_examples=25, deadline=None, derandomize=True)
        @given(
            asked=st.tuples(one, one, one),
            seed=st.integers(0, 2**31),
            coarse=st.booleans(),
        )
        def check(asked: Any, seed: int, coarse: bool) -> None:
            rng = np.random.default_rng(seed)
            logits = 3 * rng.normal(size=shape)
            logits = np.round(4 * logits) / 4 if coarse else logits
            keys = jnp.asarray(rng.integers(0, 2**32, (*shape[:2], 2)), jnp.uint32)
            arrays = (jnp.asarray(logits, jnp.float32), filters_of(asked), keys)
            np.testing.assert_array_equal(run(*arrays), wanted(*arrays))

        with compile_for(Target(platform, interpret=True)):
            run = jax.jit(own)
            check()


def test_the_noise_is_what_jax_draws():
    keys = jax.random.split(jax.random.key(7), 3)
    words = jax.lax.bitcast_convert_type(jax.random.key_data(keys), jnp.int32)
    counter = jnp.broadcast_to(jnp.arange(5000, dtype=jnp.int32), (3, 5000))
    got = np.asarray(noise.gumbel(words[:, :1], words[:, 1:], counter))
    want = jax.vmap(lambda key: jax.random.gumbel(key, (5000,), jnp.float32))(keys)
    np.testing.assert_array_equal(got, np.asarray(want))
    assert noise.LOWEST < got.min() < got.max() < noise.HIGHEST


def test_the_noise_is_bounded_at_both_ends():
    """The least and the most that 23 bits can make."""
    ends = np.float32([np.finfo(np.float32).tiny, 1 - 2**-23])
    least, most = np.asarray(-jnp.log(-jnp.log(jnp.asarray(ends))))
    assert noise.LOWEST < least < most < noise.HIGHEST


def test_other_generators_are_told_apart():
    assert drawn_by_jax()
    with jax.default_prng_impl("rbg"):
        assert not drawn_by_jax()


def test_what_fits_no_memory_is_refused():
    problem = shapes.Problem(8, 300000, "float32", drafted=True)
    assert "up to 215296, found 300000" in str(shapes.tpu_limit(problem))
    with compile_for(Target("tpu")):
        assert own_kernel(300000)
        assert not own_kernel(300000, drafted=True)


def test_not_a_number_leaves_tokens_that_exist():
    call = draws(MIXED, 3, 300)(np.random.default_rng(0), jnp.float32)
    arrays = {**call.arrays, "logits": jnp.full((len(MIXED), 3, 300), jnp.nan)}
    tokens = np.asarray(Call(sample_tokens, arrays, tuned=SMALL).interpreted("pallas_tpu"))
    assert ((tokens >= 0) & (tokens < 300)).all()


def test_logits_of_another_dtype_are_widened() -> None:
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(2, 2, 50)), jnp.bfloat16)
    filters = filters_of((PLAIN, ALL))
    keys = jax.random.key_data(jax.random.split(jax.random.key(0), (2, 2)))
    found = sample_tokens(logits, filters, keys)
    wide = sample_tokens(logits.astype(jnp.float32), filters, keys)
    np.testing.assert_array_equal(found, wide)
