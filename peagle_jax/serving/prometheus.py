"""What a batch run has done, for Prometheus: a registry of its own, served over HTTP."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

from peagle_jax.errors import InputError
from peagle_jax.serving.batch_report import Status

PREFIX = "peagle_"
ADDRESS = "0.0.0.0"  # a scraper is on another machine, as a rule

# Name, help, value. Counters get `_total` appended by the format.
_COUNTERS: tuple[tuple[str, str, Callable[[Status], float]], ...] = (
    ("spec_decode_drafts", "Verifications that had drafts", lambda s: s.stats.num_drafts),
    ("spec_decode_draft_tokens", "Drafted tokens", lambda s: s.stats.num_draft_tokens),
    ("spec_decode_accepted_tokens", "Drafted tokens accepted", lambda s: s.stats.num_accepted),
    ("prompt_tokens", "Tokens of answered prompts", lambda s: s.prompt_tokens),
    ("generation_tokens", "Tokens of answers", lambda s: s.stats.tokens),
    ("requests_answered", "Requests answered by this process", lambda s: s.answered),
    ("requests_skipped", "Requests answered before this process", lambda s: s.skipped),
    ("bad_lines", "Input lines that are no requests", lambda s: s.bad_lines),
    ("steps", "Speculative steps asked of the device", lambda s: s.counters.steps),
    ("prefill_tokens", "Prompt tokens computed", lambda s: s.counters.prefill_tokens),
    ("preemptions", "Requests that gave their pages up", lambda s: s.counters.preemptions),
    ("recomputed_tokens", "Tokens computed again", lambda s: s.counters.recomputed_tokens),
    ("wait_seconds", "Time the host waited for the device", lambda s: s.wait_seconds),
    ("compile_seconds", "Time compiling has taken", lambda s: s.stats.compile_seconds),
)
_GAUGES: tuple[tuple[str, str, Callable[[Status], float]], ...] = (
    (
        "spec_decode_acceptance_rate",
        "Share of drafted tokens that were accepted",
        lambda s: s.stats.num_accepted / max(1, s.stats.num_draft_tokens),
    ),
    (
        "spec_decode_acceptance_length",
        "Tokens a verification yields on average",
        lambda s: s.stats.acceptance_length,
    ),
    ("requests_running", "Requests in a slot", lambda s: s.running),
    ("requests_waiting", "Requests read and without a slot", lambda s: s.waiting),
    ("slots", "Requests that can run at a time", lambda s: s.slots),
    ("cache_pages_used", "Pages of the cache that hold tokens", lambda s: s.used_pages),
    ("cache_pages", "Pages of the cache", lambda s: s.pages),
)


class MetricsServer:
    """Answers `GET /metrics` from a thread; a context manager.

    Attributes:
        port: the port that is listened on.
    """

    def __init__(self, port: int, address: str = ADDRESS) -> None:
        """`port` 0 takes a free one.

        Raises InputError where the prometheus-client package is missing, or the port cannot
        be had.
        """
        if not 0 <= port < 2**16:
            raise InputError(f"--metrics-port: found {port}, expected 0 to {2**16 - 1}")
        try:
            import prometheus_client
        except ImportError:
            raise InputError(
                "--metrics-port: found no prometheus-client package, expected it from "
                "pip install 'peagle-jax[serve]'"
            ) from None
        self._status: Status | None = None
        registry = prometheus_client.CollectorRegistry(auto_describe=False)
        registry.register(self)  # all that is asked for is `collect`
        try:
            self._server, self._thread = prometheus_client.start_http_server(
                port, addr=address, registry=registry
            )
        except OSError as error:
            raise InputError(
                f"--metrics-port: found {error.strerror} at {port}, expected a free port"
            ) from None
        self.port: int = self._server.server_port

    def watch(self, status: Status) -> None:
        """Takes the figures that are given out from now on."""
        self._status = status

    def collect(self) -> Iterator[Any]:
        """The metrics, as prometheus-client asks for them; none before the first visit."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        status = self._status  # the run may set another one meanwhile
        if status is None:
            return
        for name, text, value in _COUNTERS:
            yield CounterMetricFamily(PREFIX + name, text, value=value(status))
        for name, text, value in _GAUGES:
            yield GaugeMetricFamily(PREFIX + name, text, value=value(status))
        accepted = CounterMetricFamily(
            f"{PREFIX}spec_decode_accepted_tokens_per_position",
            "Drafted tokens accepted at each position, from 0",
            labels=["position"],
        )
        for position, count in enumerate(status.stats.accepted_per_position):
            accepted.add_metric([str(position)], count)
        yield accepted

    def close(self) -> None:
        """Stops answering."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> MetricsServer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
