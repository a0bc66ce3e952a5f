"""Cluster: workers of one backend, the roles on them, their payload store."""

import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

from tilth.cluster.backends.base import Backend, Call, PickledKwargs, RepairableBackend
from tilth.cluster.backends.capacity import patience
from tilth.cluster.backends.inline import InlineBackend
from tilth.cluster.backends.ray import RayBackend
from tilth.cluster.controller.balance import RowBalance
from tilth.cluster.controller.dispatch import Dispatch, together
from tilth.cluster.controller.group import WorkerGroup, call_numbers
from tilth.cluster.controller.leases import LeasedStore
from tilth.cluster.protocol import Divide
from tilth.config.plugins import BACKENDS, call_declared, declared
from tilth.config.roles import resolve
from tilth.core.errors import ArgumentError, PayloadLeak, PluginError, RecipeError
from tilth.core.layout import Mesh
from tilth.trace.capture import Captured
from tilth.trace.clock_samples import Origin, Round, RoundsFile, origin
from tilth.trace.collector import collector
from tilth.trace.spans import Total, recorder, span

IMPORT = 120.0
"""Seconds that imports may take even if ``cluster.timeout`` is less, on an idle machine (``patience``)."""
PATIENCE = 4
"""Times ``guard.hang_after`` for which a patient call may be without progress: it waits for a disk or for others."""
WAITS = 2
"""Times a limit of its own for which a call that waits for something with one may be without progress: once for the
limit, once for what takes its place."""
LEAVE = 10.0
"""Seconds for roles to close when the controller leaves with an exception."""


