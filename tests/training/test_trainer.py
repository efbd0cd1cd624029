"""The loop: what interrupts it changes nothing, what goes wrong is named, devices agree."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from peagle_jax import cli
from peagle_jax.errors import InputError
from peagle_jax.training import train_config
from peagle_jax.training.answers import read_meta
from peagle_jax.training.batch import PackedBatch
from peagle_jax.training.data import DataConfig, TrainingData
from peagle_jax.training.loss import DepthSums
from peagle_jax.training.metrics_log import read_metrics
from peagle_jax.training.prefetch import Prefetch
from peagle_jax.training.step import Problem
from peagle_jax.training.trainer import Evaluation, Hooks, TrainingStopped, train
from tests.training import tiny_model

WIDTH, VOCAB, BAD = 8, 16, 15


@dataclasses.dataclass(frozen=True)
class Regression:
    """A linear map of token vectors to noise of each row's own; token BAD makes it infinite."""

    def value_and_grad(self, trained, frozen, target_params, batch, key, denominator):
        assert key.shape == batch.tokens.shape[:1]
        noise = jax.vmap(lambda one: jax.random.uniform(one, (WIDTH,)))(key)
        vectors = frozen["table"][batch.tokens]
        counted = batch.answer

        def loss_of(trained):
            out = vectors @ trained["fc"]["kernel"].T * trained["norm"]["scale"]
            loss = jnp.mean((out - vectors - 0.1 * noise[:, None]) ** 2, axis=-1)
            loss = jnp.where(batch.tokens == BAD, jnp.inf, loss)
            total = jnp.sum(jnp.where(counted, loss, 0))
            return total / denominator, total

        (loss, total), grads = jax.value_and_grad(loss_of, has_aux=True)(trained)
        count = jnp.sum(counted, dtype=jnp.float32)
        both = jnp.stack([total, 2 * total]), jnp.stack([count, count])
        return loss, DepthSums(both[0], both[1] / 2, both[1], both[1]), grads


@dataclasses.dataclass
class Stream:
    """Random rows; the batch of one number can be poisoned, or its making fail."""

    bad: int | None = None
    fails: int | None = None
    done: int = 0

    def __next__(self):
        if self.done == self.fails:
            raise RuntimeError("killed")
        rng = np.random.default_rng(self.done)
        tokens = rng.integers(0, BAD, (4, 6)).astype(np.int32)
        if self.done == self.bad:
            tokens[1, 4] = BAD
        self.done += 1
        ones = np.ones((4, 6), np.int32)
        return PackedBatch(tokens, ones, ones * np.arange(6, dtype=np.int32), ones > 0)

    def get_state(self):
        return {"done": self.done}

    def set_state(self, state):
        self.done = state["done"]


def problem():
    table = jax.random.normal(jax.random.key(0), (VOCAB, WIDTH))
    trained = {"fc": {"kernel": jnp.zeros((WIDTH, WIDTH))}, "norm": {"scale": jnp.ones(WIDTH)}}
    axes = {"fc": {"kernel": PartitionSpec("embed", None)}}
    return Problem(Regression(), trained, {"table": table}, {}, axes, {})


def config(*overrides):
    base = ["train.steps=12", "data.batch=4", "checkpoint.every=3", "train.tensorboard=false"]
    base += ["mesh.data=1", "optimizer.learning_rate=0.05", "optimizer.warmup_steps=0"]
    return train_config.load(None, [*base, *overrides])


def hooks(**changes):
    base = Hooks(export=lambda params, folder: None, documents=lambda n: [f"a.jsonl:{n}", "b:1"])
    return dataclasses.replace(base, **changes)


def losses(folder):
    return {line["step"]: line["loss"] for line in read_metrics(folder, "step")}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Losses of a run that nothing interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    summary = train(problem(), config(), folder, Stream(), hooks())
    assert (summary.step, summary.signal) == (12, None)
    return losses(folder)


def test_it_learns_and_logs_every_step(whole, tmp_path):
    assert list(whole) == list(range(1, 13))
    assert whole[12] < 0.7 * whole[1]
    exported = []
    summary = train(
        problem(),
        config("train.log_every=5"),
        tmp_path,
        Stream(),
        hooks(export=lambda params, folder: exported.append(folder)),
    )
    assert list(losses(tmp_path)) == [5, 10]
    assert losses(tmp_path)[10] == whole[10]
    assert exported == [tmp_path / "final"]
    assert summary.tokens == 12 * 24
    assert summary.loss == whole[12]
    line = read_metrics(tmp_path, "step")[0]
    assert line["loss_per_depth"] == pytest.approx([whole[5] * 16 / 24, 2 * whole[5] * 16 / 24])
    assert line["accuracy_per_depth"] == [0.5, 0.5]
    assert (line["tokens"], line["answer_tokens"]) == (24, 24)
    rate = 0.1 + 0.9 * 0.5 * (1 + np.cos(np.pi * 4 / 11))
    assert line["learning_rate"] == pytest.approx(0.05 * rate)
    assert line["tokens_per_second"] == pytest.approx(24 / line["step_seconds"])
    assert 0 <= line["data_seconds"] < summary.seconds


