"""Where time went, from traces: one made by hand, and one of a run."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import jax
import pytest

from peagle_jax.config import SamplingParams
from peagle_jax.errors import InputError
from peagle_jax.serving import engine as engine_module
from peagle_jax.serving.batch import BatchRun
from peagle_jax.serving.batch_report import Status
from peagle_jax.serving.engine import PagedEngine, make_shape
from peagle_jax.serving.errors_file import ErrorsFile
from peagle_jax.serving.profile import Profiler, ProfileReport
from peagle_jax.serving.requests_file import read_requests
from peagle_jax.serving.results_file import ResultsFile
from peagle_jax.serving.scheduler import Policy
from peagle_jax.serving.trace_times import OTHER, Program, device_times, read_program
from tests.decoding import tiny
from tests.serving.test_batch import lines
from tests.training.dense_reference import QUICK

HLO = """HloModule jit_step, is_scheduled=true

%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %fusion.1 = f32[8]{0:T(128)} fusion(%p), metadata={op_name="jit(step)/while/body/draft/dot"}
  %cond.2 = (s32[], f32[8]{0}) conditional(%a), metadata={op_name="jit(step)/while/body/draft/c"}
  ROOT %dot.7 = f32[8]{0} dot(%fusion.1), metadata={op_name="jit(step)/while/body/verify/dot"}
}
ENTRY %main {
  copy.3 = f32[8]{0} copy(%arg)
  %while.4 = (s32[], f32[8]{0}) while((s32[], f32[8]{0}) %t), body=%body
}
"""
# An operation of 30 ns and one of 10 in a loop, 20 of a prefill, 5 that no program has; the
# device rests from 90 to 100. Picoseconds; times are relative to the line's.
TPU = """
planes { name: "/device:TPU:0"
  lines { name: "XLA Modules" timestamp_ns: 1000
    events { metadata_id: 1 offset_ps: 0 duration_ps: 60000 }
    events { metadata_id: 2 offset_ps: 100000 duration_ps: 25000 } }
  lines { name: "XLA Ops" timestamp_ns: 1000
    events { metadata_id: 3 offset_ps: 0 duration_ps: 60000 }
    events { metadata_id: 4 offset_ps: 0 duration_ps: 30000 }
    events { metadata_id: 5 offset_ps: 30000 duration_ps: 10000 }
    events { metadata_id: 6 offset_ps: 100000 duration_ps: 20000 }
    events { metadata_id: 7 offset_ps: 120000 duration_ps: 5000 } }
  event_metadata { key: 1 value { id: 1 name: "jit_step(77)" } }
  event_metadata { key: 2 value { id: 2 name: "jit_prefill(78)" } }
  event_metadata { key: 3 value { id: 3 name: "%while.4 = (s32[]) while(%t)" } }
  event_metadata { key: 4 value { id: 4 name: "%dot.7 = f32[8]{0} dot(%fusion.1)" } }
  event_metadata { key: 5 value { id: 5 name: "%fusion.1 = f32[8]{0} fusion(%p)" } }
  event_metadata { key: 6 value { id: 6 name: "%fusion.1 = f32[8]{0} fusion(%q)" } }
  event_metadata { key: 7 value { id: 7 name: "%unknown.9 = f32[8]{0} copy(%q)" } }
}
planes { name: "/host:CPU" lines { name: "python" events { metadata_id: 1 duration_ps: 9 } }
  event_metadata { key: 1 value { id: 1 name: "Wait" } } }
