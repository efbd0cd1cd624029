"""The metrics log over interruptions, and the report made from it."""

from __future__ import annotations

import json

import numpy as np
import pytest

from peagle_jax.errors import InputError
from peagle_jax.training import metrics_log
from peagle_jax.training.metrics_log import MetricsLog, read_metrics
from peagle_jax.training.report import smoothed, write_report


def fill(folder, resumed, steps, **options):
    with MetricsLog(folder, resumed, **options) as log:
        for step in steps:
            values = {
                "loss": 3.0 / step,
                "accuracy_per_depth": [0.5, 0.25],
                "tokens_per_second": 100.0,
            }
            log.write("step", step, values)
        log.write("evaluation", steps[-1], {"acceptance_length": 1.5, "per_position": [0.4, 0.1]})
        log.sync()


def test_lines_past_the_resumed_step_are_dropped(tmp_path):
    fill(tmp_path, 0, [1, 2, 3])
    fill(tmp_path, 2, [3, 4])
    assert [line["step"] for line in read_metrics(tmp_path, "step")] == [1, 2, 3, 4]
    assert [line["step"] for line in read_metrics(tmp_path, "evaluation")] == [4]
    fill(tmp_path, 0, [1])
    assert [line["step"] for line in read_metrics(tmp_path, "step")] == [1]


def test_a_line_that_was_cut_short_is_dropped(tmp_path):
    fill(tmp_path, 0, [1, 2])
    path = tmp_path / metrics_log.METRICS
    path.write_bytes(path.read_bytes() + b'{"kind": "step", "st')
    assert len(read_metrics(tmp_path, "step")) == 2
    fill(tmp_path, 2, [3])
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 2, 3, 3]


def test_another_file_is_refused(tmp_path):
    (tmp_path / metrics_log.METRICS).write_text('{"a": 1}\n')
    with pytest.raises(InputError, match=r"metrics\.jsonl:1: found no object with kind and step"):
        read_metrics(tmp_path, "step")


def test_tensorboard_has_a_curve_for_every_depth(tmp_path):
    fill(tmp_path, 0, [1, 2], tensorboard=True)
    (events,) = (tmp_path / metrics_log.TENSORBOARD).iterdir()
    content = events.read_bytes()
    for name in (b"step/loss", b"step/accuracy_per_depth/1", b"evaluation/per_position/0"):
        assert name in content


def test_tensorboard_that_is_not_installed_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"found no package tensorboardX, .*peagle-jax\[train\]"):
        MetricsLog(tmp_path, 0, tensorboard=True)


def test_smoothing_keeps_means_and_places():
    centres, means = smoothed([float(i) for i in range(10)], points=3)
    np.testing.assert_allclose(centres, [1.5, 5.5, 8.5])
    np.testing.assert_allclose(means, [1.5, 5.5, 8.5])
    assert [len(x) for x in smoothed([], points=3)] == [0, 0]


def test_the_report_shows_the_last_figures(tmp_path):
    fill(tmp_path, 0, list(range(1, 31)))
    png, page = write_report(tmp_path, "run <1>")
    assert png.read_bytes().startswith(b"\x89PNG")
    text = page.read_text(encoding="utf-8")
    assert "Step 30: loss 0.1000, accuracy by depth 0.50 0.25, 100 tokens/s." in text
    assert "<td>30</td><td>1.500</td><td>0.40 0.10</td>" in text
    assert "run &lt;1&gt;" in text


def test_a_report_of_a_run_that_measured_nothing(tmp_path):
    png, _ = write_report(tmp_path, "empty")
    assert png.stat().st_size > 1000
