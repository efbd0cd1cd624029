"""Drafter configs in the four layouts: detection, each key's home and default, refusals."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from peagle_jax.config import DrafterConfig
from peagle_jax.convert.config_writers import drafter_json
from peagle_jax.convert.drafter_configs import (
    check_pair,
    drafter_config,
    drafter_layout,
    is_drafter,
    mask_token_id,
)
from peagle_jax.errors import InputError
from tests.convert.tiny import DRAFTER_JSON, TARGET, VOCAB, drafter_tensors

PARALLEL = list(drafter_tensors())
SEQUENTIAL = list(drafter_tensors(parallel=False))
EAGLE3_JSON = {key: value for key, value in DRAFTER_JSON.items() if key != "ptd_token_id"}
OUTER_KEYS = ("draft_vocab_size", "ptd_token_id", "architectures")
SPECULATORS_JSON: dict[str, Any] = {
    "architectures": ["PEagleDraftModel"],
    "speculators_model_type": "peagle",
    "draft_vocab_size": DRAFTER_JSON["draft_vocab_size"],
    "mask_token_id": 5,
    "speculators_config": {"proposal_methods": [{"speculative_tokens": 6}]},
    "transformer_layer_config": {k: v for k, v in DRAFTER_JSON.items() if k not in OUTER_KEYS},
}


def read(
    config: dict[str, Any] | None = None,
    tensors: list[str] | None = None,
    target: Any = TARGET,
    shift: int = 0,
    **changes: Any,
) -> DrafterConfig:
    config = {**(DRAFTER_JSON if config is None else config), **changes}
    return drafter_config(
        config, PARALLEL if tensors is None else tensors, "config.json", target, shift
    )


def test_flat_parallel_drafter() -> None:
    found = read()
    assert found.parallel
    assert found.method == "p-eagle"
    assert found.mask_token_id == 5
    assert (found.vocab_size, found.draft_vocab_size) == (40, 12)
    assert found.aux_layer_ids == (2, 4, 5)
    assert not found.own_embedding
    assert found.own_head
    flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    assert not any(getattr(found, flag) for flag in flags)


def test_speculators_layout_is_the_same_drafter() -> None:
    found = read(SPECULATORS_JSON)
    assert found.trained_num_draft_tokens == 6
    assert found == read(speculative_tokens=6)


@pytest.mark.parametrize(
    ("kind", "tensors", "expected"), [("peagle", PARALLEL, False), ("eagle3", SEQUENTIAL, True)]
)
def test_default_of_norm_before_residual(kind: str, tensors: list[str], expected: bool) -> None:
    config = {**SPECULATORS_JSON, "speculators_model_type": kind}
    if kind == "eagle3":
        del config["mask_token_id"]
    found = read(config, tensors)
    assert found.norm_before_residual is expected
    assert found.parallel is (kind == "peagle")
    assert read({**config, "norm_before_residual": not expected}, tensors).norm_before_residual is (
        not expected
    )


@pytest.mark.parametrize(
    ("config", "tensors", "layout"),
    [
        (DRAFTER_JSON, PARALLEL, "vllm"),
        (DRAFTER_JSON, ["midlayer.hidden_norm.weight", "mask_hidden"], "vllm"),
        (SPECULATORS_JSON, PARALLEL, "speculators"),
        ({**DRAFTER_JSON, "architectures": ["LlamaEagle3DraftModel"]}, PARALLEL, "nemo"),
        (EAGLE3_JSON, ["midlayer.hidden_norm.weight"], "eagle3"),
        (EAGLE3_JSON, SEQUENTIAL, "vllm"),
    ],
)
def test_layout(config: dict[str, Any], tensors: list[str], layout: str) -> None:
    assert drafter_layout(config, tensors) == layout
    assert is_drafter(config, tensors)


def test_eagle3_original_is_told_from_a_target() -> None:
    llama = {"architectures": ["LlamaForCausalLM"]}
    assert is_drafter(llama, ["midlayer.hidden_norm.weight"])
    assert is_drafter({**llama, "draft_vocab_size": 10}, [])
    assert not is_drafter(llama, ["model.layers.0.input_layernorm.weight"])


def test_mask_id_follows_vllm_s_order() -> None:
    keys: dict[str, Any] = {
        "ptd_token_id": 1,
        "pard_token": "2",
        "mask_token_id": 3,
        "dflash_config": {"mask_token_id": 4},
    }
    found = []
    while keys:
        found.append(mask_token_id(keys, "config.json"))
        keys.popitem()
    assert found == [4, 3, 2, 1]
    assert mask_token_id({"dflash_config": {}, "mask_token_id": None}, "c") is None


@pytest.mark.parametrize("home", ["top", "eagle_config"])
@pytest.mark.parametrize(
    "flag", ["norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"]
)
def test_flags_in_either_home(home: str, flag: str) -> None:
    changes: dict[str, Any] = {flag: True} if home == "top" else {"eagle_config": {flag: True}}
    assert getattr(read(**changes), flag) is True


@pytest.mark.parametrize("home", ["top", "eagle_config"])
def test_aux_layer_ids(home: str) -> None:
    ids = {"eagle_aux_hidden_state_layer_ids": [5, 1, 3, 1]}
    changes: dict[str, Any] = ids if home == "top" else {"eagle_config": ids}
    assert read(**changes).aux_layer_ids == (1, 3, 5)  # sorted, without repeats, as in vLLM
    assert read(**changes, shift=1).aux_layer_ids == (2, 4, 6)  # SGLang's sense


def test_default_aux_layer_ids_come_from_the_target() -> None:
    deep = dataclasses.replace(TARGET, block=dataclasses.replace(TARGET.block, num_layers=30))
    assert read(target=deep).aux_layer_ids == (2, 15, 27)
    assert read(target=deep, shift=1).aux_layer_ids == (2, 15, 27)  # explicit ids alone shift
    with pytest.raises(InputError, match=r"layer_ids: found none, expected ids, or the target"):
        read(target=None)


def test_no_aux_hidden_state() -> None:
    found = read(EAGLE3_JSON, SEQUENTIAL, eagle_config={"use_aux_hidden_state": False})
    assert found.aux_layer_ids == ()
    assert not found.has_fc
    with pytest.raises(InputError, match="use_aux_hidden_state: found false in a parallel"):
        read(eagle_config={"use_aux_hidden_state": False})


def test_own_embedding_and_head_are_read_from_the_tensors() -> None:
    found = read(tensors=[*PARALLEL, "embed_tokens.weight"])
    assert found.own_embedding
    no_head = [name for name in PARALLEL if name not in ("lm_head.weight", "d2t")]
    assert not read(tensors=no_head, draft_vocab_size=None).own_head


def test_head_can_be_lent_to_a_draft_vocabulary() -> None:
    """The rows of the target's head that d2t names, as speculators reads it."""
    found = read(tensors=[name for name in PARALLEL if name != "lm_head.weight"])
    assert (found.own_head, found.draft_vocab_size, found.vocab_size) == (False, 12, 40)


