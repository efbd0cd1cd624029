"""`peagle train` end to end on a tiny target: what it writes, refuses, and how it goes on."""

from __future__ import annotations

import json
import shutil
import signal

import numpy as np
import pytest

from peagle_jax import cli
from peagle_jax.config import DrafterConfig
from peagle_jax.convert.checkpoint import load_drafter, load_target
from peagle_jax.training import train_config
from peagle_jax.training.checkpoints import CheckpointError
from peagle_jax.training.metrics_log import read_metrics
from peagle_jax.training.trainer import Summary, TrainingStopped
from tests.training import tiny_model

EVALUATED = ("eval.every=6", "eval.num_prompts=4", "eval.max_new_tokens=8", "eval.batch_size=4")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    target = tiny_model.write_target(folder / "target")
    tiny_model.write_answers(folder / "answers", target)
    tiny_model.write_prompts(folder / "prompts.jsonl")
    (folder / "c.toml").write_text(tiny_model.CONFIG)
    return folder


@pytest.fixture
def train(inputs):
    def call(out, *overrides, config=True, options=()):
        argv = ["train", "--out", str(out), *options]
        if config:
            argv += ["--config", str(inputs / "c.toml"), "--model", str(inputs / "target")]
            argv += ["--data", str(inputs / "answers")]
        for override in overrides:
            argv += ["--set", override]
        return cli.main(argv)

    return call


@pytest.fixture(scope="module")
def p_eagle(inputs, tmp_path_factory):
    """A finished run, with its evaluations."""
    out = tmp_path_factory.mktemp("runs") / "p-eagle"
    argv = ["train", "--out", str(out), "--config", str(inputs / "c.toml"), "--json"]
    argv += ["--model", str(inputs / "target"), "--data", str(inputs / "answers")]
    for override in (*EVALUATED, f"eval.prompts={inputs / 'prompts.jsonl'}", "train.steps=18"):
        argv += ["--set", override]
    assert cli.main(argv) == 0
    return out


def test_a_run_leaves_config_metrics_report_and_drafters(p_eagle):
    names = {path.name for path in p_eagle.iterdir()}
    assert {"config.toml", "initial", "checkpoints", "metrics.jsonl", "best", "final"} <= names
    assert {"report.png", "report.html"} <= names
    lines = read_metrics(p_eagle, "step")
    assert [line["step"] for line in lines] == list(range(1, 19))
    assert lines[-1]["loss"] < 0.8 * lines[0]["loss"]
    evaluations = read_metrics(p_eagle, "evaluation")
    assert [line["step"] for line in evaluations] == [6, 12, 18]
    assert all(len(line["per_position"]) == 3 for line in evaluations)
    assert {"18"} <= {path.name for path in (p_eagle / "checkpoints").iterdir()}


def test_every_choice_is_written_out(p_eagle, inputs):
    config = train_config.load(p_eagle / "config.toml")
    assert config.drafter.method == "p-eagle"
    assert config.drafter.mask_token_id == tiny_model.MASK
    assert config.drafter.aux_layer_ids == (1, 2)
    assert config.drafter.num_heads == 4
    assert config.train.embedding == "mask_row"
    assert config.train.dtype == "float32"
    assert config.data.answers == (str(inputs / "answers"),)


def test_drafters_load_and_differ_from_the_first(p_eagle, inputs):
    target, _ = load_target(inputs / "target")
    first, began = load_drafter(p_eagle / "initial", target)
    final, ended = load_drafter(p_eagle / "final", target)
    assert isinstance(final, DrafterConfig)
    assert (first.own_embedding, final.own_embedding) == (False, True)
    assert final.trained_num_draft_tokens == 3
    assert final.draft_vocab_size == 40
    assert tiny_model.EOS in ended["draft_to_target"]
    assert tiny_model.MASK not in ended["draft_to_target"]
    np.testing.assert_array_equal(began["draft_to_target"], ended["draft_to_target"])
    for name in ("mask_hidden", "norm"):
        change = np.abs(np.asarray(_leaf(began[name])) - np.asarray(_leaf(ended[name])))
        assert change.max() > 1e-3
    # Of the embedding the mask token's row alone was trained.
    _, params = load_target(inputs / "target")
    rows = np.any(
        np.asarray(ended["embed_tokens"]["embedding"] != params["embed_tokens"]["embedding"]), 1
    )
    assert np.flatnonzero(rows).tolist() == [tiny_model.MASK]


