"""Speculation gives plain decoding's own tokens for targets of every family: experts, sinks, rings
of sliding windows, YaRN; drafters in the released layout, 4 layers with full attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from peagle_jax.config import GateConfig, MoEConfig, RopeConfig, SamplingParams
from tests.decoding import tiny
from tests.decoding.test_lossless import NEW_TOKENS, PROMPT_SIZE, prompts, tables
from tests.decoding.test_verify import LOOP_VOCAB, assert_distribution, logits_after_prompt
from tests.decoding.tiny import BLOCK, Result, Tiny

K = 5
GPT_OSS = replace(
    BLOCK,
    qkv_bias=True,
    out_bias=True,
    sinks=True,
    windows=(6, None),
    gate=GateConfig(alpha=1.702, limit=1.0, up_offset=1.0),
    moe=MoEConfig(
        6, 3, 12, scores="top_k_softmax", router_bias=True, expert_bias=True
    ),
    rope=RopeConfig(
        500.0,
        "yarn",
        factor=4.0,
        original_max_positions=16,
        beta_fast=2.0,
        beta_slow=0.2,
        truncate=False,
        attention_factor=1.14,
    ),
)  # fmt: skip
FAMILIES = {
    "gpt-oss": GPT_OSS,
    "qwen3-moe": replace(
        BLOCK, qk_norm=True, moe=MoEConfig(8, 2, 12, normalize=True), dense_layers=(0,)
    ),
    "qwen3": replace(BLOCK, qk_norm=True, windows=(None, 5)),
    "qwen2.5": replace(BLOCK, qkv_bias=True),
    "llama3": replace(
        BLOCK, rope=RopeConfig(5000.0, "llama3", factor=4.0, original_max_positions=16)
    ),
}
TABLES = (2, 8)  # every parameter set; greedy rows


@pytest.fixture(scope="module", params=FAMILIES)
def models(request: pytest.FixtureRequest) -> Tiny:
    return tiny.make(
        draft_vocab_size=16, drafter_layers=4, eos_token_ids=(21,), block=FAMILIES[request.param]
    )


def run(models: Tiny, method: str, **options: Any) -> list[Result]:
    speculator = models.speculator(method, K if method != "none" else 0)
    batches = [tiny.make_batch(prompts(), tables()[i], PROMPT_SIZE, NEW_TOKENS) for i in TABLES]
    return [tiny.run(models, speculator, batch, **options) for batch in batches]


@pytest.fixture(scope="module")
def plain(models: Tiny) -> list[Result]:
    """Itself the target's own choice, by one pass that keeps all positions."""
    results = run(models, "none")
    for index, result in zip(TABLES, results, strict=True):
        batch = tiny.make_batch(prompts(), tables()[index], PROMPT_SIZE, NEW_TOKENS)
        assert tiny.own_choices(models, batch, result) == result.rows()
    return results


def assert_equal(found: list[Result], expected: list[Result]) -> None:
    for after, before in zip(found, expected, strict=True):
        assert after.rows() == before.rows()
    accepted = sum(result.accepted.sum(axis=0) for result in found)
    steps = sum(result.num_drafts.sum() for result in found)
    assert (np.asarray(accepted)[:3] > 0).all()
    assert np.asarray(accepted)[0] < 0.95 * steps


def test_tokens_equal_plain_decoding(models: Tiny, plain: list[Result]) -> None:
    assert_equal(run(models, "p-eagle"), plain)


@pytest.mark.parametrize("models", ["gpt-oss", "qwen3"], indirect=True)
def test_trees_among_windows(models: Tiny, plain: list[Result]) -> None:
    """A row's window reaches back from its depth, not from its place among the rows."""
    tree = run(models, "p-eagle+tree")
    for after, before in zip(tree, plain, strict=True):
        assert after.rows() == before.rows()
    assert (sum(result.accepted.sum(axis=0) for result in tree)[:2] > 0).all()


@pytest.mark.parametrize("models", ["gpt-oss"], indirect=True)
@pytest.mark.parametrize("method", ["p-eagle", "eagle3"])
def test_windows_of_the_drafter(method: str, models: Tiny, plain: list[Result]) -> None:
    """Rings beside rings; prompts in chunks of fewer rows than a window and a step have."""
    config = models.drafters[method]
    sliding = replace(config, block=replace(config.block, windows=(4, None, 7, None)))
    models = replace(models, drafters={**models.drafters, method: sliding})
    state = models.speculator(method, K).init_state(2, PROMPT_SIZE, NEW_TOKENS)
    assert state.draft_cache is not None
    assert [layer.capacity for layer in state.draft_cache.layers] == [16, 128, 16, 128]
    assert [layer.capacity for layer in state.target_cache.layers] == [16, 128]
    assert_equal(run(models, method, prefill_chunk=8), plain)


@pytest.mark.parametrize("family", FAMILIES)
def test_rejection_keeps_the_distribution(family: str) -> None:
    """Every window is of two tokens, which every row of the loop is past."""
    block = FAMILIES[family]
    block = replace(block, windows=tuple(window and 2 for window in block.windows))
    models = tiny.make(
        vocab_size=LOOP_VOCAB, draft_vocab_size=5, drafter_layers=4, head_noise=0.3, block=block
    )
    params = SamplingParams(temperature=1.0, max_new_tokens=3)
    assert_distribution("p-eagle", "sample", params, models, logits_after_prompt(models), runs=2)