def test_a_run_that_failed_midway_goes_on_as_if_it_had_not(whole, tmp_path):
    with pytest.raises(RuntimeError, match="killed"):
        train(problem(), config(), tmp_path, Stream(fails=8), hooks())
    assert max(losses(tmp_path)) in (7, 8)  # past the checkpoint of step 6
    train(problem(), config(), tmp_path, Stream(), hooks())
    assert losses(tmp_path) == whole


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_ends(whole, tmp_path, number):
    def send(done, total):
        assert total == 12
        if done == 4:
            os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    summary = train(problem(), config(), tmp_path, Stream(), hooks(progress=send))
    assert signal.getsignal(number) == before
    assert summary.signal == number
    assert summary.step in (4, 5, 6)
    assert max(losses(tmp_path)) == summary.step
    resumed = train(problem(), config(), tmp_path, Stream(), hooks())
    assert (resumed.step, resumed.signal) == (12, None)
    assert losses(tmp_path) == whole


def test_a_finished_run_has_nothing_to_do_but_its_export(tmp_path):
    exported = []
    one = hooks(export=lambda params, folder: exported.append(np.asarray(params["norm"]["scale"])))
    train(problem(), config("train.steps=2"), tmp_path, Stream(), one)
    summary = train(problem(), config("train.steps=2"), tmp_path, Stream(fails=0), one)
    assert summary.step == 2
    np.testing.assert_array_equal(exported[0], exported[1])


def test_a_longer_run_goes_on_from_a_finished_one(tmp_path):
    train(problem(), config("train.steps=2"), tmp_path, Stream(), hooks())
    train(problem(), config("train.steps=4"), tmp_path, Stream(), hooks())
    assert list(losses(tmp_path)) == [1, 2, 3, 4]


def test_a_loss_that_is_not_finite_names_step_documents_and_checkpoint(tmp_path):
    with pytest.raises(TrainingStopped) as error:
        train(problem(), config(), tmp_path, Stream(bad=7), hooks())
    message = str(error.value)
    assert message.startswith("step 8: found loss inf, gradient norm ")
    assert message.endswith(
        ", expected finite numbers; the batch held a.jsonl:7, b:1; the last good checkpoint is "
        f"step 6 in {tmp_path / 'checkpoints'}"
    )
    assert max(losses(tmp_path)) == 7


def test_a_bad_state_is_never_saved(tmp_path):
    """The bad step is itself one at which a checkpoint is due."""
    with pytest.raises(TrainingStopped, match=r"step 3: .*the last good checkpoint is none"):
        train(problem(), config(), tmp_path, Stream(bad=2), hooks())


def test_the_best_drafter_is_kept_by_decoded_acceptance(tmp_path):
    lengths = iter([1.5, 1.9, 1.7, 1.9])
    exported = []

    def evaluate(params):
        return Evaluation(next(lengths), (0.5, 0.1), 0.0)

    some = hooks(evaluate=evaluate, export=lambda params, folder: exported.append(folder.name))
    overrides = ("eval.every=3", "eval.prompts=x", "checkpoint.every=100", "checkpoint.keep=1")
    summary = train(problem(), config(*overrides), tmp_path, Stream(), some)
    assert summary.best == {"step": 6, "acceptance_length": 1.9}
    assert exported == ["best", "best", "final"]
    lines = read_metrics(tmp_path, "evaluation")
    assert [(x["step"], x["acceptance_length"]) for x in lines] == [
        (3, 1.5), (6, 1.9), (9, 1.7), (12, 1.9)
    ]  # fmt: skip
    # Orbax keeps the last one and, of two equally good, the later.
    assert "12" in {path.name for path in (tmp_path / "checkpoints").iterdir()}


def test_what_was_best_before_an_interruption_stays_the_best(tmp_path):
    lengths = iter([1.9, 1.5, 1.6])
    names = []
    some = hooks(
        evaluate=lambda params: Evaluation(next(lengths), (), 0.0),
        export=lambda params, folder: names.append(folder.name),
    )
    overrides = ("eval.every=4", "eval.prompts=x")
    with pytest.raises(RuntimeError):
        train(problem(), config(*overrides), tmp_path, Stream(fails=5), some)
    summary = train(problem(), config(*overrides), tmp_path, Stream(), some)
    assert summary.best == {"step": 4, "acceptance_length": 1.9}
    assert names == ["best", "final"]


