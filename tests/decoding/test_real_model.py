"""A slice of scripts/check_lossless.py on SmolLM2-135M-Instruct, and vLLM's recorded answers."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import peagle_jax as pj
from peagle_jax.runner import Pair
from peagle_jax.text import encode_prompt

pytestmark = pytest.mark.real_model
SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "check_lossless.py"


@pytest.fixture(scope="module")
def check() -> ModuleType:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("check_lossless", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def shipped() -> Pair:
    return pj.load("smollm2", dtype="float32")


@pytest.fixture(scope="module")
def prompts(check: Any) -> list[str]:
    rows = check.read_rows(check.GOLDENS / "eval_prompts.jsonl")
    return [row["prompt"] for row in rows][:2]


@pytest.mark.filterwarnings("ignore:none of .* drafts was accepted")  # a random drafter
def test_a_slice_of_the_matrix_is_lossless(check, shipped, prompts) -> None:
    outcomes = check.run_matrix(
        shipped,
        prompts,
        num_draft_tokens=[5],
        batch_sizes=[2],
        max_new_tokens=32,
        drafters=["p-eagle", "eagle3-random"],
        draft_sampling=["sample"],
    )
    assert [o.cell.drafter for o in outcomes] == ["p-eagle"] * 2 + ["eagle3-random"] * 2
    for outcome in outcomes:
        assert outcome.differences == [], outcome.cell
        assert outcome.tokens == 64
    # The shipped drafter saves steps, a random one does not.
    assert outcomes[0].acceptance_length > 1.2
    assert outcomes[0].num_drafts < 56
    assert max(o.acceptance_length for o in outcomes[2:]) < 1.1


def test_tokens_and_acceptance_equal_vllm(check, shipped) -> None:
    assert check.check_vllm_reference(shipped, 4, batch_size=4) == []


def test_a_difference_is_seen_and_explained(check, shipped, prompts) -> None:
    """The token after a shared beginning: how sure the model was."""
    ids = encode_prompt(shipped.tokenizer, prompts[0], raw=False)
    params = pj.SamplingParams(max_new_tokens=32)
    reference = pj.generate(shipped, prompts, params, method="none", batch_size=2)[0]
    wrong = dataclasses.replace(
        reference, token_ids=[*reference.token_ids[:3], 7, *reference.token_ids[4:]]
    )
    short = dataclasses.replace(reference, token_ids=reference.token_ids[:5])
    assert check.first_difference(shipped, ids, params, reference, reference) is None
    difference = check.first_difference(shipped, ids, params, reference, wrong)
    assert difference["at"] == 3
    assert difference["tokens"] == [reference.token_ids[3], 7]
    assert difference["verdict"] == "fault"
    assert difference["gap"] > 0.01
    assert check.first_difference(shipped, ids, params, reference, short)["at"] == 5