"""


def test_scopes_of_a_program() -> None:
    program = read_program(HLO)
    assert program.module == "jit_step"
    assert program.scopes == {
        "fusion.1": "draft",
        "cond.2": None,
        "dot.7": "verify",
        "copy.3": OTHER,
        "while.4": None,
    }


def test_times_of_a_trace() -> None:
    from jax.profiler import ProfileData

    # Of two programs of a name it is the one that has the operations.
    programs = [
        Program("jit_step", {"dot.1": "draft"}),
        read_program(HLO),
        Program("jit_prefill", {"fusion.1": "prefill"}),
    ]
    times = device_times(ProfileData.from_text_proto(TPU), programs)
    assert times is not None
    assert times.busy == pytest.approx(65e-9)
    assert times.scopes == pytest.approx({"verify": 30e-9, "draft": 10e-9, "prefill": 25e-9})
    # Two devices that do the same take as long as one.
    second = TPU[: TPU.index('planes { name: "/host')].replace("TPU:0", "TPU:1")
    both = device_times(ProfileData.from_text_proto(TPU + second), programs)
    assert both == times
    host = "planes {" + TPU.rpartition("planes {")[2]
    assert device_times(ProfileData.from_text_proto(host), programs) is None


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled(programs: dict[Any, Any], key: Any, lower: Any) -> tuple[Any, float]:
        begin = time.perf_counter()
        if key not in programs:
            programs[key] = lower().compile(compiler_options=QUICK)
            return programs[key], time.perf_counter() - begin
        return programs[key], 0.0

    monkeypatch.setattr(engine_module, "compiled", compiled)


def test_a_run_is_traced(tmp_path: Path, quick) -> None:
    models = tiny.make(draft_vocab_size=16, max_positions=32)
    speculator = models.speculator("p-eagle", 3)
    shape = make_shape(
        speculator, num_slots=2, page_size=8, context=24, num_pages=None, cache_bytes=1 << 20
    )
    executables: dict[Any, Any] = {}
    engine = PagedEngine(speculator, models.params("p-eagle"), shape, executables=executables)
    values = [{"token_ids": [3, 4, 5], "max_new_tokens": 6, "ignore_eos": True}] * 24
    seen: list[Status] = []
    with (
        ResultsFile(tmp_path / "out.jsonl", {}) as results,
        Profiler(tmp_path / "traces", executables, visits=8) as profiler,
    ):

        def watch(status: Status) -> None:
            seen.append(status)
            profiler.watch(status)

        errors = ErrorsFile(tmp_path / "bad.jsonl")
        batch = BatchRun(
            engine, None, models.target, results, errors, model_name="t", policy=Policy(1, 32)
        )
        batch.run(read_requests(lines(values), SamplingParams()), watch)
        assert len(seen) > 20
        report = profiler.report()
        assert profiler.report() == report
    assert isinstance(report, ProfileReport)
    assert report.visits == 8
    assert 0 < report.seconds < 60
    # Written by hand in the source, and still there after the compiler.
    programs = {key[0]: read_program(one.as_text()) for key, one in executables.items()}
    assert {name: one.module for name, one in programs.items()} == {
        name: f"jit_{name}" for name in ("prefill", "insert", "step", "free")
    }
    for name, expected in (
        ("prefill", {"prefill"}),
        ("insert", {"insert"}),
        ("step", {"draft", "verify", "commit"}),
    ):
        found = {scope for scope in programs[name].scopes.values() if scope is not None}
        assert found - {OTHER} == expected
    assert report.split.keys() >= {"prefill", "draft", "verify", "host"}
    assert all(0 <= share <= 1 for share in report.split.values())
    assert sum(report.split.values()) == pytest.approx(1)
    assert Path(report.trace).is_file()
    assert report.lines()[0].startswith("profile      8 visits in ")
    assert report.to_json()["split"] == report.split

    class Unreadable:
        def as_text(self) -> str:
            raise jax.errors.JaxRuntimeError("RET_CHECK failure")

    executables["other"] = Unreadable()
    without = profiler.report()
    assert without is not None
    assert (without.trace, without.split) == (report.trace, {})


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"--profile: found .*, expected a folder to write to"):
        Profiler(tmp_path / "file", {})
    assert Profiler(tmp_path / "new", {}).report() is None
