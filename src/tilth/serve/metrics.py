"""Metrics of a server for Prometheus (library prometheus-client)."""

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from tilth.engines.client import EngineClient

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class ServerMetrics:
    """Counts of one server, in a registry of its own."""

    def __init__(self, room: EngineClient) -> None:
        self.registry, self._room = CollectorRegistry(), room
        kinds: dict[str, Any] = {"registry": self.registry}
        self.requests = Counter("tilth_requests", "HTTP requests that were answered", ["path", "status"], **kinds)
        self.prompt_tokens = Counter("tilth_prompt_tokens", "tokens of prompts", **kinds)
        self.completion_tokens = Counter("tilth_completion_tokens", "tokens of completions", **kinds)
        self.first_token = Histogram(
            "tilth_first_token_seconds", "seconds to the first token", buckets=SECONDS, **kinds
        )
        self.duration = Histogram("tilth_request_seconds", "seconds of a request", buckets=SECONDS, **kinds)
        self.registry.register(self)

    def collect(self) -> Iterator[Any]:
        """Yield counts of the engine client and of its engine."""
        room = self._room
        yield GaugeMetricFamily("tilth_requests_in_flight", "requests in flight", room.load)
        yield CounterMetricFamily("tilth_worker_restarts", "times that the worker was started again", room.restarts)
        for name, value in room.status().items():
            yield GaugeMetricFamily(f"tilth_engine_{name}", f"engine: {name.replace('_', ' ')}", value)

    def page(self) -> bytes:
        """Return all of them in Prometheus's text format."""
        return generate_latest(self.registry)
