"""The newest metrics of a run for Prometheus: ``http://127.0.0.1:PORT/metrics`` while it goes on (``run.prometheus``).

Read by the server that asks, so a step costs a few dictionary entries; nothing outside this machine can connect.
"""

import importlib.util
from collections.abc import Iterator
from typing import Any

from tilth.core.errors import RecipeError
from tilth.flows.callbacks import Callback, RunView
from tilth.runs.metrics import KEYS, METRICS, MetricSpec, declaration

HOST = "127.0.0.1"
"""Loopback alone: metrics tell of the data, and the endpoint asks nobody who they are."""
POSITION = {
    "step": MetricSpec("step", "steps", "last", "the newest committed step"),
    "seconds": MetricSpec("seconds", "s", "last", "run time until then"),
}
"""Fields of a record that say how far it is, as metrics."""
OF_ONE_STEP = "time/"
"""Parts of a step: a phase that a step did not have took no time in it, so the value of an earlier one is void."""
_WORDS = {"s": "seconds", "bytes": "bytes"}
"""Units that Prometheus wants at the end of a name."""


def exposed(metric: MetricSpec) -> str:
    """The metric's name in Prometheus: ``memory/rss`` in bytes is tilth_memory_rss_bytes; a family ``time/*`` is
    tilth_time_seconds, whose label ``name`` says which. A family beside a metric of the same name ends in _by_name."""
    name = metric.name.removesuffix("/*")
    by_name = ["by_name"] if name != metric.name and name in METRICS else []
    unit = _WORDS.get(metric.unit, "")
    return "_".join(["tilth", *name.split("/"), *([unit] if unit and unit not in name else []), *by_name])


class Endpoint(Callback):
    """The newest values of a run, to be fetched; of a metric that not every step measures, the last one, but
    where the time went is told of the newest step alone."""

    def __init__(self, port: int) -> None:
        """Take the port. RecipeError: it cannot be had, or prometheus_client is not installed."""
        if importlib.util.find_spec("prometheus_client") is None:
            raise RecipeError(
                f"run.prometheus = {port} needs prometheus_client, which is not installed; in Tilth's folder: "
                "pip install '.[prometheus]'",
                key="run.prometheus.library",
            )
        from prometheus_client import CollectorRegistry, start_http_server

        self._run = ""
        self._newest: dict[str, tuple[str, float]] = {}
        registry = CollectorRegistry()
        registry.register(self)
        try:
            self._server, self._thread = start_http_server(port, HOST, registry)
        except OSError as error:
            raise RecipeError(
                f"run.prometheus = {port}: {HOST}:{port} cannot be had ({error.strerror or error}); choose another "
                "port, or 0 for none",
                key="run.prometheus",
            ) from error

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._server.server_port)

    # ---- what is observed ----

    def on_run_start(self, run: RunView) -> None:
        """Take the folder's name as the label ``run``."""
        self._run = run.directory.path.name
        run.say(f"metrics for Prometheus: http://{HOST}:{self.port}/metrics")

    def on_step_end(self, run: RunView, step: int, metrics: dict[str, Any]) -> None:
        """Show the step's numbers. One that is not finite is shown as it is: an old one in its place would lie."""
        fresh = {
            name: (str(metrics.get("phase", "")), float(value))
            for name, value in metrics.items()
            if (name not in KEYS or name in POSITION) and isinstance(value, (int, float))
        }
        kept = {name: value for name, value in self._newest.items() if not name.startswith(OF_ONE_STEP)}
        self._newest = kept | fresh  # another dictionary: a request may be reading this one

    def close(self, failed: bool) -> None:
        """Give the port back."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    # ---- what is asked for ----

    def collect(self) -> Iterator[Any]:
        """One gauge for each metric, as prometheus_client wants them of a collector."""
        from prometheus_client.core import GaugeMetricFamily

        gauges: dict[str, Any] = {}
        for name, (phase, value) in self._newest.items():
            metric = POSITION.get(name) or declaration(name)
            family = metric.name.endswith("/*")
            labels = ["run", "phase", *(["name"] if family else [])]
            gauge = gauges.setdefault(metric.name, GaugeMetricFamily(exposed(metric), metric.about, labels=labels))
            which = [name.removeprefix(metric.name[:-1])] if family else []
            gauge.add_metric([self._run, phase, *which], value)
        yield from gauges.values()
