"""The ``inline`` backend: one worker in this process, plain calls, breakpoints work."""

import os
import pickle
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from itertools import count
from typing import Any

import cloudpickle

from tilth.cluster.backends.base import Call, PickledKwargs, Probe, Reply
from tilth.cluster.worker.executor import Executor
from tilth.core.batch import Handle, Jagged
from tilth.core.errors import RecipeError


class InlineStore:
    """Payload in a dictionary of this process."""

    def __init__(self) -> None:
        self.lease = ""
        self._columns: dict[str, Jagged] = {}
        self._numbers = count()

    def put(self, column: str, data: Jagged) -> Handle:
        handle = Handle(f"{self.lease}~{column}-{next(self._numbers)}", data.values.nbytes + data.offsets.nbytes)
        self._columns[handle.key] = data
        return handle

    def get(self, handle: Handle) -> Jagged:
        return self._columns[handle.key]

    def release(self, *leases: str) -> None:
        for key in [key for key in self._columns if key.partition("~")[0] in leases]:
            del self._columns[key]

    def held(self) -> dict[str, int]:
        return {key: column.values.nbytes + column.offsets.nbytes for key, column in self._columns.items()}


class _Counted:
    """A file that counts the bytes written to it."""

    def __init__(self) -> None:
        self.nbytes = 0

    def write(self, data: bytes) -> int:
        self.nbytes += len(data)
        return len(data)

    def buffer(self, buffer: pickle.PickleBuffer) -> None:
        self.nbytes += buffer.raw().nbytes


def pickled_size(message: Call | Reply) -> int:
    """Return the bytes of a pickled message, to within a few per array; no array is copied.

    A message that cannot be pickled counts up to where pickling failed.
    """
    counted = _Counted()
    kwargs = [a.kwargs for a in message.args if isinstance(a, PickledKwargs)] if isinstance(message, Call) else []
    pickler = cloudpickle.Pickler if kwargs else pickle.Pickler
    with suppress(pickle.PicklingError, TypeError, AttributeError, ValueError):
        pickler(counted, 5, buffer_callback=counted.buffer).dump(kwargs or message)
    return counted.nbytes


class InlineBackend:
    """One worker in this process: a call runs when it is submitted and raises its own exception."""

    def __init__(self, workers: int = 1, *, timeout: float = 600.0, address: str = "", gpus: bool = False) -> None:
        if workers != 1:
            message = f"cluster.workers = {workers}: backend inline has one worker; use cluster.backend=local"
            raise RecipeError(message, key="cluster.workers")
        self.workers = workers
        self.store = InlineStore()
        self.host = Executor(0, 1, self.store, timeout=timeout, alone=True)

    def submit(self, rank: int, call: Call) -> Future[Reply]:
        """Run a call now. The reply states the bytes that another backend would send."""
        future: Future[Reply] = Future()
        sent = pickled_size(call)
        reply = self.host.handle(call)
        future.set_result(reply._replace(sent=sent, received=pickled_size(reply)))
        return future

    def control(self, rank: int, role: str, method: str, arguments: Mapping[str, Any]) -> Any:
        """Answer in the calling thread."""
        return self.host.control(role, method, arguments)

    def probe(self, rank: int) -> Probe:
        return Probe(rank, os.getpid(), "running", self.host.phase, "")

    def close(self, kill: bool) -> None:
        """Free nothing: the payload goes with the store."""
