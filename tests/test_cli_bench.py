"""`peagle bench` on a tiny model: every method, a peer in a process of its own, bad input."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import sys

import jax
import pytest

from peagle_jax import cli, step_costs
from peagle_jax.config import DrafterConfig
from peagle_jax.convert.in_memory import write_drafter
from peagle_jax.models import drafter as network
from tests.training import tiny_model

NEW = 9


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("bench")
    target = tiny_model.TARGET
    drafters = {}
    for method, mask in (("p-eagle", tiny_model.MASK), ("eagle3", None)):
        config = DrafterConfig(
            block=dataclasses.replace(target.block, num_layers=1),
            parallel=method == "p-eagle",
            vocab_size=target.vocab_size,
            draft_vocab_size=target.vocab_size,
            target_hidden_size=32,
            aux_layer_ids=(1, 2, 3),
            mask_token_id=mask,
        )
        params = network.init(config, jax.random.key(3))
        drafters[method] = str(write_drafter(root / method, config, params, 128))
    return {
        "target": str(tiny_model.write_target(root / "target")),
        "prompts": str(tiny_model.write_prompts(root / "prompts.jsonl", 3)),
        **drafters,
    }


@pytest.fixture
def bench(folders, tmp_path, capsys):
    def run(*options, code=0, out="out"):
        line = ["bench", "--model", folders["target"], "--prompts", folders["prompts"]]
        line += ["--max-new-tokens", str(NEW), "--out", str(tmp_path / out), *options]
        assert cli.main(line) == code
        return tmp_path / out, capsys.readouterr()

    return run


def test_all_methods(bench, folders) -> None:
    out, printed = bench(
        "--methods", "p-eagle,eagle3,prompt-lookup", "--num-draft-tokens", "2", "--batch", "2",
        "--repeats", "2", "--drafter", folders["p-eagle"], "--drafter", folders["eagle3"],
    )  # fmt: skip
    lines = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    assert [line["method"] for line in lines] == ["none", "p-eagle", "eagle3", "prompt-lookup"]
    for line in lines:
        assert (line["identical"], line["prompts"], line["tokens"]) == (3, 3, 3 * NEW)
        assert len(line["tokens_per_second_repeats"]) == 2
        assert line["batch"] == 2
        assert line["verify_ms"] > 0
        assert (line["draft_ms"] > 0) == (line["method"] != "none")
        parts = line["draft_ms"] + line["verify_ms"] + line["other_ms"]
        assert parts == pytest.approx(line["step_ms"])
        if line["method"] != "none":
            # Every token but a prompt's first comes of a draft's verification.
            assert line["acceptance_length"] >= 1
            assert len(line["acceptance_per_position"]) == 2
    page = (out / "results.md").read_text()
    assert page.count("3 of 3") == 4
    settings = json.loads((out / "settings.json").read_text())
    assert settings["versions"]["jax"] == jax.__version__
    assert settings["dtype"] == "float32"
    for name in ("speed", "acceptance", "draft_cost", "split"):
        assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert "prompt-lookup" in printed.out


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")
def test_transformers_beside_it(bench) -> None:
    _, printed = bench(
        "--methods", "none,prompt-lookup", "--num-draft-tokens", "2", "--repeats", "1",
        "--peers", "transformers", "--json", "--no-plot",
    )  # fmt: skip
    lines = json.loads(printed.out)["results"]
    peers = [line for line in lines if line["peer"] == "transformers"]
    assert [(line["method"], line["identical"]) for line in peers] == [
        ("none", 3),
        ("prompt-lookup", 3),
    ]
    assert peers[0]["tokens"] == 3 * NEW
    assert peers[0]["speedup"] > 0


def test_continuous_batching_beside_it(bench, folders) -> None:
    _, printed = bench(
        "--methods", "none,p-eagle", "--num-draft-tokens", "2", "--repeats", "1", "--batch", "2",
        "--drafter", folders["p-eagle"], "--peers", "peagle_batch", "--json", "--no-plot",
    )  # fmt: skip
    lines = {(one["peer"], one["method"]): one for one in json.loads(printed.out)["results"]}
    plain, drafted = lines["peagle_batch", "none"], lines["peagle_batch", "p-eagle"]
    assert plain["identical"] == drafted["identical"] == plain["prompts"] == 3
    assert plain["tokens"] == drafted["tokens"] == 3 * NEW
    assert plain["acceptance_length"] is None
    own = lines["peagle_jax", "p-eagle"]["acceptance_length"]
    assert drafted["acceptance_length"] == pytest.approx(own, abs=0.2)


def test_llama_cpp_reads_gguf_alone(bench, tmp_path) -> None:
    (tmp_path / "llama_cpp").mkdir()
    (tmp_path / "llama_cpp" / "__init__.py").write_text("")
    lookup = "LlamaPromptLookupDecoding = None"
    (tmp_path / "llama_cpp" / "llama_speculative.py").write_text(lookup)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    _, printed = bench(
        "--methods", "none", "--repeats", "1", "--peers", "llama.cpp", "--peer-python",
        f"llama.cpp={python}", "--json", "--no-plot",
    )  # fmt: skip
    assert "llama.cpp: ValueError: it reads GGUF files alone, found " in printed.err


def test_a_peer_that_is_not_there_is_left_out(bench, tmp_path) -> None:
    _, printed = bench(
        "--methods", "none", "--repeats", "1", "--peers", "vllm", "--peer-python",
        "vllm=/bin/false", "--json", "--no-plot",
    )  # fmt: skip
    assert [line["peer"] for line in json.loads(printed.out)["results"]] == ["peagle_jax"]
    assert "vllm: its process ended with exit code 1; it is left out" in printed.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--methods", "p-eagle"), "--methods: found p-eagle, expected a --drafter"),
        (("--batch", "two"), "--batch: found 'two'"),
        (("--batch", "1,9999", "--methods", "none"), "--batch: found 9999, expected at most "),
        (("--num-draft-tokens", ""), "--num-draft-tokens: found '', expected a number, or"),
        (("--num-draft-tokens", "3,"), "--num-draft-tokens: found '3,', expected a number, or"),
        (("--drafter", ""), "drafter: found ''"),
        (("--repeats", "0", "--methods", "none"), "--repeats: found 0"),
        (("--limit", "0"), "--limit: found 0"),
        (("--peer-python", "vllm"), "--peer-python: found 'vllm'"),
        (("--peer-python", "vllm=/no/python"), "--peer-python: found 'vllm=/no/python', expected"),
        (("--peer-python", f"vllm={sys.executable}"), "--peer-python: found vllm, expected one of"),
        (("--methods", ""), "--methods: found '', expected a name"),
        (("--methods", "none,,p-eagle"), "--methods: found 'none,,p-eagle', expected a name"),
        (("--num-draft-tokens", "AUTO"), "--num-draft-tokens: found 'AUTO', expected a number, or"),
        (("--methods", "none", "--out", ""), "--out: found '', expected a folder"),
        (("--methods", "none", "--out", f"{__file__}/x"), f"--out: {__file__}/x: Not a directory"),
    ],
)
def test_bad_options_are_one_line(bench, options, message) -> None:
    _, printed = bench(*options, code=2)
    assert printed.err.startswith(f"peagle: error: {message}")
    assert printed.err.count("\n") == 1


def test_two_drafters_for_one_method(bench, folders) -> None:
    _, printed = bench("--drafter", folders["eagle3"], "--drafter", folders["eagle3"], code=2)
    assert "both for eagle3, expected one" in printed.err


def test_chosen_lengths(bench, folders, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(step_costs, "cache_folder", lambda: tmp_path / "cache")
    out, _ = bench(
        "--methods", "p-eagle", "--num-draft-tokens", "auto", "--repeats", "1",
        "--drafter", folders["p-eagle"],
    )  # fmt: skip
    plain, chosen = map(json.loads, (out / "results.jsonl").read_text().splitlines())
    assert (plain["num_draft_tokens"], chosen["num_draft_tokens"]) == (0, "auto")
    assert (chosen["identical"], chosen["draft_ms"]) == (3, None)
    (kept,) = (tmp_path / "cache" / "step_costs").iterdir()
    assert len(json.loads(kept.read_text())["milliseconds"]) == 4
    assert (out / "speed.png").read_bytes().startswith(b"\x89PNG")
    assert "K chosen" not in (out / "results.md").read_text()
    assert "| auto | 1 |" in (out / "results.md").read_text()