@pytest.mark.parametrize(
    ("changes", "tensors", "message"),
    [
        (
            {},
            SEQUENTIAL,
            "mask_hidden: found no such tensor in the weights beside it, expected one in a",
        ),
        (
            {"speculative_tokens": "6"},
            PARALLEL,
            "speculative_tokens: found '6', expected a whole number",
        ),
        ({"speculative_tokens": 0}, PARALLEL, "speculative_tokens: found 0, expected 1 or more"),
        ({"ptd_token_id": None}, PARALLEL, "mask token id: found none, expected one in a parallel"),
        ({"ptd_token_id": VOCAB}, PARALLEL, "ptd_token_id.: found 40, expected 0 to 39"),
        ({"ptd_token_id": "x"}, PARALLEL, "ptd_token_id: found 'x', expected a token id"),
        ({"draft_vocab_size": 41}, PARALLEL, "draft_vocab_size: found 41, expected 1 to 40"),
        ({"eos_token_id": 40}, PARALLEL, "eos_token_id: found 40, expected 0 to 39"),
        ({"norm_before_fc": True, "fc_norm": True}, PARALLEL, "found both true, expected at most"),
        ({"architectures": ["MedusaModel"]}, PARALLEL, "architectures: found 'MedusaModel'"),
        (
            {"eagle_aux_hidden_state_layer_ids": [1, "2"]},
            PARALLEL,
            "layer_ids: found .*expected layer ids of 0 or more",
        ),
    ],
)
def test_refused(changes: dict[str, Any], tensors: list[str], message: str) -> None:
    with pytest.raises(InputError, match=rf"^config\.json: .*{message}"):
        read(tensors=tensors, **changes)


def test_unknown_speculators_type() -> None:
    with pytest.raises(InputError, match=r"speculators_model_type: found 'dflash', expected one"):
        read({**SPECULATORS_JSON, "speculators_model_type": "dflash"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 41, "draft_vocab_size": 12}, "vocab_size: found 41, expected the target"),
        ({"target_hidden_size": 8}, "target_hidden_size: found 8, expected the target's 16"),
        (
            {"eagle_aux_hidden_state_layer_ids": [1, 9]},
            r"layer_ids: found \[1, 9\], expected ids up to the target's 8 layers",
        ),
        (
            {"hidden_size": 8, "target_hidden_size": 16},
            r"hidden_size \(no embed_tokens\): found 8, expected the target's 16",
        ),
    ],
)
def test_drafter_for_another_target(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_pair(read(**changes), TARGET, "config.json")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True},
        {"fc_norm": True, "attention_bias": True, "logit_scale": 0.5, "speculative_tokens": 7},
        {"architectures": ["PeagleQwen3ForCausalLM"], "head_dim": 6, "target_hidden_size": 24},
        {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 9},
        {"rope_scaling": {"type": "linear", "factor": 3.0}, "draft_vocab_size": None},
        {"bos_token_id": 1, "eos_token_id": 2},
        {"eos_token_id": [7, 2]},
    ],
)
@pytest.mark.parametrize("parallel", [True, False])
def test_written_config_reads_back(changes: dict[str, Any], parallel: bool) -> None:
    tensors = PARALLEL if parallel else SEQUENTIAL
    config = read(DRAFTER_JSON if parallel else EAGLE3_JSON, tensors, **changes)
    written = drafter_json(config, "bfloat16", 64)
    assert read(written, tensors, target=None) == config
    for key in ("bos_token_id", "eos_token_id"):
        assert written[key] == changes.get(key)
