"""Worker side of every backend: holds the roles of one process and executes calls."""

import errno
import importlib
import os
import pickle
import re
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tilth.cluster.backends.base import Call, Failure, PickledKwargs, Reply, place_of, role_of
from tilth.cluster.backends.capacity import MORE_ROOM, advice
from tilth.cluster.controller.report import in_collective
from tilth.cluster.protocol import Transfer, offered
from tilth.cluster.worker.context import Context
from tilth.config.plugins import blame
from tilth.config.roles import resolve
from tilth.core.batch import Store
from tilth.core.errors import OutOfMemory, StaleGeneration, StorageError, TilthError, WorkerError
from tilth.core.layout import Mesh
from tilth.core.memory import is_out_of_memory, no_memory
from tilth.trace.capture import Capture, Captured
from tilth.trace.clock_samples import Origin, origin
from tilth.trace.collector import collector
from tilth.trace.spans import NOWHERE, Where, recorder, span

OWN = {"inject": "tilth_studies.strike:strike", "recorder": "tilth.guard.diagnosis:recorded"}
"""Control messages to the worker itself; what answers them is imported only when it is asked for."""
REFUSALS = (
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.ESTALE, errno.ENOTCONN
)  # fmt: skip
"""errno values of a file system that is full, read-only or unmounted."""
_TIMEOUT = re.compile("time(d |d-)?out", re.IGNORECASE)