def _leaf(tree):
    return tree["scale"] if isinstance(tree, dict) else tree


def test_the_first_drafter_has_the_target_s_norm_head_and_last_feature(p_eagle, inputs):
    _, params = load_target(inputs / "target")
    _, first = load_drafter(p_eagle / "initial")
    np.testing.assert_array_equal(first["norm"]["scale"], params["norm"]["scale"])
    np.testing.assert_array_equal(
        first["lm_head"]["kernel"], params["embed_tokens"]["embedding"][first["draft_to_target"]]
    )
    kernel = np.asarray(first["fc"]["kernel"])
    np.testing.assert_array_equal(kernel, np.eye(32, 64, 32))


def test_the_run_s_folder_is_a_drafter(p_eagle, inputs, tmp_path, capsys):
    assert cli.main(["convert", str(p_eagle), str(tmp_path / "out"), "--to", "vllm"]) == 0
    assert load_drafter(tmp_path / "out")[0] == load_drafter(p_eagle / "best")[0]
    prompt = ["--prompts", str(inputs / "prompts.jsonl"), "--max-new-tokens", "8", "--json"]
    model = ["--model", str(inputs / "target"), "--drafter", str(p_eagle)]
    capsys.readouterr()
    assert cli.main(["generate", *prompt, *model, "--num-draft-tokens", "3"]) == 0
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(answers) == 6
    assert all(len(answer["accepted_per_position"]) == 3 for answer in answers)


def test_a_finished_run_says_so_again(p_eagle, train, capsys):
    assert train(p_eagle, config=False, options=["--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    best = max(read_metrics(p_eagle, "evaluation"), key=lambda line: line["acceptance_length"])
    assert found["step"] == found["steps"] == 18
    assert found["best"] == {k: best[k] for k in ("step", "acceptance_length")}


def test_a_run_may_be_made_longer_and_nothing_else(p_eagle, inputs, train, tmp_path, capsys):
    out = tmp_path / "run"
    shutil.copytree(p_eagle, out)
    assert train(out, "optimizer.learning_rate=0.5", config=False) == 2
    assert (
        "optimizer.learning_rate: found 0.5, expected 0.01 as the run began with"
        in capsys.readouterr().err
    )
    assert train(out, "drafter.num_layers=2", config=False) == 2
    assert "drafter.num_layers: found 2, expected 1" in capsys.readouterr().err
    assert train(out, "train.steps=20", config=False) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("step 20 of 20, loss ")
    assert "60 documents, " in captured.err
    assert "drafter, " in captured.err
    assert [line["step"] for line in read_metrics(out, "step")] == list(range(1, 21))


def test_eagle3_trains_too(train, tmp_path):
    out = tmp_path / "run"
    options = ("drafter.method=eagle3", "train.steps=10", "train.remat=true", "loss.tv=0.5")
    assert train(out, *options, "train.head=frozen", "optimizer.name=muon") == 0
    lines = read_metrics(out, "step")
    assert lines[-1]["loss"] < lines[0]["loss"]
    config, params = load_drafter(out)
    assert not config.parallel
    assert not config.own_embedding
    _, first = load_drafter(out / "initial")
    np.testing.assert_array_equal(params["lm_head"]["kernel"], first["lm_head"]["kernel"])


def test_training_goes_on_from_a_drafter(p_eagle, train, tmp_path, capsys):
    init = f"drafter.init={p_eagle}"
    with_vocabulary = ("drafter.draft_vocab_size=41", init)
    assert train(tmp_path / "a", *with_vocabulary) == 2
    assert "drafter.draft_vocab_size: found 40 in the drafter to go on from, expected 41" in (
        capsys.readouterr().err
    )
    out = tmp_path / "b"
    assert train(out, init, "train.steps=2", "train.segments=2") == 0
    before, began = load_drafter(p_eagle)
    _, first = load_drafter(out / "initial")
    np.testing.assert_array_equal(first["mask_hidden"], began["mask_hidden"])
    assert before.own_embedding
    last = read_metrics(p_eagle, "step")[0]["loss"]
    assert read_metrics(out, "step")[0]["loss"] < last


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.stps=1"], "--set: train.stps: found no such setting, did you mean train.steps?"),
        (["drafter.mask_token_id=5"], "mask token id: found 5 "),
        (["drafter.aux_layer_ids=[2, 9]"], "found [2, 9], expected rising ids of 0 to 4"),
        (["train.segments=3"], "length of a row: found 32, expected a multiple of segments = 3"),
        (["train.remat=true"], "train.remat: found true, expected false for p-eagle"),
        (["drafter.method=eagle3", "train.segments=2"], "train.segments: found 2, expected 1"),
        (["drafter.init=nowhere"], "drafter.init: found 'nowhere', expected 'target', 'random'"),
        (["drafter.init=random", "train.head=frozen"], "train.head: found frozen, expected all"),
        (["drafter.draft_vocab_size=64000"], "draft_vocab_size: found 64000, expected 1 to 64"),
        (["mesh.data=2", "mesh.fsdp=2"], "mesh: found data = 2 by fsdp = 2, expected a product"),
        (["data.length=12", "data.overlong=error"], "tokens, expected at most 12"),
        (["eval.every=1", "eval.prompts=none.jsonl"], "none.jsonl: No such file or directory"),
    ],
)
def test_bad_input_is_refused_in_one_line(train, tmp_path, capsys, overrides, message):
    out = tmp_path / "run"
    assert train(out, *overrides) == 2
    error = capsys.readouterr().err
    assert message in error.splitlines()[-1]
    assert "Traceback" not in error
    assert not out.exists()


