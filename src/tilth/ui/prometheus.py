"""The newest metrics of a running run for Prometheus: ``http://127.0.0.1:PORT/metrics`` (``run.prometheus``).

A request formats the metrics, so a step costs a few dictionary entries. Only this machine can connect.
"""

import importlib.util
from collections.abc import Iterator
from typing import Any

from tilth.core.errors import RecipeError
from tilth.flows.callbacks import Callback, RunView
from tilth.runs.metrics import KEYS, METRICS, MetricSpec, declaration

HOST = "127.0.0.1"  # loopback only: metrics describe the data, and the endpoint has no authentication
POSITION = {
    "step": MetricSpec("step", "steps", "last", "the newest committed step"),
    "seconds": MetricSpec("seconds", "s", "last", "run time until then"),
}  # fields of a record that count progress, as metrics
OF_ONE_STEP = "time/"  # prefix of the parts of a step; a part that the newest step does not have is dropped
_WORDS = {"s": "seconds", "bytes": "bytes"}  # units that Prometheus names end in


def exposed(metric: MetricSpec) -> str:
    """Return the name in Prometheus: ``memory/rss`` in bytes is tilth_memory_rss_bytes; a family ``time/*`` is
    tilth_time_seconds with a label ``name``, and ends in _by_name if there is a metric of the same name."""
    name = metric.name.removesuffix("/*")
    by_name = ["by_name"] if name != metric.name and name in METRICS else []
    unit = _WORDS.get(metric.unit, "")
    return "_".join(["tilth", *name.split("/"), *([unit] if unit and unit not in name else []), *by_name])


class Endpoint(Callback):
    """Serve the newest value of each metric; ``time/*`` of the newest step only."""

    def __init__(self, port: int) -> None:
        """Listen on the port. RecipeError: it is not free, or prometheus_client is not installed."""
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
                f"run.prometheus = {port}: {HOST}:{port} is not available ({error.strerror or error}); choose another "
                "port, or 0 for none",
                key="run.prometheus",
            ) from error

    @property
    def port(self) -> int:
        return int(self._server.server_port)

    def on_run_start(self, run: RunView) -> None:
        """Use the folder's name as the label ``run``."""
        self._run = run.directory.path.name
        run.say(f"metrics for Prometheus: http://{HOST}:{self.port}/metrics")

    def on_step_end(self, run: RunView, step: int, metrics: dict[str, Any]) -> None:
        """Replace the values by those of the step, also by one that is not finite."""
        fresh = {
            name: (str(metrics.get("phase", "")), float(value))
            for name, value in metrics.items()
            if (name not in KEYS or name in POSITION) and isinstance(value, (int, float))
        }
        kept = {name: value for name, value in self._newest.items() if not name.startswith(OF_ONE_STEP)}
        self._newest = kept | fresh  # another dictionary: a request may be reading this one

    def close(self, failed: bool) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def collect(self) -> Iterator[Any]:
        """Yield a gauge for each metric: prometheus_client's protocol of a collector."""
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