class Cluster:
    """Workers and their roles; a context manager whose end frees every process and all payload."""

    def __init__(self, backend: Backend, timeout: float = 600.0) -> None:
        self.backend = backend
        self.workers = backend.workers
        self.dispatch = Dispatch(backend, timeout)
        self.store = LeasedStore(backend.store, self.dispatch)
        self.groups: list[WorkerGroup] = []
        """In the order in which they were made."""
        self.balance = RowBalance()
        self._generation = 0
        """Least generation of roles that are made now: process groups are named by it, and no name is used again after
        a worker was replaced."""
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
        """Construct a role on the ranks of a mesh (None: worker 0 alone) and return its group.

        factory: "module:function", called in each worker as ``function(context, **kwargs)`` (worker.context.Context);
        kwargs are pickled by cloudpickle. divide: splits batches by rows; default: neighbouring rows, evenly.
        """
        mesh = mesh or Mesh.of({})
        if outside := [rank for rank in mesh.ranks if not 0 <= rank < self.workers]:
            message = f"role {role}: rank {outside[0]} is not among the workers 0 to {self.workers - 1}"
            raise ArgumentError(message, key="mesh")
        group = WorkerGroup(role, factory, kwargs, mesh, self.dispatch, divide, self.balance)
        self.make(group)
        self.groups.append(group)
        return group

    def watch(self, hang_after: float, *, keep: bool, waits: Mapping[str, float] = MappingProxyType({})) -> None:
        """Fail calls whose worker gives no sign of life for ``hang_after`` seconds. Has no effect on a backend that
        cannot replace workers. keep: keep the workers after a failure, for ``repair``.

        waits: role -> seconds that its patient calls may wait for something which has a limit of its own; without
        progress they fail after ``WAITS`` times as long, or ``PATIENCE`` times ``hang_after``.
        """
        if self.repairable is not None:
            self.dispatch.hang_after, self.dispatch.patience = hang_after, PATIENCE * hang_after
            self.dispatch.waits = {role: WAITS * seconds for role, seconds in waits.items()}
            self.dispatch.keep |= keep

    def repair(
        self, lost: Collection[int], quiet: float, evicted: Collection[int] = (), failed: Collection[str] = ()
    ) -> list[int]:
        """Bring the workers back to work after a failed call; return those that were replaced, in order.

        lost: workers that are dead or to be given up, which are killed first, so that collectives of the others end;
        evicted: those of them whose nodes are given up too; failed: roles that have failed, if that is all that did.
        Those of the others that still have calls when none has ended for ``quiet`` seconds are replaced too: they may
        wait for one that has left the collective with an error. So are those that do not answer: several may have died
        at once. Payload is freed. Every role with a
        replaced worker must be made again (``make``). Raises WorkerLost if a worker cannot be replaced.
        """
        backend = self.repairable
        assert backend is not None
        backend.kill(lost)
        gone, alone = set(lost), self._alone(lost, failed)
        while late := set(self.dispatch.settle(quiet, alone)) - gone:
            gone |= late
            backend.kill(gone)
        self.dispatch.settle(LEAVE, alone)
        gone |= self.dispatch.silent(set(range(self.workers)) - gone, LEAVE)
        backend.kill(gone)
        self.dispatch.settle(LEAVE)
        self.dispatch.forget()
        self.store.clear()
        self.balance.take()  # of calls whose step runs again
        self._generation = 1 + max((group.generation for group in self.groups), default=0)
        backend.replace(sorted(gone), evicted)
        return sorted(gone)

    def _alone(self, lost: Collection[int], failed: Collection[str]) -> set[int]:
        """Return the ranks whose calls in flight wait for no rank that is lost or has failed; none if no cause is
        known."""
        hurt = {
            group.role for group in self.groups if group.role in failed or not set(lost).isdisjoint(group.mesh.ranks)
        }
        if not hurt or not failed:
            return set()
        return {rank for rank in range(self.workers) if self.dispatch.roles(rank).isdisjoint(hurt | {""})}

    @property
    def repairable(self) -> RepairableBackend | None:
        """The backend, if it can replace workers."""
        return self.backend if isinstance(self.backend, RepairableBackend) else None

    def renew(self, rank: int) -> None:
        """Replace a worker that is lost beside the calls of the others (``Dispatch.apart``), and make its roles again.

        Nobody may call these until it returns, and they may have no process groups that others use: the others keep
        their generation. Raises WorkerLost if the worker cannot be replaced.
        """
        backend = self.repairable
        assert backend is not None
        backend.replace([rank])
        for group in self.groups:
            if rank in group.mesh.ranks:
                self._construct(group, [rank])

    def make(self, group: WorkerGroup) -> None:
        """Construct a group's role on its ranks and wait for it. Constructing it again begins its next generation:
        earlier calls and answers are refused (StaleGeneration)."""
        group.generation = max(group.generation + 1, self._generation)
        group.mark(None)
        self._construct(group, group.mesh.ranks)

    def _construct(self, group: WorkerGroup, ranks: Sequence[int]) -> None:
        """Construct a group's role on some of its ranks, in its generation."""
        imports = Call(
            "", "import", (group.role, group.factory.partition(":")[0]), least=patience(IMPORT), patient=True
        )
        for rank in ranks:
            self.dispatch.submit(rank, imports)
        call = Call(
            "",
            "create",
            (group.role, group.factory, PickledKwargs(group.kwargs), group.mesh, group.generation),
            patient=True,
        )
        replies = self.dispatch.wait([self.dispatch.submit(rank, call) for rank in ranks])
        group.methods = replies[0].value

    @property
    def rank(self) -> int:
        """Rank of the controller's recorder, which no worker has: the number of workers; inline, that of its worker."""
        return 0 if isinstance(self.backend, InlineBackend) else self.workers

    def trace(self, path: str | Path, attempt: int, planned: bool = False) -> None:
        """Record the spans of every worker under its rank in ``path``, with clock samples against the controller.

        The controller's recorder must run already. planned: Python's garbage is collected by ``collect`` only. A later
        call begins a new attempt.
        """
        if self._clocks is not None:
            self._clocks.close()
        call = Call("", "trace", (str(path), attempt, planned), patient=True)
        self.dispatch.wait([self.dispatch.submit(rank, call) for rank in range(self.workers)])
        if not isinstance(self.backend, InlineBackend):
            self._clocks = Clocks(self.dispatch, Path(path), attempt)
            self._clocks.begin()

    def collect_garbage(self, step: int) -> None:
        """Collect Python's garbage in the controller and all workers at the same time, and wait for it."""
        call = Call("", "collect", step=step, number=next(call_numbers))
        if isinstance(self.backend, InlineBackend):
            self.dispatch.submit(0, call)
            return
        with span("submit", detail=call.name, seq=call.number):
            flights = [self.dispatch.submit(rank, call) for rank in range(self.workers)]
        collector.collect()
        with span("await", detail=call.name, seq=call.number):
            self.dispatch.wait([one for one in flights if one.rank not in self.dispatch.apart])

    def profile(self, ranks: Sequence[int], memory: bool = False) -> dict[int, str]:
        """Start torch's profiler on these ranks; return rank -> error where it fails. memory: record allocations."""
        call = Call("", "profile", (memory,))
        with span("profile", detail="begin"):
            replies = self.dispatch.wait([self.dispatch.submit(rank, call) for rank in ranks])
        return {rank: reply.value for rank, reply in zip(ranks, replies) if reply.value}

    def profiled(self, ranks: Sequence[int], stem: Path | None) -> dict[int, Captured]:
        """Stop the profiler on these ranks and write ``stem-rank-R.json.gz``, within a call's limit; None: discard."""
        call = Call("", "profiled", (str(stem.resolve()) if stem else "",), patient=True)
        with span("profile", detail="end"):
            replies = self.dispatch.wait([self.dispatch.submit(rank, call) for rank in ranks])
        return {rank: reply.value for rank, reply in zip(ranks, replies)}

    def totals(self) -> dict[str, Total]:
        """Return ``recorder.totals()`` of the controller and all workers since the last call of this method."""
        return together(recorder.totals(), self.dispatch.totals.take())

    def traffic(self) -> dict[tuple[str, str], int]:
        """Return bytes since the last call of this method by (operation, "sent" or "received"): of calls, answers, and
        payload that the controller itself puts or gets."""
        return self.dispatch.traffic.take()

    def compare_clocks(self) -> None:
        """Sample the workers' clocks if it is due and they are idle. Raises as any call if a worker is lost, so call it
        after a commit."""
        if self._clocks is not None:
            self._clocks.now_and_then()

    def has_room(self, workers: int) -> bool:
        """Return False if the backend knows that so many workers, these included, find no place."""
        return not isinstance(self.backend, RayBackend) or self.backend.has_room(workers)

    def close(self) -> list[str]:
        """Wait for outstanding calls, close the roles, end the workers; return a line per trace that was not written.

        Raises the failure of a call that nobody waited for, and PayloadLeak if payload is still held; the workers are
        ended in any case. Idempotent.
        """
        if not self._open:
            return []
        self._open = False
        try:
            if self.dispatch.failed is None:
                self.dispatch.drain()
                if self._clocks is not None:
                    self._clocks.end()
                end = Call("", "end", patient=True)
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
            self.backend.close(kill)

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is None:
            self.close()
        elif isinstance(self.backend, InlineBackend):
            with suppress(PayloadLeak):  # a consequence of the error
                self.close()
        else:
            self._leave()

    def _leave(self) -> None:
        """End after an exception of the controller: close roles if the workers are idle, else kill them, since waiting
        for a busy worker could hang."""
        if not self._open:
            return
        self._open, kill = False, True
        try:
            kill = not self.dispatch.end(LEAVE)
        finally:  # also on an interrupt
            self._end(kill)


