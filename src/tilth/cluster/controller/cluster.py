"""A cluster: workers of one backend, the roles on them, their payload store."""

import importlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from tilth.cluster.backends.base import Backend, Call, PickledKwargs
from tilth.cluster.backends.capacity import patience
from tilth.cluster.backends.inline import InlineBackend
from tilth.cluster.controller.clocks import Clocks
from tilth.cluster.controller.dispatch import ABORT, Dispatch, FailurePolicy
from tilth.cluster.controller.group import WorkerGroup, call_numbers
from tilth.cluster.controller.leases import LeasedStore
from tilth.cluster.controller.totals import together
from tilth.cluster.protocol import Divide
from tilth.config.plugins import BACKENDS, declared, describe
from tilth.core.errors import ArgumentError, PayloadLeak, PluginError, RecipeError, TilthError
from tilth.core.layout import Mesh
from tilth.trace.capture import Captured
from tilth.trace.collector import collector
from tilth.trace.spans import Total, recorder, span

IMPORT = 120.0
"""Seconds that imports may take even where a call may not, on a machine at rest (``patience``)."""
LEAVE = 10.0
"""Seconds that roles have to close when the controller leaves with an exception."""


class Cluster:
    """Workers and what runs on them; a context manager. Leaving it frees every process and all payload."""

    def __init__(self, fleet: Backend, timeout: float = 600.0, policy: FailurePolicy = ABORT) -> None:
        """policy: what a failure does."""
        self.fleet = fleet
        self.workers = fleet.workers
        self.dispatch = Dispatch(fleet, timeout, policy)
        self.store = LeasedStore(fleet.store, self.dispatch)
        self._open = True
        self._clocks: Clocks | None = None

    def group(
        self,
        role: str,
        factory: str,
        kwargs: Mapping[str, Any],
        mesh: Mesh | None = None,
        divide: Divide | None = None,
    ) -> WorkerGroup:
        """The group of a role that is made on the ranks of a mesh (None: worker 0 alone).

        factory: "module:function", called in each worker as ``function(context, **kwargs)`` (cluster.context.Context);
        kwargs travel by cloudpickle. divide: how batches are divided by rows; default: neighbouring rows, evenly.
        """
        mesh = mesh or Mesh.of({})
        if outside := [rank for rank in mesh.ranks if not 0 <= rank < self.workers]:
            message = f"role {role}: rank {outside[0]} is not among the workers 0 to {self.workers - 1}"
            raise ArgumentError(message, key="mesh")
        group = WorkerGroup(role, factory, kwargs, mesh, self.dispatch, divide)
        self.make(group)
        return group

    def make(self, group: WorkerGroup) -> None:
        """Make a group's role on its ranks and wait until it is there. One that was made before begins its next
        generation: its objects are made anew, and what was called before is refused (StaleGeneration)."""
        group.generation += 1
        imports = Call("", "import", (group.role, group.factory.partition(":")[0]), least=patience(IMPORT))
        for rank in group.mesh.ranks:
            self.dispatch.submit(rank, imports)
        call = Call(
            "", "create", (group.role, group.factory, PickledKwargs(group.kwargs), group.mesh, group.generation)
        )
        replies = self.dispatch.wait([self.dispatch.submit(rank, call) for rank in group.mesh.ranks])
        group.methods = replies[0].value

    @property
    def rank(self) -> int:
        """The controller's number in the trace: that of the worker that it is itself (inline), else the one behind the
        workers'. Its recorder must be started with it, so that no two processes write the same files."""
        return 0 if isinstance(self.fleet, InlineBackend) else self.workers

    def trace(self, path: str | Path, attempt: int, planned: bool = False) -> None:
        """Every worker writes its spans to ``path`` under its rank. How its clock stands against the controller is kept
        there too. The controller's own recorder, which must be running then, is not touched.

        planned: Python's garbage is collected by ``collect`` only.
        """
        call = Call("", "trace", (str(path), attempt, planned))
        self.dispatch.wait([self.dispatch.submit(rank, call) for rank in range(self.workers)])
        if not isinstance(self.fleet, InlineBackend):
            self._clocks = Clocks(self.dispatch, Path(path), attempt)
            self._clocks.begin()

    def collect(self, step: int) -> None:
        """The controller and all workers collect Python's garbage now, at the same time; returns when all have."""
        call = Call("", "collect", step=step, number=next(call_numbers))
        if isinstance(self.fleet, InlineBackend):
            self.dispatch.submit(0, call)
            return
        with span("submit", detail=call.name, seq=call.number):
            flights = [self.dispatch.submit(rank, call) for rank in range(self.workers)]
        collector.collect()
        with span("await", detail=call.name, seq=call.number):
            self.dispatch.wait(flights)

    def profile(self, ranks: Sequence[int], memory: bool = False) -> dict[int, str]:
        """Let torch's profiler record what these workers do from now on; answers rank -> what went wrong, for those
        that cannot. memory: each allocation too."""
        call = Call("", "profile", (memory,))
        with span("profile", detail="begin"):
            replies = self.dispatch.wait([self.dispatch.submit(rank, call) for rank in ranks])
        return {rank: reply.value for rank, reply in zip(ranks, replies) if reply.value}

    def profiled(self, ranks: Sequence[int], stem: Path | None) -> dict[int, Captured]:
        """End that, and write what was seen to ``stem-rank-R.json.gz``; None: forget it. The time of writing counts
        towards the limit of a call."""
        call = Call("", "profiled", (str(stem.resolve()) if stem else "",))
        with span("profile", detail="end"):
            replies = self.dispatch.wait([self.dispatch.submit(rank, call) for rank in ranks])
        return {rank: reply.value for rank, reply in zip(ranks, replies)}

    def totals(self) -> dict[str, Total]:
        """``recorder.totals()`` of the controller and all workers: where the time since the last call of this went."""
        return together(recorder.totals(), self.dispatch.totals.take())

    def traffic(self) -> dict[tuple[str, str], int]:
        """Bytes between controller and workers since the last call of this, by (operation, "sent" or "received"): of
        every call and answer, and of payload that the controller itself puts or reads."""
        return self.dispatch.traffic.take()

    def compare_clocks(self) -> None:
        """See how the workers' clocks stand, if it is time for it and they are idle. Where a worker is lost raises what
        any call would: call it when the step before is committed."""
        if self._clocks is not None:
            self._clocks.now_and_then()

    def close(self) -> list[str]:
        """Wait for outstanding calls, let the roles close, end the workers; answers what of their traces could not be
        written, a line for each. Raises what failed in a call that nobody waited for, and PayloadLeak where payload is
        still held; the processes are gone even then. Twice is fine."""
        if not self._open:
            return []
        self._open = False
        try:
            if self.dispatch.failed is None:
                self.dispatch.drain()
                if self._clocks is not None:
                    self._clocks.end()
                end = Call("", "end")
                replies = self.dispatch.wait([self.dispatch.submit(rank, end) for rank in range(self.workers)])
                self.store.check_released()
                return [f"rank {rank}: {reply.value}" for rank, reply in enumerate(replies) if reply.value]
            return []
        finally:
            self._end(kill=self.dispatch.failed is not None)

    def _end(self, kill: bool) -> None:
        try:
            if self._clocks is not None:
                self._clocks.close()
        finally:
            self.fleet.close(kill)

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is None:
            self.close()
        elif isinstance(self.fleet, InlineBackend):
            with suppress(PayloadLeak):  # the error says why
                self.close()
        else:
            self._leave()

    def _leave(self) -> None:
        """End after an exception of the controller: in good order where the workers are idle (an interrupt between two
        steps), else at once: they may be in the middle of anything, waiting for them could hang."""
        if not self._open:
            return
        self._open, kill = False, True
        try:
            kill = not self.dispatch.end(LEAVE)
        finally:  # an interrupt while they end kills them
            self._end(kill)