def test_a_batch_must_divide_among_the_devices(tmp_path):
    with pytest.raises(InputError, match=r"mesh: found data = 3 by fsdp = 1, expected a product"):
        train(problem(), config("mesh.data=3"), tmp_path, Stream(), hooks())


def test_prefetch_keeps_order_and_raises_in_its_place():
    made = iter(range(5))
    with Prefetch(lambda: next(made)) as results:
        assert list(results) == [0, 1, 2, 3, 4]

    def fail():
        raise ValueError("broken")

    with Prefetch(fail) as results:
        for _ in range(2):
            with pytest.raises(ValueError, match="broken"):
                next(results)


def test_prefetch_works_ahead_but_not_far():
    made = []
    with Prefetch(lambda: made.append(0) or len(made), ahead=2) as results:
        assert next(results) == 1
        deadline = time.monotonic() + 5
        while len(made) < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.05)
        assert len(made) == 4  # one given out, two waiting, one in hand


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    target = tiny_model.write_target(folder / "target")
    answers = tiny_model.write_answers(folder / "answers", target)
    (folder / "c.toml").write_text(tiny_model.CONFIG)
    options = {"--model": target, "--data": answers, "--config": folder / "c.toml"}
    return folder, [str(item) for pair in options.items() for item in pair]


def test_documents_are_named_as_batches_hold_them(inputs):
    folder, _ = inputs
    path = folder / "answers" / "answers.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    meta = read_meta(folder / "answers")
    data = TrainingData(
        [folder / "answers"],
        DataConfig(length=32, batch_size=8, num_threads=0),
        tokenizer_sha256=meta.tokenizer_sha256,
        vocab_size=meta.vocab_size,
    )
    batches = data.batches()
    for number in range(2 * data.batches_per_epoch):
        batch = next(batches)
        names = data.documents_in(number)
        for row, documents in zip(batch.tokens, batch.documents, strict=True):
            for one in range(1, documents.max(initial=0) + 1):
                where, _, line = names.pop(0).rpartition(":")
                assert where == str(path)
                found = lines[int(line) - 1]
                expected = found["prompt_ids"] + found["answer_ids"]
                assert row[documents == one].tolist() == expected
        assert names == []


MESHES = """
import json, sys
from pathlib import Path
from peagle_jax.training import train_config
from peagle_jax.training.metrics_log import read_metrics
from peagle_jax.training.run import open_run
folder, out = Path(sys.argv[1]), Path(sys.argv[2])
found = {}
for data, fsdp in ((1, 1), (2, 4)):
    config = train_config.load(
        folder / "c.toml",
        [f"mesh.data={data}", f"mesh.fsdp={fsdp}", "train.steps=3"],
        {"model": str(folder / "target"), "data.answers": (str(folder / "answers"),)},
    )
    with open_run(config, out / f"{data}-{fsdp}") as run:
        run.train()
    found[f"{data}-{fsdp}"] = [
        [line["loss"], line["grad_norm"], *line["accuracy_per_depth"]]
        for line in read_metrics(out / f"{data}-{fsdp}", "step")
    ]
print(json.dumps(found))
"""


@pytest.mark.slow
def test_eight_devices_give_the_losses_of_one(inputs, tmp_path):
    """Rows over all devices, weights over four; chains are drawn by row, not by device."""
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    done = subprocess.run(
        [sys.executable, "-c", MESHES, str(inputs[0]), str(tmp_path)],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found["1-1"]) == 3
    np.testing.assert_allclose(found["2-4"], found["1-1"], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_a_run_that_was_killed_gives_the_run_it_would_have_been(inputs, tmp_path):
    """kill -9 in a process of its own; then the same command to the end."""
    arguments = ["train", *inputs[1], "--set", "train.steps=40", "--set", "checkpoint.every=7"]
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    process = subprocess.Popen(
        [sys.executable, "-m", "peagle_jax.cli", *arguments, "--out", str(killed)],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    path = killed / "metrics.jsonl"
    while process.poll() is None:
        if path.exists() and path.read_bytes().count(b"\n") >= 17:
            os.kill(process.pid, signal.SIGKILL)
            break
        time.sleep(0.001)
    assert process.wait() == -signal.SIGKILL
    before = losses(killed)
    assert 17 <= max(before) < 40
    for out in (killed, whole):
        assert cli.main([*arguments, "--out", str(out)]) == 0
    assert list(losses(whole)) == list(range(1, 41))
    assert losses(killed) == losses(whole)
    assert before.items() <= losses(whole).items()
