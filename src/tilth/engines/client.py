"""Client of an engine in a worker of a cluster: a thread drives it in rounds for requests of many event loops.

Requests join between two rounds (continuous batching). A worker that dies is started again and its requests run
again from their prompts, with their own random numbers, so that a stream goes on with equal tokens. If it dies again,
halves of them run one after the other, until the request that breaks it is alone and fails.
"""

import asyncio
import itertools
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from operator import methodcaller
from typing import Any

from torch import Tensor

from tilth.cluster.controller.cluster import Cluster
from tilth.cluster.controller.group import WorkerGroup
from tilth.config.schema import LoraConfig
from tilth.core.errors import CallTimeout, OutOfMemory, TilthError, WorkerError, WorkerLost
from tilth.engines.completion import Completion, Delta, RequestError, hand_over
from tilth.engines.request import Request
from tilth.engines.worker import Abilities, MakeEngine
from tilth.process.restarts import RestartPolicy

QUIET = 0.5
"""Seconds for the calls of a lost worker to end."""
HANG = 300.0
"""Seconds that a call may take without a sign of life of its worker."""
RESTARTS = RestartPolicy(attempts=3, fruitless=16)
"""Restarts of an idempotent call, of a request that is alone at last, and of the worker itself. Fruitless is a death
without a request that finished: more of them are borne than it takes to find one request among a thousand."""
BREAKS = (WorkerLost, WorkerError, CallTimeout, OutOfMemory)
"""Errors after which requests begin again; after another one they fail with it. The role is made again in any case."""


@dataclass
class _Asked:
    """A call on the worker that a client waits for."""

    method: str
    arguments: tuple[Any, ...]
    idempotent: bool
    answer: Future[Any] = field(default_factory=Future)
    begun: int = 0


