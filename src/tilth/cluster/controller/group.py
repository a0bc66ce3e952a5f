"""Controller's handle on the ranks of one role."""

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from tilth.cluster.backends.base import Call, RepairableBackend
from tilth.cluster.backends.inline import InlineBackend
from tilth.cluster.controller.balance import RowBalance
from tilth.cluster.controller.dispatch import Dispatch, PendingCall
from tilth.cluster.controller.lazy import LazyBatch, LazyMap, resolved
from tilth.cluster.protocol import Deal, Divide, Transfer, deal, evenly, gather
from tilth.core.batch import Batch, Lease
from tilth.core.errors import CallTimeout, StaleGeneration
from tilth.core.layout import Mesh
from tilth.trace.spans import current_step, span

STILL = 1.0
"""Seconds without a sign of life of a worker that has not answered in time, after which it is taken to stand still."""
call_numbers = itertools.count()
"""Numbers of the calls of this controller."""


class WorkerGroup:
    """Calls on a role: ``group.update(batch)`` is split, sent and gathered as the method's ``transfer`` declares.

    Answers gathered by "rows" or "merge" are lazy (LazyBatch, LazyMap): the call returns when it is sent. Other calls
    wait. With the inline backend every answer is plain.
    """

    def __init__(
        self,
        role: str,
        factory: str,
        kwargs: Mapping[str, Any],
        mesh: Mesh,
        dispatch: Dispatch,
        divide: Divide | None = None,
        balance: RowBalance | None = None,
    ) -> None:
        """Keep what ``Cluster.make`` constructs the role from, each time. balance: of the cluster's calls."""
        self.role, self.factory, self.kwargs, self.mesh = role, factory, kwargs, mesh
        self.generation = -1
        self.methods: Mapping[str, Transfer] = {}
        self.marked: int | None = None
        """Step after which its state was last copied; None: not since it was made."""
        self.changed_by = set[str]()
        """Methods called since then that may change its state."""
        self._dispatch = dispatch
        self._divide, self._balance = divide or evenly, balance or RowBalance()
        self._inline = isinstance(dispatch.backend, InlineBackend)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.mesh)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        how = self.methods.get(name)
        if how is None:
            raise AttributeError(
                f"role {self.role} has no method {name!r}; it offers {', '.join(sorted(self.methods))}"
            )
        return partial(self._control, name) if how.control else partial(self._call, name, how)

    def _control(self, method: str, /, **arguments: Any) -> list[Any]:
        """Send a control message to every rank, beside the calls in flight. Raises WorkerError, WorkerLost, and
        CallTimeout, which names a rank that runs no Python."""

        def ask(rank: int) -> Any:
            backend = self._dispatch.backend
            try:
                return backend.control(rank, self.role, method, arguments)
            except CallTimeout as error:
                if isinstance(backend, RepairableBackend):
                    before = backend.life(rank)
                    time.sleep(STILL)  # nothing to wait on
                    error.ranks = (rank,) if backend.life(rank) == before else ()  # a slow one shows signs of life
                raise

        if len(self.mesh) == 1:  # a thread costs more than the message
            return [ask(self.mesh.ranks[0])]
        with ThreadPoolExecutor(min(16, len(self.mesh))) as pool:
            return list(pool.map(ask, self.mesh.ranks))

    def parts(self, axis: str) -> list["WorkerGroup"]:
        """Return a group for each coordinate along an axis: its ranks alone, of the role as it is made now."""
        return [self.part(axis, [place]) for place in range(self.mesh.size(axis))]

    def part(self, axis: str, places: Sequence[int]) -> "WorkerGroup":
        """Return a group of the ranks with these coordinates along an axis, of the role as it is made now."""
        mesh, shared = self.mesh.only(axis, places), (self._dispatch, self._divide, self._balance)
        found = WorkerGroup(self.role, self.factory, self.kwargs, mesh, *shared)
        found.generation, found.methods, found.changed_by = self.generation, self.methods, self.changed_by
        return found

    def first(self, answers: Sequence[Mapping[Any, Any]]) -> list[bool]:
        """Wait until one of these answers of this role, gathered by "merge", has arrived; return for each whether it
        has. Raises what a call has raised."""
        calls = [answer.calls if isinstance(answer, LazyMap) else () for answer in answers]
        self._dispatch.wait_first(calls)
        return [all(one.landed for one in some) for some in calls]

    def mark(self, step: int | None) -> None:
        """Note that its state is that after a step; None: that of a new role."""
        self.marked = step
        self.changed_by.clear()

    def _call(self, method: str, how: Transfer, /, *args: Any, **kwargs: Any) -> Any:
        if not how.reads:
            self.changed_by.add(method)
        plain = [resolved(a) for a in args], {k: resolved(a) for k, a in kwargs.items()}
        with span("plan", detail=f"{self.role}.{method}") if how.split == "plan" else nullcontext():
            by = (self._balance.planner(current_step()),) if how.split == "plan" else ()
            dealt = deal(how, self.mesh, self._divide, *plain, *by)
        given = [lease for a in (*args, *kwargs.values()) if isinstance(a, Batch) for lease in a.leases]
        leases = tuple(dict.fromkeys([*given, *filter(None, [self._dispatch.lease])]))
        flights = self._send(method, dealt, leases, how.patient)
        resolve = partial(self._gather, how, dealt, flights, leases)
        if how.gather in ("first", "all") or self._inline:
            return resolve()
        return LazyBatch(resolve, leases) if how.gather == "rows" else LazyMap(resolve, flights)

    def _send(self, method: str, dealt: Deal, leases: tuple[Lease, ...], patient: bool) -> list[PendingCall]:
        """Send the calls; ranks with the same arguments share one Call, which a backend pickles once."""
        calls: dict[tuple[int, bool], Call] = {}
        put = self._dispatch.lease
        at = current_step(), next(call_numbers), "" if put is None else put.key
        for arguments, answer in zip(dealt.arguments, dealt.answers):
            key = id(arguments), answer
            given = arguments.args, arguments.kwargs, answer
            made = Call(self.role, method, *given, *at, generation=self.generation, patient=patient)
            calls.setdefault(key, made)
        keys = zip(map(id, dealt.arguments), dealt.answers)
        with self._traced("submit", at[1], method), self._dispatch.order:
            return [self._dispatch.submit(rank, calls[key], leases) for rank, key in zip(self.mesh.ranks, keys)]

    def _gather(self, how: Transfer, dealt: Deal, flights: list[PendingCall], leases: tuple[Lease, ...]) -> Any:
        call = flights[0].call
        if call.generation != self.generation:
            raise StaleGeneration(
                f"role {self.role}, {call.method}: an answer of generation {call.generation}, and the role was made "
                f"again since: it is at {self.generation}",
                key=call.operation,
            )
        with self._traced("await", call.number, call.method) as spent:
            replies = self._dispatch.wait(flights)
            if spent is not None:
                spent.set(bytes=sum(reply.sent + reply.received for reply in replies))
        if dealt.loads is not None:
            self._balance.note(self.role, call.step, dealt.loads, [reply.sums for reply in replies])
        found = gather(how, dealt, [reply.value for reply in replies])
        return Batch(found.rows, found.payload, leases) if isinstance(found, Batch) else found

    def _traced(self, op: str, number: int, method: str) -> AbstractContextManager[Any]:
        """Return the controller's span of a call; inline, the call's own span is the only one."""
        return nullcontext() if self._inline else span(op, detail=f"{self.role}.{method}", seq=number)
