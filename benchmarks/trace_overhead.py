"""What tracing costs: step time with and without it, in alternating steps of one run.

    python benchmarks/trace_overhead.py [--quick] [--json PATH]

GRPO on addition with a learning rate of almost nothing, so that all steps are alike; once in this process, once on two
local workers of one thread each. Before every step all processes are told whether tracing is off (a span does nothing,
collections of garbage are not watched) or on: on, off, off, on, so that what grows by the step weighs on both alike.
Said are the medians over such fours of step time and of CPU time of all processes (of what other programs do on the
machine the latter knows less), and a 95 % interval of the difference by bootstrap. What the writer's thread does, every
two seconds or less often, falls into steps of both kinds: its CPU time is measured apart and added. Beside it what
follows from counting: spans of a step in the process that has most, times the cost of one, over the step.
"""

import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from driver import benchmark_parser, write_rows

from tilth.analysis.events import load
from tilth.api import run_recipe
from tilth.cluster.controller import cluster as clusters
from tilth.cluster.controller.cluster import Cluster
from tilth.cluster.worker.context import Context
from tilth.config.load import load_recipe
from tilth.core.layout import Mesh
from tilth.flows.callbacks import Callback
from tilth.launch import life as launch
from tilth.trace.collector import collector
from tilth.trace.spans import recorder, span

ORDER = (True, False, False, True)
"""Whether tracing is on in a step, again and again."""
EVERY = 2.0
"""Seconds after which the recorder writes, at first; later less often."""
ENTER, EXIT = span.__enter__, span.__exit__
RECIPE = ["supervised.steps=0", "optimizer.lr=1e-12", "run.eval_every=0", "run.eval_prompts=1", "run.save_every=100000",
          "run.save_minutes=0", "policy.probe_every=0", "train.threads=1"]  # fmt: skip
SMALL = ["rollout.prompts=16", "rollout.group=4", "model.hidden=64", "model.layers=2"]
CASES = {"inline": ["cluster.backend=inline"], "local": ["cluster.backend=local", "cluster.workers=2"]}


def switch(context: Context | None, on: bool) -> object:
    """Tracing on or off in this process. A factory of a role: what makes one is no call, so no span is open in it."""
    if on and not collector.watching:
        collector.start()
    if not on:
        collector.stop()
    span.__enter__ = ENTER if on else lambda self: self  # type: ignore[method-assign]
    span.__exit__ = EXIT if on else lambda self, *error: None  # type: ignore[method-assign]
    return object()


@dataclass
class Watcher(Callback):
    """Switches between steps and takes the time of each step, between two of its ends."""

    clusters: list[Cluster]
    on: list[bool] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._begin()

    def on_step_end(self, run: Any, step: int, metrics: dict[str, Any]) -> None:
        """A step has ended; all are told of the next one, also where it is like this one: telling disturbs a step."""
        self.on.append(ORDER[len(self.on) % len(ORDER)])
        self.wall.append(time.perf_counter() - self._wall)
        self.cpu.append(seconds_of_all() - self._cpu)
        self._switch(ORDER[len(self.on) % len(ORDER)])
        self._begin()

    def _begin(self) -> None:
        self._wall, self._cpu = time.perf_counter(), seconds_of_all()

    def _switch(self, on: bool) -> None:
        cluster = self.clusters[-1]
        mesh = Mesh(("dp",), (cluster.workers,))
        cluster.group("switch", "trace_overhead:switch", {"on": on}, mesh)
        switch(None, on)


def seconds_of_all() -> float:
    """CPU seconds of this process and all that it has started."""
    here = psutil.Process()
    times = [process.cpu_times() for process in here.children(recursive=True)]
    return time.process_time() + sum(t.user + t.system for t in times)


def fours(values: list[float], on: list[bool]) -> np.ndarray:
    """float64 [fours, 2]: seconds of a step without and with tracing, means of four neighbouring steps. The first four
    steps of a run are slow and left out."""
    whole = len(values) // 4 * 4
    seconds, traced = (np.array(x[4:whole]).reshape(-1, 4) for x in (values, on))
    return np.stack([(seconds * (traced == which)).sum(1) / 2 for which in (False, True)], 1)


def difference(found: np.ndarray) -> dict[str, float]:
    """Medians of fours in ms, and the difference with its 95 % interval in % of the time without tracing."""
    share = 100 * (found[:, 1] - found[:, 0]) / np.median(found[:, 0])
    rng = np.random.default_rng(0)
    again = np.median(rng.choice(share, (2000, len(share))), axis=1)
    low, high = np.quantile(again, [0.025, 0.975])
    numbers = {
        "off_ms": 1e3 * np.median(found[:, 0]), "on_ms": 1e3 * np.median(found[:, 1]),
        "difference_percent": np.median(share), "low_percent": low, "high_percent": high,
    }  # fmt: skip
    return {name: round(float(value), 3) for name, value in numbers.items()}


