"""The worker's side of every backend: holds the roles of one process and executes calls."""

import errno
import importlib
import os
import re
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tilth.cluster.backends.base import Call, Failure, PickledKwargs, Reply, place_of, role_of
from tilth.cluster.backends.capacity import MORE_ROOM
from tilth.cluster.controller.report import in_collective
from tilth.cluster.protocol import Transfer, offered
from tilth.cluster.worker.context import Context
from tilth.core.batch import Store
from tilth.core.errors import OutOfMemory, StaleGeneration, StorageError, TilthError, WorkerError
from tilth.core.layout import Mesh
from tilth.core.memory import exhausted, no_memory
from tilth.trace.capture import Capture, Captured
from tilth.trace.clock_samples import Origin, origin
from tilth.trace.collector import collector
from tilth.trace.spans import NOWHERE, Where, recorder, span

_TIMEOUT = re.compile("time(d |d-)?out", re.IGNORECASE)


class Executor:
    """The roles of one worker. ``note`` is told the name of each call when it begins, and "" when it ends.

    alone: this process is the controller too (inline): its spans are in the controller's totals already.
    """

    def __init__(
        self,
        rank: int,
        workers: int,
        store: Store,
        *,
        local_rank: int = 0,
        init_method: str = "",
        timeout: float = 600.0,
        note: Callable[[str], None] | None = None,
        alone: bool = False,
    ) -> None:
        self.rank, self.workers, self.store, self.local_rank = rank, workers, store, local_rank
        self.init_method, self.timeout, self.alone = init_method, timeout, alone
        self.roles: dict[str, object] = {}
        self._generations: dict[str, int] = {}
        self._where: dict[str, Where] = {}
        self.phase, self.since = "", time.monotonic()
        self._note = note
        self._tracing = False
        self._capture = Capture()
        self._events = ""

    def handle(self, call: Call) -> Reply:
        """Execute a call. What it raises goes up as it is, but for memory that cannot be had: OutOfMemory."""
        self._mark(call.name)
        self.store.lease = call.lease
        try:
            value = self._run(call)
        except (MemoryError, RuntimeError, OSError) as error:
            if not exhausted(error):
                raise
            raise self._out_of_memory(call, error) from error
        finally:
            self._mark("")
        return Reply(value if call.answer else None, {} if self.alone else recorder.rows())

    def answer(self, call: Call) -> Reply | Failure:
        """The same for a call from another process: an exception becomes a Failure that can travel."""
        try:
            return self.handle(call)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a role raises is reported, not swallowed
            return failure(self._no_room(error) or error)

    def _out_of_memory(self, call: Call, error: BaseException) -> OutOfMemory:
        """Inline the error itself says whose call it was, elsewhere its way to the controller does."""
        place = f"{place_of(call, self.rank)}: " if self.alone else ""
        told = OutOfMemory(f"{place}{no_memory(error)}", key=call.operation)
        told.role = role_of(call)
        return told

    def _no_room(self, error: BaseException) -> StorageError | None:
        """torch's error (known here by its name alone) when the file where process groups meet cannot be written."""
        full = type(error).__name__ == "DistStoreError" and os.strerror(errno.ENOSPC) in str(error)
        if not full or not self.init_method.startswith("file://"):
            return None
        place = Path(self.init_method.removeprefix("file://")).parent
        message = f"process groups could not meet in {place}: {os.strerror(errno.ENOSPC)}{MORE_ROOM}"
        told = StorageError(message, key="session_dir.init_method")
        return told.with_traceback(error.__traceback__)

    def control(self, role: str, method: str, arguments: Mapping[str, Any]) -> Any:
        """Answer a control message, in another thread than the calls. Raises WorkerError for what is no control."""
        found = offered(self.roles[role]).get(method) if role in self.roles else None
        if found is None or not found.control:
            message = f"role {role}, rank {self.rank}: {method!r} is no control method"
            raise WorkerError(message, key=f"{role}.{method}")
        return getattr(self.roles[role], method)(**arguments)

    def _mark(self, phase: str) -> None:
        self.phase, self.since = phase, time.monotonic()
        if self._note is not None:
            self._note(phase)

    def _run(self, call: Call) -> Any:
        if call.role and call.generation != (now := self._generations[call.role]):
            message = f"a call on generation {call.generation} of role {call.role}, which is at {now}"
            raise StaleGeneration(message, key=call.operation)
        method = getattr(self.roles[call.role], call.method) if call.role else getattr(self, f"_{call.method}")
        if not call.role and call.number < 0:  # of no step; and what starts and ends the trace is not in it
            return method(*call.args, **call.kwargs)
        with (
            span("call", call.step, detail=call.name, seq=call.number, where=self._where.get(call.role, NOWHERE)),
            self._capture.named(call.name),
        ):
            return method(*call.args, **call.kwargs)

    def _import(self, role: str, module: str) -> None:
        """What making a role needs, in a call of its own: at the first one a worker imports torch, for seconds."""
        importlib.import_module(module)

    def _create(
        self, role: str, factory: str, packed: PickledKwargs, mesh: Mesh, generation: int = 0
    ) -> dict[str, Transfer]:
        """Make a role's object, in the place of the one that there is; answers the protocols of its methods."""
        _close(self.roles.pop(role, None))
        self._generations[role] = generation
        module, _, function = factory.partition(":")
        context = Context(
            role,
            mesh,
            self.rank,
            self.workers,
            self.store,
            self.local_rank,
            self.init_method,
            self.timeout,
            MappingProxyType(self.roles),
            generation,
        )
        self._where[role] = role, mesh.place(self.rank)
        self.roles[role] = getattr(importlib.import_module(module), function)(context, **packed.kwargs)
        return offered(self.roles[role])

    def _trace(self, path: str, attempt: int, planned: bool) -> None:
        """Write the spans of this process from now on, under its rank, and watch its collections of garbage. A recorder
        that runs already is left alone."""
        self._events = path
        if not recorder.recording:
            recorder.start(path, rank=self.rank, attempt=attempt)
            self._tracing = True
        if self._tracing:
            collector.start(planned)

    def _origin(self) -> Origin:
        return origin()

    def _clock(self) -> int:
        """Now, on the clock of the events of this process."""
        return time.perf_counter_ns() + recorder.epoch

    def _collect(self) -> None:
        collector.collect()

    def _profile(self, memory: bool) -> str:
        with span("profile", detail="begin"):
            return self._capture.start(memory)

    def _profiled(self, stem: str) -> Captured:
        with span("profile", detail="end"):
            return self._capture.stop(f"{stem}-rank-{self.rank}" if stem else "", self._events, self.rank)

    def _end(self) -> str:
        """Close the roles that can be closed, the newest first, and the trace; answers what of it could not be
        written."""
        self._capture.drop()
        while self.roles:
            _close(self.roles.popitem()[1])
        if self._tracing:
            self._tracing = False
            collector.stop()
            return recorder.conclude()
        return ""


def _close(role: object) -> None:
    if hasattr(role, "close"):
        role.close()


def failure(error: BaseException) -> Failure:
    """An exception in a form that travels between processes without its objects."""
    text = "".join(traceback.format_exception(error))
    if isinstance(error, TilthError) and _can_be_made_again(type(error)):
        return Failure(type(error), str(error), text, key=error.key)
    return Failure(None, f"{type(error).__name__}: {error}", text, _collective(error))


def _collective(error: BaseException) -> str:
    """As in WorkerError. torch has no class of its own for time that ran out on every backend."""
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    if not in_collective(files[::-1]):
        return ""
    return "timeout" if _TIMEOUT.search(str(error)) else "broken"


def _can_be_made_again(kind: type[TilthError]) -> bool:
    """Whether another process can import the class and make it from a message."""
    return kind.__init__ is TilthError.__init__ and "<locals>" not in kind.__qualname__