class EngineClient:
    """Requests and calls of many event loops on one role, in a thread of its own.

    cluster: the client closes it; the engine is on its worker 0. factory: of the role "serve", called as
    ``factory(context, make, **more)``; its class is an ``EngineWorker``. most: requests that it has, decoded or
    waiting. Raises what constructing the engine raises.
    """

    def __init__(
        self,
        cluster: Cluster,
        make: MakeEngine,
        *,
        most: int = 512,
        factory: str = "tilth.engines.worker:engine_worker",
        **more: Any,
    ) -> None:
        self.cluster, self.most = cluster, most
        self.restarts = 0
        """Times that the worker's role was made again."""
        self.failure: TilthError | None = None
        """Why it serves nobody any more; None while it does."""
        self._adapters: dict[str, tuple[LoraConfig, Mapping[str, Tensor]]] = {}
        self._changed = threading.Condition()
        self._new: deque[Completion] = deque()
        self._left: list[int] = []
        self._asked: deque[_Asked] = deque()
        self._running: dict[int, Completion] = {}
        self._suspects: list[list[Completion]] = []
        """Batches under bisection: one request of each crashes the worker, so each batch runs alone."""
        self._seeking = False
        """True while the requests that run are such a group."""
        self._fruitless = 0
        self._ids = itertools.count()
        self._closing = False
        cluster.dispatch.keep = True
        cluster.watch(HANG, keep=True)
        try:
            self.group: WorkerGroup = cluster.group("serve", factory, {"make": make, **more})
            self.abilities: Abilities = self.group.abilities()
        except BaseException:  # an interrupt too: no process may be left
            cluster.backend.close(kill=True)
            raise
        self._thread = threading.Thread(target=self._drive, name="engine-client", daemon=True)
        self._thread.start()

    # ---- the clients' side: any thread, completions in an event loop ----

    @property
    def load(self) -> int:
        """Number of requests that it has."""
        return len(self._running) + len(self._new) + sum(map(len, self._suspects))

    def admit(self, requests: Sequence[Request]) -> list[Completion]:
        """Take requests, all or none; their ids need not be unique. Raises RequestError: no place, or closed.

        A request without ``draws`` draws from stream (0, its id), whatever its company.
        """
        with self._changed:
            self._check_open()
            if self.load + len(requests) > self.most:
                raise self._full(f"{self.load} requests are in it")
            taken = [Completion(next(self._ids), request, self._leave) for request in requests]
            self._new.extend(taken)
            self._changed.notify_all()
        return taken

    async def generate(self, request: Request) -> AsyncIterator[Delta]:
        """Yield pieces of one completion; leaving the iteration aborts it. Raises RequestError, the request's error."""
        (completion,) = self.admit([request])
        try:
            async for piece in completion:
                yield piece
        finally:
            completion.close()

    async def call(self, method: str, *arguments: Any, idempotent: bool = False) -> Any:
        """Call a method of the role between two rounds and return its answer. Raises what it raises, and RequestError.

        idempotent: begin again if the worker dies.
        """
        asked = _Asked(method, arguments, idempotent)
        with self._changed:
            self._check_open()
            if len(self._asked) >= self.most:
                raise self._full(f"{len(self._asked)} calls wait")
            self._asked.append(asked)
            self._changed.notify_all()
        return await asyncio.wrap_future(asked.answer)

    async def load_adapter(self, name: str, lora: LoraConfig, tensors: Mapping[str, Tensor]) -> None:
        """Hold an adapter for requests that name it, also in a worker that is started later. Raises ModelError."""
        await self.call("load_adapter", name, lora, tensors, idempotent=True)
        self._adapters[name] = lora, tensors

    async def remove_adapter(self, name: str) -> None:
        """Forget an adapter. Raises DataError for an unknown name."""
        await self.call("remove_adapter", name)
        self._adapters.pop(name, None)

    def status(self) -> dict[str, Any]:
        """Return counts of the engine, beside its calls; nothing while it has no worker."""
        with suppress(WorkerLost, WorkerError):
            (found,) = self.group.status()
            return dict(found)
        return {}

    def close(self, seconds: float = 30.0) -> None:
        """Take nothing more, let what is there finish for some seconds, fail the rest by name, end the worker."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not (self.load or self._asked), seconds)
            ended = RequestError("the server has shut down before this request was finished", key="serve.closed")
            self._fail_all(self.failure or ended)
            self._changed.notify_all()
        self._thread.join(seconds + QUIET)
        if self._thread.is_alive() or self.failure is not None:
            self.cluster.backend.close(kill=True)
            self._thread.join()
        else:
            self.cluster.close()

    def _full(self, what: str) -> RequestError:
        return RequestError(f"the server has place for {self.most}: {what}; ask again later", key="serve.full")

    def _check_open(self) -> None:
        """Raise RequestError if nothing is taken. (Called with the lock.)"""
        if self.failure is not None:
            raise RequestError(f"the server serves nobody any more: {self.failure}", key="serve.failed")
        if self._closing:
            raise RequestError("the server shuts down; ask another one", key="serve.closing")

    def _leave(self, completion: Completion) -> None:
        """End a completion whose client has left."""
        with self._changed:
            if self._running.pop(completion.id, None) is not None:
                self._left.append(completion.id)
            for group in (self._new, *self._suspects):
                if completion in group:
                    group.remove(completion)
            self._changed.notify_all()

    # ---- the thread ----

    def _drive(self) -> None:
        while self._wait():
            called = True
            try:
                self._answer_call()
                called = False
                self._round()
            except Exception as error:  # noqa: BLE001 - inline, a role's own exception comes as it is
                self._restart(error, called)

    def _wait(self) -> bool:
        """Wait for work; False at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self.load or self._asked or self._left or self._closing)
            return bool(self.failure is None and (self.load or self._asked or self._left))

    def _answer_call(self) -> None:
        """Run the first call that is asked for, if any. Its own error is its answer; a lost worker is raised."""
        with self._changed:
            asked = self._asked.popleft() if self._asked else None
        if asked is None or not (asked.begun or asked.answer.set_running_or_notify_cancel()):
            return
        asked.begun += 1
        try:
            answer = getattr(self.group_of(asked.method), asked.method)(*asked.arguments)
        except Exception as error:
            broken = isinstance(error, BREAKS) or not isinstance(error, TilthError)
            if broken and asked.idempotent and RESTARTS.again(asked.begun):
                with self._changed:
                    self._asked.appendleft(asked)
            else:
                asked.answer.set_exception(error)
            if broken:
                raise
            return
        asked.answer.set_result(answer.wait() if hasattr(answer, "wait") else answer)

    def _round(self) -> None:
        """Give new requests to the engine, let it work, deliver."""
        with self._changed:
            new, left = self._joining(), self._left
            self._left = []
            self._running.update((completion.id, completion) for completion in new)
        if not (self._running or left):
            return
        done = self.group.advance([completion.begin() for completion in new], left)
        some = [self._deliver(id, methodcaller("progress", newest)) for id, newest in done.progress.items()]
        some += [self._deliver(id, methodcaller("fail", error), last=True) for id, error in done.failed.items()]
        some += [self._deliver(one.id, methodcaller("finish", one), last=True) for one in done.finished]
        for completion in hand_over(filter(None, some)):
            self._leave(completion)

    def _joining(self) -> list[Completion]:
        """Take the requests that join the next round. (Called with the lock.)"""
        if self._seeking and self._running:
            return []
        while self._suspects and not self._suspects[0]:  # all have left
            del self._suspects[0]
        self._seeking = bool(self._suspects)
        if self._seeking:
            return self._suspects.pop(0)
        new = list(self._new)
        self._new.clear()
        return new

    def _deliver(self, id: int, give: Callable[[Completion], None], *, last: bool = False) -> Completion | None:
        """Note what is new for a client that is still there; a stream that cannot go on fails alone."""
        completion = self._running.get(id)
        if completion is None:
            return None
        try:
            give(completion)
        except RequestError as error:
            completion.fail(error)
            self._leave(completion)
        if last:
            self._fruitless = 0
            with self._changed:
                self._running.pop(id, None)
                self._changed.notify_all()
        return completion

    def _restart(self, error: Exception, called: bool) -> None:
        """Start the worker again, and let its requests begin again or fail. called: a call broke it, no request."""
        again = isinstance(error, BREAKS) or not isinstance(error, TilthError)
        self._fruitless += 1
        with self._changed:
            late = self._fail_or_seek(again, called)
            self._running.clear()
            self._left = []
        for completion in late:
            completion.fail(error)
        hand_over(late)
        begun = 0
        while RESTARTS.again(begun):
            begun += 1
            try:
                self._remake()
                return
            except Exception as found:  # noqa: BLE001 - as above; the last one is reported to all clients
                error = found
        with self._changed:
            self.failure = error if isinstance(error, TilthError) else RequestError(repr(error), key="serve.worker")
            self._fail_all(self.failure)

    def _fail_or_seek(self, again: bool, called: bool) -> list[Completion]:
        """Return the requests that fail, and put the others where they begin again. (Called with the lock.)"""
        running = list(self._running.values())
        for completion in running:
            completion.deaths += not called
        if again and not RESTARTS.again(fruitless=self._fruitless):
            running += [one for group in self._suspects for one in group]
            self._suspects.clear()
            return running
        if not again or (len(running) == 1 and not RESTARTS.again(running[0].deaths)):
            return running
        if called and self._seeking:
            self._suspects.insert(0, running)
        elif not called and any(completion.deaths > 1 for completion in running):
            half = (len(running) + 1) // 2
            self._suspects[:0] = [running[:half], running[half:]]
        else:
            self._new.extendleft(reversed(running))
        return []

    def _remake(self) -> None:
        """Make the role again, on a new worker where the backend can replace one."""
        self.restarts += 1
        if self.cluster.repairable is not None:
            self.cluster.repair(range(self.cluster.workers), QUIET)
        for group in self.cluster.groups:
            self.cluster.make(group)
        for name, (lora, tensors) in self._adapters.items():
            self.group.load_adapter(name, lora, tensors)
        self.restore()

    def group_of(self, method: str) -> WorkerGroup:
        """Return the group whose role has a method; for clients of several roles."""
        return self.group

    def restore(self) -> None:
        """Give a role that was made again what it needs; for clients of other roles."""

    def _fail_all(self, error: TilthError) -> None:
        """Fail all requests and calls. (Called with the lock.)"""
        late = [*self._running.values(), *self._new, *(c for group in self._suspects for c in group)]
        for completion in late:
            completion.fail(error)
        hand_over(late)
        self._left += list(self._running)
        self._running.clear()
        self._new.clear()
        self._suspects.clear()
        while self._asked:
            asked = self._asked.popleft()
            if asked.begun or asked.answer.set_running_or_notify_cancel():
                asked.answer.set_exception(error)
