"""Metrics of a batch run, scraped over HTTP."""

from __future__ import annotations

import socket
import sys
import urllib.request
from pathlib import Path

import pytest

from peagle_jax.errors import InputError
from peagle_jax.serving.batch import BatchRun
from peagle_jax.serving.batch_report import Status
from peagle_jax.serving.engine_protocol import EngineShape
from peagle_jax.serving.errors_file import ErrorsFile
from peagle_jax.serving.prometheus import MetricsServer
from peagle_jax.serving.results_file import ResultsFile
from peagle_jax.serving.scheduler import Policy
from tests.serving.test_batch import MANY, MODEL, Letters, TimedFake, parsed

# Few pages: some requests are preempted.
SHAPE = EngineShape(num_slots=3, num_pages=16, page_size=2, context=30, num_draft_tokens=2)


def scrape(server: MetricsServer) -> dict[str, float]:
    """name or name{labels} -> value."""
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=30) as response:
        text = response.read().decode()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def test_what_a_run_does_is_scraped(tmp_path: Path) -> None:
    seen: list[tuple[Status, dict[str, float]]] = []
    with (
        MetricsServer(0, "127.0.0.1") as server,
        ResultsFile(tmp_path / "out.jsonl", {}) as results,
    ):
        assert server.port > 0
        assert scrape(server) == {}
        errors = ErrorsFile(tmp_path / "bad.jsonl")
        policy = Policy(2, 8)
        batch = BatchRun(
            TimedFake(SHAPE), Letters(), MODEL, results, errors, model_name="t", policy=policy
        )

        def watch(status: Status) -> None:
            server.watch(status)
            if status.counters.visits % 7 == 1:
                seen.append((status, scrape(server)))

        report = batch.run(parsed([*MANY, {"id": "bad"}]), watch)
        last = scrape(server)
    with pytest.raises(OSError, match=r"refused|reset"):
        scrape(server)

    stats, prefix = report.stats, "peagle_spec_decode_"
    assert last["peagle_requests_answered_total"] == 60
    assert last["peagle_bad_lines_total"] == 1
    assert last["peagle_prompt_tokens_total"] == report.prompt_tokens
    assert last["peagle_generation_tokens_total"] == stats.tokens > 100
    assert last[f"{prefix}drafts_total"] == stats.num_drafts
    assert last[f"{prefix}draft_tokens_total"] == 2 * stats.num_drafts
    assert last[f"{prefix}accepted_tokens_total"] == stats.num_accepted
    for position, count in enumerate(stats.accepted_per_position):
        name = f'{prefix}accepted_tokens_per_position_total{{position="{position}"}}'
        assert last[name] == count > 0
    assert last[f"{prefix}acceptance_rate"] == stats.num_accepted / stats.num_draft_tokens
    assert last[f"{prefix}acceptance_length"] == stats.acceptance_length
    assert last["peagle_preemptions_total"] == report.counters.preemptions > 0
    assert last["peagle_steps_total"] == report.counters.steps
    assert last["peagle_wait_seconds_total"] == report.wait_seconds
    assert (last["peagle_slots"], last["peagle_cache_pages"]) == (3, 15)
    assert last["peagle_requests_running"] == last["peagle_requests_waiting"] == 0
    assert last["peagle_cache_pages_used"] == 0

    # While it ran: what was scraped is that visit's, and counters only grow.
    assert max(found["peagle_requests_running"] for _, found in seen) == 3
    assert max(found["peagle_requests_waiting"] for _, found in seen) > 1
    assert max(found["peagle_cache_pages_used"] for _, found in seen) > 10
    for status, found in seen:
        assert found["peagle_cache_pages_used"] == status.used_pages <= 15
        assert found["peagle_generation_tokens_total"] == status.stats.tokens
    totals = [found["peagle_generation_tokens_total"] for _, found in seen]
    assert totals == sorted(totals)
    assert totals[0] < totals[-1]


def test_a_registry_of_its_own() -> None:
    from prometheus_client import REGISTRY

    before = {metric.name for metric in REGISTRY.collect()}
    with MetricsServer(0, "127.0.0.1"), MetricsServer(0, "127.0.0.1"):
        assert {metric.name for metric in REGISTRY.collect()} == before
    assert not any(name.startswith("peagle_") for name in before)


def test_ports_that_cannot_be_had(monkeypatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(InputError, match=f"--metrics-port: found .* at {port}, expected a fr"):
            MetricsServer(port, "127.0.0.1")
    for port in (-1, 65536):
        with pytest.raises(InputError, match=f"--metrics-port: found {port}, expected 0 to 65535"):
            MetricsServer(port)
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(InputError, match=r"prometheus-client package, .* pip install 'peagle-jax"):
        MetricsServer(0)