def open_cluster(
    backend: str,
    workers: int,
    *,
    timeout: float = 600.0,
    address: str = "",
    gpus: bool = False,
    spares: int = 0,
    lasting: str = "",
) -> Cluster:
    """Start the workers of the backend that ``cluster.backend`` names.

    timeout: seconds that one call may take. address: of a Ray cluster ("": start one here). gpus: each worker gets a
    GPU of its own. spares: of a backend that has them. lasting: folder of a
    supervised run, which outlives this process. Raises RecipeError for a backend that is not declared, is not installed
    or cannot have this many workers, PluginError for a declared class that is no backend or cannot start.
    """
    more = ({"spares": spares} if spares else {}) | ({"lasting": lasting} if lasting else {})
    made = _backend(backend, workers, timeout=timeout, address=address, gpus=gpus, **more)
    return Cluster(made, timeout)


def _backend(name: str, workers: int, **options: Any) -> Backend:
    if name in BACKENDS:
        shipped: Backend = resolve(BACKENDS[name])(workers, **options)
        return shipped
    if (declaration := declared("backend").get(name)) is None:
        known = ", ".join([*BACKENDS, *declared("backend")])
        message = f"cluster.backend = {name!r}: unknown; use {known}, or a plugin that declares it"
        raise RecipeError(message, key="cluster.backend")
    made = call_declared(declaration, workers, **options)
    missing = [
        member for member in ("workers", "store", "submit", "control", "probe", "close") if not hasattr(made, member)
    ]
    if missing:
        message = f"{declaration.title} has no {missing[0]!r}; see tilth.cluster.backends.base.Backend"
        raise PluginError(message, key=f"backend.{name}.{missing[0]}")
    return made