def open_cluster(
    backend: str,
    workers: int,
    *,
    timeout: float = 600.0,
    address: str = "",
    gpus: bool = False,
    policy: FailurePolicy = ABORT,
) -> Cluster:
    """Start the workers of the backend that ``cluster.backend`` names.

    timeout: seconds that one call may take. address: of a Ray cluster ("": start one here). gpus: each worker gets a
    GPU of its own. policy: decides what a failure does. Raises RecipeError for a backend that is not declared, is not
    installed or cannot have this many workers, PluginError for a declared class that is no backend or cannot start.
    """
    return Cluster(_backend(backend, workers, timeout=timeout, address=address, gpus=gpus), timeout, policy)


def _backend(name: str, workers: int, **options: Any) -> Backend:
    if name in BACKENDS:
        module, _, attribute = BACKENDS[name].partition(":")
        shipped: Backend = getattr(importlib.import_module(module), attribute)(workers, **options)
        return shipped
    if (declaration := declared("backend").get(name)) is None:
        known = ", ".join([*BACKENDS, *declared("backend")])
        message = f"cluster.backend = {name!r}: unknown; use {known}, or a plugin that declares it"
        raise RecipeError(message, key="cluster.backend")
    try:
        made = declaration.value(workers, **options)
    except TilthError:
        raise
    except Exception as error:
        raise PluginError(f"{declaration.title}: {describe(error)}", key=f"backend.{name}") from error
    missing = [
        member for member in ("workers", "store", "submit", "control", "probe", "close") if not hasattr(made, member)
    ]
    if missing:
        message = f"{declaration.title} has no {missing[0]!r}; see tilth.cluster.backends.base.Backend"
        raise PluginError(message, key=f"backend.{name}.{missing[0]}")
    return made
