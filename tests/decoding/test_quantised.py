"""Speculation with a quantised target gives that target's own tokens."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

from peagle_jax.config import MoEConfig
from tests.decoding import test_families as families
from tests.decoding import tiny
from tests.decoding.test_families import FAMILIES, GPT_OSS
from tests.quantised import in_form

BLOCKS = {
    # Whole blocks of 32 inputs.
    "mxfp4": replace(
        GPT_OSS,
        hidden_size=32,
        moe=replace(GPT_OSS.moe or MoEConfig(1, 1, 1), intermediate_size=32),
    ),
    "int8": FAMILIES["llama3"],
}


@pytest.mark.parametrize("weights", BLOCKS)
def test_tokens_equal_plain_decoding(weights) -> None:
    models = tiny.make(
        draft_vocab_size=16,
        drafter_layers=4,
        eos_token_ids=(21,),
        block=BLOCKS[weights],
        in_form=functools.partial(in_form, weights=weights),
    )
    plain = families.run(models, "none")
    assert any(len(set(row)) > 3 for result in plain for row in result.rows())
    families.assert_equal(families.run(models, "p-eagle"), plain)