def test_several_processes_are_refused(train, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("jax.process_count", lambda: 4)
    assert train(tmp_path / "run") == 2
    assert "train: found 4 processes, expected one" in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "run").exists()


def test_another_folder_is_not_written_to(train, tmp_path, capsys):
    (tmp_path / "letter.txt").write_text("dear")
    assert train(tmp_path) == 2
    assert "found files and no config.toml, expected a new folder or a run's" in (
        capsys.readouterr().err
    )
    assert [path.name for path in tmp_path.iterdir()] == ["letter.txt"]


@pytest.mark.parametrize(
    ("result", "code", "message"),
    [
        (Summary(3, 12, signal=signal.SIGTERM), 143, "the same command goes on from step 3"),
        (Summary(3, 12, signal=signal.SIGINT), 130, "ended by signal 2"),
        (CheckpointError("/r: No space left on device"), 1, "error: /r: No space left on device"),
        (TrainingStopped("step 3: found loss nan"), 1, "error: step 3: found loss nan"),
    ],
)
def test_how_training_ended_is_the_exit_code(
    train, p_eagle, monkeypatch, capsys, result, code, message
):
    def ended(self, progress):
        if isinstance(result, Exception):
            raise result
        return result

    monkeypatch.setattr("peagle_jax.training.run.Run.train", ended)
    assert train(p_eagle, config=False) == code
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_a_loss_that_is_not_finite_exits_1(train, tmp_path, capsys):
    assert train(tmp_path / "run", "optimizer.learning_rate=1e30", "optimizer.clip_norm=1e30") == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("peagle: error: step ")
    assert "the batch held " in error
    assert "answers.jsonl:" in error
    assert "the last good checkpoint is " in error


def test_a_few_answers_are_learnt_by_heart(inputs, tmp_path, capsys):
    """Distilled, trained on and decoded: nearly every step then yields K + 1 tokens."""
    prompts, answers, run = (tmp_path / name for name in ("p.jsonl", "answers", "run"))
    lines = [json.dumps({"token_ids": [3 + i, 9 + 5 * i, 40 - 7 * i]}) for i in range(4)]
    prompts.write_text("\n".join(lines))
    model = ["--model", str(inputs / "target")]
    asked = ["--prompts", str(prompts), "--max-new-tokens", "25"]
    assert cli.main(["distill", *model, *asked, "--out", str(answers)]) == 0
    settings = ["train.steps=300", "data.epochs=300", "data.batch=4", "drafter.draft_vocab_size=64"]
    settings += ["checkpoint.every=1000"]
    overrides = [part for one in settings for part in ("--set", one)]
    config = ["--config", str(inputs / "c.toml"), "--data", str(answers), "--out", str(run)]
    assert cli.main(["train", *model, *config, *overrides]) == 0
    lengths = []
    for drafter in (run / "initial", run):
        capsys.readouterr()
        options = ["--drafter", str(drafter), "--num-draft-tokens", "3", "--json"]
        assert cli.main(["eval", *model, *asked, *options]) == 0
        (result,) = json.loads(capsys.readouterr().out)["results"]
        lengths.append(result["acceptance_length"])
    before, after = lengths
    assert before < 2
    assert after > 3.6
