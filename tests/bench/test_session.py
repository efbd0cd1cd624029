"""Interleaving, failing peers and what a result line says, with engines that only pretend."""

from __future__ import annotations

import pytest

from peagle_jax.bench import report, session
from peagle_jax.bench.cases import OWN, Case, Parts, Run, make_cases
from peagle_jax.bench.session import EngineError
from peagle_jax.commands import bench_output
from peagle_jax.errors import InputError

PLAIN = Case(OWN, "none", 0, 1)
DRAFTED = Case(OWN, "p-eagle", 3, 1)
PEER = Case("vllm", "none", 0, 1)


class Fake:
    """Answers two prompts; the n-th run takes the n-th of `seconds`."""

    def __init__(self, seconds: dict[Case, list[float]], calls: list[str], answer=(5, 6, 7)):
        self.seconds = {case: iter(times) for case, times in seconds.items()}
        self.calls, self.answer = calls, list(answer)

    def prepare(self, case):
        self.calls.append(f"prepare {case.method} {case.peer}")
        return 2.5

    def run(self, case):
        self.calls.append(f"run {case.method} {case.peer}")
        drafts = 4 if case.num_draft_tokens else 0
        accepted = (3, 1, 0) if drafts else ()
        seconds = next(self.seconds[case])
        return Run([self.answer, [8, 9, 3]], seconds, drafts, accepted, 5, seconds / 2)

    def parts(self, case):
        self.calls.append(f"parts {case.method} {case.peer}")
        return Parts(10.0 if case.num_draft_tokens else 0.0, 40.0)


def measured(calls, answer=(5, 6, 7)):
    own = Fake({PLAIN: [2.0, 1.0, 4.0], DRAFTED: [1.0, 1.0, 1.0]}, calls)
    peer = Fake({PEER: [3.0, 3.0, 3.0]}, calls, answer)
    engines = {OWN: own, "vllm": peer}
    return session.result_lines(session.measure(engines, [PLAIN, DRAFTED, PEER], 3))


def test_repeats_are_interleaved() -> None:
    calls: list[str] = []
    measured(calls)
    names = ["none peagle_jax", "p-eagle peagle_jax", "none vllm"]
    assert calls == [
        *(f"prepare {name}" for name in names),
        *(f"run {name}" for name in names),
        *(f"run {name}" for name in reversed(names)),
        *(f"run {name}" for name in names),
        *(f"parts {name}" for name in names),
    ]


def test_a_line_holds_medians() -> None:
    plain, drafted, peer = measured([])
    assert plain["tokens_per_second"] == 6 / 2.0
    assert plain["speedup"] == 1.0
    assert plain["acceptance_length"] is None
    assert drafted["tokens_per_second_repeats"] == [6.0, 6.0, 6.0]
    assert drafted["speedup"] == 2.0  # the median of 2, 1 and 4, not 6 over the median 3
    assert drafted["acceptance_length"] == 2.0
    assert drafted["acceptance_per_position"] == [0.75, 0.25, 0.0]
    assert drafted["step_ms"] == pytest.approx(1e3 * 0.5 / 5)
    assert drafted["other_ms"] == pytest.approx(100.0 - 10.0 - 40.0)
    assert drafted["compile_seconds"] == 2.5
    assert [line["identical"] for line in (plain, drafted, peer)] == [2, 2, 2]


def test_another_answer_is_marked() -> None:
    peer = measured([], answer=(5, 6, 4))[2]
    assert peer["identical"] == 1
    assert report.cells(peer)[-1] == "**1 of 2**"


def test_a_peer_that_fails_does_not_end_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    calls: list[str] = []
    own = Fake({PLAIN: [1.0]}, calls)

    class Broken(Fake):
        def run(self, case):
            raise EngineError("vllm: no memory")

    engines = {OWN: own, "vllm": Broken({}, calls)}
    plain, peer = session.result_lines(session.measure(engines, [PLAIN, PEER], 1))
    assert plain["identical"] == 2
    assert peer == {
        "method": "none",
        "peer": "vllm",
        "num_draft_tokens": 0,
        "batch": 1,
        "error": "vllm: no memory",
    }
    assert "failed: vllm: no memory" in report.cells(peer)
    assert not any("parts none vllm" in call for call in calls)
    bench_output.print_table([plain, {**peer, "method": "p-eagle", "num_draft_tokens": 3}])
    shown = capsys.readouterr().out.splitlines()
    assert shown[-1] == "vllm p-eagle K = 3, batch 1: failed: vllm: no memory"
    assert " failed " in shown[-3]


def test_cases() -> None:
    cases = make_cases(["p-eagle", "prompt-lookup"], [1, 5], [4], ["transformers"])
    assert [case.name for case in cases] == [
        "peagle_jax none batch 4",
        "peagle_jax p-eagle K=1 batch 4",
        "peagle_jax p-eagle K=5 batch 4",
        "peagle_jax prompt-lookup K=1 batch 4",
        "peagle_jax prompt-lookup K=5 batch 4",
        "transformers prompt-lookup K=1 batch 4",
        "transformers prompt-lookup K=5 batch 4",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((["medusa"], [1], [1]), "--methods: found 'medusa'"),
        ((["none"], [0], [1]), "num_draft_tokens: found 0"),
        ((["none"], [1], [0]), "--batch: found 0"),
        ((["none"], [1], [1], ["sglang"]), "--peers: found 'sglang'"),
    ],
)
def test_bad_cases(arguments, message) -> None:
    with pytest.raises(InputError, match=message):
        make_cases(*arguments)
