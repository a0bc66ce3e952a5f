"""Health of a run: what the watches of its workers warn of is logged between two steps, and kept in its folder."""

import math
import statistics
from contextlib import ExitStack, suppress
from queue import SimpleQueue
from types import TracebackType
from typing import Any

from tilth.cluster.backends.local import LocalBackend
from tilth.cluster.controller.cluster import Cluster
from tilth.core.errors import StorageError
from tilth.flows.callbacks import Callback, RunView
from tilth.guard.health import HealthWatch
from tilth.guard.verdict import Verdict
from tilth.runs.directory import RunDir

NEAR = 0.5
"""Share of ``guard.hang_after`` for which a healthy call must be without progress for a warning."""
MEASURED = 4
"""Steps after which the limit is compared with their length; the first one, which may compile, does not count."""


class RunHealth(Callback):
    """Watches the workers of a run on this machine from its first step to its end; a context manager.

    A warning is written at once, so that it is there if the next step never comes.
    """

    def __init__(self, cluster: Cluster, directory: RunDir) -> None:
        self._cluster, self._backend, self._directory = cluster, cluster.backend, directory
        self._found: SimpleQueue[Verdict] = SimpleQueue()
        self._open = ExitStack()
        self._step, self._near = 0, NEAR
        self._took: list[float] = []
        """Seconds of the first steps."""
        self._dispatch = cluster.dispatch
        self._watch: HealthWatch | None = None

    def __enter__(self) -> "RunHealth":
        if isinstance(self._backend, LocalBackend):
            self._directory.update(session=str(self._backend.folder.path))
            self._watch = HealthWatch(self._backend, self._directory.path, self._report, lambda: works(self._cluster))
            self._open.enter_context(self._watch.watching())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._open.close()
        if self._watch is not None and self._watch.workers:
            with suppress(StorageError):  # the run's own error, or its last write, tells of the disk
                self._directory.update(workers=self._watch.workers)

    def _report(self, verdict: Verdict) -> None:
        """Keep a verdict; called by the thread that watches."""
        self._found.put(verdict)
        try:
            self._directory.note_finding({"step": self._step, **vars(verdict)})
        except StorageError as error:  # it is logged by the next step at the latest
            self._found.put(Verdict("storage", (), f"a warning could not be written: {error}"))

    def on_run_start(self, run: RunView) -> None:
        """Count steps from here."""
        self._step = run.state.step

    def on_step_end(self, run: RunView, step: int, metrics: dict[str, Any]) -> None:
        """Log what was found since the last step, and a limit of hangs that is not far from what is healthy.

        Clocks are compared here, so that a worker that is lost loses no earlier comparison.
        """
        self._cluster.compare_clocks()
        self._step = step
        self._compare(run, metrics)
        stood, call = self._dispatch.longest
        if stood > self._near * self._dispatch.hang_after:
            self._near = 2.0  # it is told once
            run.say(
                f"warning: {call} was without progress for {stood:.1f} s and then got on; guard.hang_after = "
                f"{self._dispatch.hang_after:g} would take it to hang if it were slower: use "
                f"guard.hang_after={math.ceil(4 * stood)}"
            )
        while not self._found.empty():
            verdict = self._found.get()
            run.say(f"warning: {verdict.kind}: {verdict.evidence}")

    def _compare(self, run: RunView, metrics: dict[str, Any]) -> None:
        """Tell once, after the first steps, of a limit that is below their length."""
        if len(self._took) == MEASURED:
            return
        self._took.append(metrics.get("time/step", 0.0))
        length, limit = statistics.median(self._took[1:] or [0.0]), self._dispatch.hang_after
        if len(self._took) == MEASURED and limit < length:
            stood, call = self._dispatch.longest
            most = f", {stood:.1f} s at most so far, in {call}" if call else ""
            run.say(
                f"warning: guard.hang_after = {limit:g} is below the length of a step, {length:.1f} s. It limits the "
                f"time in which a worker ends no operation{most}; with guard.hang_after={math.ceil(4 * length)} no "
                "step of this length is taken to hang"
            )


def works(cluster: Cluster) -> dict[int, int]:
    """Return rank -> number of its work: equal for ranks that are in the same roles, at the same stage of each."""
    done: dict[int, list[tuple[str, int]]] = {rank: [] for rank in range(cluster.workers)}
    for group in list(cluster.groups):
        for rank in group.mesh.ranks:
            done[rank].append((group.role, group.mesh.coordinate("pp", rank)))
    numbers = {of: i for i, of in enumerate(dict.fromkeys(map(tuple, done.values())))}
    return {rank: numbers[tuple(of)] for rank, of in done.items()}
