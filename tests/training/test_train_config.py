"""A run's configuration: every key checked, written back as it was read."""

from __future__ import annotations

import dataclasses

import pytest

from peagle_jax.errors import InputError
from peagle_jax.training import train_config
from peagle_jax.training.train_config import TrainConfig, check_same_run, dump, load

STEPS = ("train.steps=10",)


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture
def toml(tmp_path):
    return lambda text: write(tmp_path / "c.toml", text)


def test_defaults_need_only_the_number_of_steps():
    config = load(None, STEPS)
    assert config == TrainConfig().replaced({"train.steps": 10})
    with pytest.raises(InputError, match=r"train\.steps: found none, expected it or data\.epochs"):
        load(None)


def test_values_come_from_the_file_then_overrides_then_options(toml, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = toml(
        """
        model = "a"
        [drafter]
        aux_layer_ids = [1, 2]
        [data]
        epochs = 2
        answers = ["x"]
        [loss]
        kl = 1
        depth_weights = [1, 0.5]
        [train]
        tensorboard = false
        """
    )
    overrides = [
        "drafter.num_draft_tokens=2",
        "drafter.method = eagle3",
        "optimizer.learning_rate=2e-3",
        "drafter.init=/some where",
    ]
    config = load(path, overrides, {"model": "b"})
    assert config.model == "b"
    assert config.drafter.aux_layer_ids == (1, 2)
    assert config.drafter.num_draft_tokens == 2
    assert config.drafter.method == "eagle3"
    assert config.drafter.init == "/some where"
    assert config.optimizer.learning_rate == 2e-3
    assert config.loss.depth_weights == (1.0, 0.5)
    assert type(config.loss.kl) is float
    assert config.train.tensorboard is False
    assert config.data.answers == (str(tmp_path / "x"),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[optimizer]\nlearning_rat = 1", r"such setting, did you mean optimizer\.learning_rate\?"),
        ("[optimiser]\nname = 'adamw'", "did you mean optimizer.name?"),
        ("[zzz]\nqqq = 1", r"zzz\.qqq: found no such setting, expected one of model, drafter"),
        ("[data]\nbatch = 'four'", 'data.batch: found "four", expected an integer'),
        ("[data]\nbatch = true", "data.batch: found true, expected an integer"),
        ("[data]\nbatch = 1.0", "data.batch: found 1.0, expected an integer"),
        ("[data]\nbatch = 0", "data.batch: found 0, expected 1 or more"),
        ("[data]\nanswers = 'a'", 'data.answers: found "a", expected a list of strings'),
        ("[drafter]\naux_layer_ids = [1, 'a']", "expected a list of integers"),
        ("[drafter]\naux_layer_ids = [-1]", r"found \[-1\], expected each 0 or more"),
        ("[drafter]\nnum_draft_tokens = 33", "found 33, expected 1 to 32"),
        ("[drafter]\nmethod = 'medusa'", "expected one of 'p-eagle', 'eagle3'"),
        ("[train]\ntensorboard = 1", r"expected a boolean \(true or false\)"),
        ("[optimizer]\nlearning_rate = nan", "learning_rate: found nan, expected a number"),
        ("[optimizer]\nlearning_rate = 0", "learning_rate: found 0, expected more than 0"),
        ("[loss]\nkl = 0", "loss: found kl, ce and tv all 0"),
        ("[loss]\ndepth_weights = [1.0]", "found 1 weights, expected 6"),
        ("[eval]\nevery = 5", "eval.prompts: found none, expected a JSON Lines file"),
        ("[train\n", "found invalid TOML"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_with_its_file(toml, text, message):
    path = toml(text)
    with pytest.raises(InputError, match=message) as error:
        load(path, STEPS)
    assert str(error.value).startswith(f"{path}: ")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.steps", "--set: found 'train.steps', expected key=value"),
        ("train.step=1", "--set: train.step: found no such setting, did you mean train.steps?"),
        ("train.steps=x", '--set: train.steps: found "x", expected an integer'),
    ],
)
def test_overrides_are_checked_like_the_file(override, message):
    with pytest.raises(InputError) as error:
        load(None, [override])
    assert str(error.value) == message


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(InputError, match="No such file or directory, expected a TOML file"):
        load(tmp_path / "no.toml")


def test_what_is_written_is_read_back(toml):
    config = load(
        None,
        [
            "train.steps=10",
            "drafter.aux_layer_ids=[0, 2]",
            'drafter.init="a \\"quoted\\" \\\\ päth"',
            "loss.depth_weights=[1, 0.5, 0.25, 0.1, 1e-7, 0]",
            "optimizer.learning_rate=1e-5",
        ],
        {"data.answers": ("/a", "/b")},
    )
    assert config.optimizer.learning_rate == 1e-5
    assert load(toml(dump(config))) == config


def test_every_key_has_a_default_that_the_check_accepts(toml):
    """Defaults out of their own bounds would refuse a run's own config.toml."""
    config = load(None, STEPS)
    assert load(toml(dump(config))) == config
    assert set(config.flat()) == set(train_config._fields())
    assert set(train_config.MAY_CHANGE) <= set(config.flat())


def test_a_run_that_goes_on_may_change_its_length_and_cadence_alone(tmp_path):
    saved = load(None, STEPS)
    where = tmp_path / "config.toml"
    other = {key: 7 for key in train_config.MAY_CHANGE if key != "train.tensorboard"}
    check_same_run(saved, saved.replaced({**other, "train.tensorboard": False}), where)
    changed = saved.replaced({"optimizer.learning_rate": 0.5, "train.steps": 20})
    with pytest.raises(InputError) as error:
        check_same_run(saved, changed, where)
    assert str(error.value).startswith(
        f"{where}: optimizer.learning_rate: found 0.5, expected 0.001 as the run began with"
    )


def test_unset_values_are_filled_from_another_configuration():
    saved = load(None, ["train.steps=10", "drafter.mask_token_id=5", "train.dtype=float32"])
    now = load(None, ["train.steps=20"]).filled(saved)
    assert now.drafter.mask_token_id == 5
    assert now.train.dtype == "float32"
    assert now.train.steps == 20
    assert dataclasses.replace(now, train=saved.train) == saved