# ---- clock samples between the controller and its workers ----

MANY, FEW = 12, 3
"""Samples per worker at the start and at the end, and in between; the best one counts."""
COST = 1e-3
"""Largest share of the time that sampling may take."""
SHORTEST, LONGEST = 1.0, 20.0
"""Bounds on the seconds between bursts, which are 1 % of the time so far."""


class Clocks:
    """Samples the clocks of idle workers and writes the samples beside the events."""

    def __init__(self, dispatch: Dispatch, folder: Path, attempt: int) -> None:
        self._dispatch = dispatch
        self._ranks = range(dispatch.backend.workers)
        self._file = RoundsFile(folder, attempt)
        self._epoch = recorder.epoch  # the recorder may stop before the last samples
        self._began = self._next = time.monotonic()

    def begin(self) -> None:
        """Identify the clocks and take the first samples."""
        call = Call("", "origin")
        replies = self._dispatch.wait([self._dispatch.submit(rank, call) for rank in self._ranks])
        origins = dict(enumerate(Origin(*reply.value) for reply in replies))
        self._file.introduce(origins | {len(origins): origin()})
        self._burst(MANY)

    def now_and_then(self) -> None:
        """Take samples if they are due, all workers are idle, and none may be missing."""
        if time.monotonic() >= self._next and not self._dispatch.apart and self._dispatch.idle():
            self._burst(FEW)

    def end(self) -> None:
        """Take the last samples and close the file."""
        self._burst(MANY)
        self.close()

    def close(self) -> None:
        """Close the file; idempotent."""
        self._file.close()

    def _burst(self, count: int) -> None:
        began = time.monotonic()
        self._file.add({rank: [self._round(rank) for _ in range(count)] for rank in self._ranks})
        now = time.monotonic()
        pause = min(max(0.01 * (now - self._began), SHORTEST), LONGEST)
        self._next = now + max(pause, (now - began) / COST)

    def _round(self, rank: int) -> Round:
        """Return (sent, remote, received) in ns; the callback takes the last before this thread wakes up."""
        landed: list[int] = []
        asked = self._now()
        flight = self._dispatch.submit(rank, Call("", "clock"))
        flight.future.add_done_callback(lambda _: landed.append(self._now()))
        reply = self._dispatch.wait([flight])[0]
        return asked, reply.value, landed[0] if landed else self._now()

    def _now(self) -> int:
        """Return ns on the clock of this process's events."""
        return time.perf_counter_ns() + self._epoch