class Executor:
    """Roles of one worker. note: called with the name of each call at its begin, and with "" at its end.

    alone: the controller runs in this process (inline), so its totals hold these spans already.
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
        folder: str = "",
    ) -> None:
        self.rank, self.workers, self.store, self.local_rank = rank, workers, store, local_rank
        self.init_method, self.timeout, self.alone, self.folder = init_method, timeout, alone, folder
        self.roles: dict[str, object] = {}
        self._generations: dict[str, int] = {}
        self._where: dict[str, Where] = {}
        self.phase = ""
        self._patient = False
        self.left = False
        """True if the newest call left a collective with an error."""
        self.ended = False
        """True once a call has closed the roles."""
        self._note = note
        self._tracing = False
        self._capture = Capture()
        self._events = ""

    def handle(self, call: Call) -> Reply:
        """Execute a call; its exceptions pass, but exhausted memory becomes OutOfMemory, a file system that takes no
        more a StorageError, and another exception of a plugin's code a PluginError."""
        self._mark(call.name)
        self._patient = call.patient
        self.store.lease = call.lease
        try:
            value = self._run(call)
        except TilthError:
            raise
        except (Exception, SystemExit) as error:
            if is_out_of_memory(error):
                raise self._out_of_memory(call, error) from error
            if (full := self._no_room(error)) is not None:
                raise full from error
            if _collective(error) or (found := blame(error, role_of(call))) is None:
                raise
            raise found from error
        finally:
            self._mark("")
        return Reply(value if call.answer else None, {} if self.alone else recorder.rows())

    def is_patient(self) -> bool:
        """Return True while the running call is patient, or the last one was."""
        return self._patient

    def answer(self, data: bytes) -> bytes:
        """Execute a pickled call of another process; return a pickled Reply, or a Failure instead of an exception."""
        try:
            call: Call = pickle.loads(data)
        except Exception as error:  # noqa: BLE001 - unpickling runs code of the arguments' classes
            return _pickled(failure(error))
        self.left = False
        found: Reply | Failure
        try:
            found = self.handle(call)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - reported by the controller
            found = failure(error)
            self.left = bool(found.collective)
        self.ended = not call.role and call.method == "end"
        return _pickled(found)

    def _out_of_memory(self, call: Call, error: BaseException) -> OutOfMemory:
        """Build the error; inline it names its call, elsewhere ``Failure.error`` does."""
        place = f"{place_of(call, self.rank)}: " if self.alone else ""
        found = OutOfMemory(f"{place}{no_memory(error)}", key=call.operation)
        found.role = role_of(call)
        return found

    def _no_room(self, error: BaseException) -> StorageError | None:
        """Translate the error of a file system that is full, read-only or gone, and torch's DistStoreError, known by
        its name alone, if the rendezvous file cannot be written."""
        if isinstance(error, OSError) and error.errno in REFUSALS:
            where = f"{error.filename}: " if error.filename else ""
            return StorageError(f"{where}{error.strerror}{advice(error)}", key="write")
        full = type(error).__name__ == "DistStoreError" and os.strerror(errno.ENOSPC) in str(error)
        if not full or not self.init_method.startswith("file://"):
            return None
        place = Path(self.init_method.removeprefix("file://")).parent
        message = f"process groups could not meet in {place}: {os.strerror(errno.ENOSPC)}{MORE_ROOM}"
        return StorageError(message, key="session_dir.init_method")

    def control(self, role: str, method: str, arguments: Mapping[str, Any]) -> Any:
        """Answer a control message, in another thread than the calls. Raises WorkerError for other methods."""
        if not role and method in OWN:
            return resolve(OWN[method])(self, **arguments)
        found = offered(self.roles[role]).get(method) if role in self.roles else None
        if found is None or not found.control:
            message = f"role {role}, rank {self.rank}: {method!r} is no control method"
            raise WorkerError(message, key=f"{role}.{method}")
        return getattr(self.roles[role], method)(**arguments)

    def _mark(self, phase: str) -> None:
        self.phase = phase
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
        """Import a factory's module in a separate call, since importing torch takes seconds."""
        importlib.import_module(module)

    def _create(
        self, role: str, factory: str, packed: PickledKwargs, mesh: Mesh, generation: int = 0
    ) -> dict[str, Transfer]:
        """Construct a role, in place of an earlier one, and return the protocols of its methods."""
        _close(self.roles.pop(role, None))
        self._generations[role] = generation
        context = Context(
            role, mesh, self.rank, self.workers, self.store, self.local_rank, self.init_method, self.timeout,
            MappingProxyType(self.roles), generation, self.folder,
        )  # fmt: skip
        self._where[role] = role, mesh.place(self.rank)
        self.roles[role] = resolve(factory)(context, **packed.kwargs)
        return offered(self.roles[role])

    def _trace(self, path: str, attempt: int, planned: bool) -> None:
        """Record the spans of this process under its rank, and its garbage collections, unless the controller records
        here. A later call begins a new attempt."""
        if self._tracing:
            self._tracing = False
            collector.stop()
            recorder.conclude()
        self._events = path
        if not recorder.recording:
            recorder.start(path, rank=self.rank, attempt=attempt)
            self._tracing = True
        if self._tracing:
            collector.start(planned)

    def _origin(self) -> Origin:
        return origin()

    def _clock(self) -> int:
        """Return the current time on the clock of this process's events, in ns."""
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
        """Close roles, newest first, and the trace; return what of the trace could not be written."""
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


def _pickled(answer: Reply | Failure) -> bytes:
    """Pickle an answer; one that cannot be pickled becomes a Failure."""
    try:
        return pickle.dumps(answer, protocol=5)
    except Exception as error:  # noqa: BLE001 - pickling runs code of the answer's class
        return pickle.dumps(failure(error), protocol=5)


def failure(error: BaseException) -> Failure:
    """Convert an exception to a form that can be pickled."""
    text = "".join(traceback.format_exception(error))
    if isinstance(error, TilthError) and _can_be_made_again(type(error)):
        return Failure(type(error), str(error), text, key=error.key)
    return Failure(None, f"{type(error).__name__}: {error}", text, _collective(error))


def _collective(error: BaseException) -> str:
    """Return ``WorkerError.collective``. torch has no class for timeouts that all its backends use."""
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    if not in_collective(files[::-1]):
        return ""
    return "timeout" if _TIMEOUT.search(str(error)) else "broken"


def _can_be_made_again(kind: type[TilthError]) -> bool:
    """True if another process can import the class and construct it from a message."""
    return kind.__init__ is TilthError.__init__ and "<locals>" not in kind.__qualname__