def measure(name: str, overrides: list[str], steps: int, span_ns: float) -> dict[str, Any]:
    """One run of so many steps."""
    made: list[Cluster] = []

    def opened(*args: Any, **kwargs: Any) -> Cluster:
        made.append(clusters.open_cluster(*args, **kwargs))
        return made[-1]

    with tempfile.TemporaryDirectory() as folder:
        recipe = load_recipe("addition-grpo", [*RECIPE, *overrides, f"algorithm.steps={steps}", f"run.dir={folder}"])
        watcher = Watcher(made)
        launch.open_cluster = opened  # type: ignore[attr-defined]
        try:
            result = run_recipe(recipe, name=name, callbacks=[watcher])
        finally:
            launch.open_cluster = clusters.open_cluster  # type: ignore[attr-defined]
            switch(None, True)
            collector.stop()
        counted = count(result.directory, watcher.on)
    wall = difference(fours(watcher.wall, watcher.on))
    share = 1e-4 * span_ns * counted["spans_per_step_and_process"] / wall["off_ms"]
    written = writing(round(counted["spans_per_step_and_process"] * 1e3 * EVERY / wall["off_ms"]))
    return {
        "case": name, "steps": steps,
        **{f"wall_{k}": v for k, v in wall.items()},
        **{f"cpu_{k}": v for k, v in difference(fours(watcher.cpu, watcher.on)).items()},
        **counted, "counted_percent": round(share, 4), "writer_percent": round(100 * written / EVERY, 4),
    }  # fmt: skip


def count(run: Path, on: list[bool]) -> dict[str, float]:
    """Spans and bytes of a traced step: in all processes, and in the one that has most."""
    events = load(run)
    traced = [step + 1 for step, is_on in enumerate(on) if is_on]
    inside = np.isin(events.step, traced)
    size = sum(part.stat().st_size for part in (run / "events").glob("*.parquet"))
    busiest = np.bincount(events.rank[inside]).max()
    return {
        "spans_per_step": round(int(inside.sum()) / len(traced), 1),
        "spans_per_step_and_process": round(int(busiest) / len(traced), 1),
        "bytes_per_step": round(size * inside.mean() / len(traced), 1),
    }


def price() -> dict[str, Any]:
    """ns of CPU time of one span, within another: alone, while events are recorded, and with the writer's part."""
    with span("step"):
        idle = nanoseconds(time.thread_time_ns)
    with tempfile.TemporaryDirectory() as folder, recorder.to(folder, interval=60), span("step"):
        recording = nanoseconds(time.thread_time_ns)
        everything = nanoseconds(time.process_time_ns, recorder.flush)
    return {"case": "one span", "idle_ns": idle, "recording_ns": recording, "with_writer_ns": everything}


def writing(spans: int) -> float:
    """CPU seconds of writing so many spans, the median of twenty."""
    found = []
    with tempfile.TemporaryDirectory() as folder, recorder.to(folder, interval=60), span("step"):
        for _ in range(20):
            for i in range(spans):
                with span("forward", micro_batch=i, tokens=5):
                    pass
            began = time.process_time()
            recorder.flush()
            found.append(time.process_time() - began)
    return statistics.median(found)


def nanoseconds(clock: Callable[[], int], after: Callable[[], None] = lambda: None) -> float:
    """Of one span, the lowest of ten loops: what disturbs only adds."""
    found = []
    for _ in range(10):
        began = clock()
        for i in range(5000):
            with span("forward", micro_batch=i, tokens=5):
                pass
        after()
        found.append((clock() - began) / 5000)
    return round(min(found))


def main() -> None:
    """Measure and print."""
    parser = benchmark_parser(__doc__, "fewer steps of a smaller recipe")
    parser.add_argument("--steps", type=int, default=1200, help="of each case")
    given = parser.parse_args()
    here = str(Path(__file__).parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH", "")]))
    rows = [price()]
    print(json.dumps(rows[0]), flush=True)
    for name, overrides in CASES.items():
        small, steps = (SMALL, 60) if given.quick else ([], given.steps)
        rows.append(measure(name, [*overrides, *small], steps, rows[0]["with_writer_ns"]))
        print(json.dumps(rows[-1]), flush=True)
    for row, kind in itertools.product(rows[1:], ("wall", "cpu")):
        low, middle, high = (row[f"{kind}_{x}_percent"] + row["writer_percent"] for x in ("low", "difference", "high"))
        print(f"{row['case']}: tracing adds {middle:.2f} % of {kind} time ({low:.2f} to {high:.2f}), writing included")
    write_rows(given.json, rows)


if __name__ == "__main__":
    main()
