"""What a backend is: a number of workers that take calls in order, and a store."""

import pickle
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import cloudpickle

from tilth.core.batch import Store
from tilth.core.errors import OutOfMemory, TilthError, WorkerError

OF_ROLES = ("import", "create")
"""Calls to the worker itself whose first argument is the role that they are for."""


@dataclass(frozen=True)
class Call:
    """One message to one worker. Role "" is the worker itself (import, create, trace, end)."""

    role: str
    method: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    answer: bool = True
    """Whether the value is wanted; without it the reply's is None, and its tokens are counted by another rank."""
    step: int = -1
    """The controller's step that it belongs to, for the trace; -1: none."""
    number: int = -1
    """Which call of the controller it is part of: the same in the traces of both sides; -1: of the cluster's own."""
    lease: str = ""
    """That of the payload that is put while it is executed; "": none."""
    least: float = 0.0
    """Seconds that it may take even where ``cluster.timeout`` is less."""
    generation: int = 0
    """That of the role which it is for."""

    @property
    def name(self) -> str:
        """What the phase board says while it runs: "policy.update", "create policy"."""
        if self.role:
            return f"{self.role}.{self.method}"
        return f"{self.method} {self.args[0]}" if self.method in OF_ROLES else self.method

    @property
    def operation(self) -> str:
        """Name under which its bytes are counted: "policy.update", "policy.create", "cluster.clock"."""
        return f"{role_of(self) or 'cluster'}.{self.method}"


class Reply(NamedTuple):
    """The answer of a worker: the value, and the sums of the spans that ended during the call."""

    value: Any
    sums: dict[str, list[float]]
    """As ``recorder.rows`` gives them."""
    sent: int = 0
    """Bytes of the call as it travelled to the worker; the backend notes them when the answer is there."""
    received: int = 0
    """Bytes of the answer."""


class Failure(NamedTuple):
    """An exception of a worker on its way to the controller. kind: its class if that is a TilthError, else None."""

    kind: type[TilthError] | None
    message: str
    traceback: str
    collective: str = ""
    """As in WorkerError."""
    key: str = ""
    """As in TilthError."""

    def error(self, call: Call, rank: int) -> TilthError:
        """The exception to raise in the controller: the same class, or a WorkerError with the worker's traceback."""
        where = place_of(call, rank)
        if self.kind is None:
            found = WorkerError(f"{where}: {self.message}\n{self.traceback}", key=call.operation)
            found.collective = self.collective
            return found
        error = self.kind(f"{where}: {self.message}", key=self.key)
        if isinstance(error, OutOfMemory):
            error.role = role_of(call)
        error.add_note(f"in the worker:\n{self.traceback}")
        return error


def settle(future: "Future[Reply]", call: Call, rank: int, sent: int, data: bytes) -> None:
    """Complete a call of ``sent`` bytes with its answer, a pickled Reply or Failure."""
    try:
        answer = pickle.loads(data)
    except Exception as error:  # noqa: BLE001 - whatever an answer's class raises; the caller is told
        answer = WorkerError(f"{place_of(call, rank)}: its answer cannot be read here: {error}", key=call.operation)
    if isinstance(answer, Reply):
        future.set_result(answer._replace(sent=sent, received=len(data)))
    else:
        future.set_exception(answer if isinstance(answer, TilthError) else answer.error(call, rank))


def role_of(call: Call) -> str:
    """The role that a call is of, or for; "" for one of the cluster's own."""
    return call.role or (str(call.args[0]) if call.method in OF_ROLES else "")


def place_of(call: Call, rank: int) -> str:
    """ "role policy, rank 1, update"."""
    role = role_of(call)
    return f"role {role}, rank {rank}, {call.method}" if role else f"rank {rank}, {call.method}"


@dataclass(frozen=True)
class Probe:
    """What a worker does, seen from outside: right for a stopped process and for one that holds the GIL."""

    rank: int
    pid: int
    state: str
    """As the operating system says (running, sleeping, stopped, zombie, ...), or "gone"."""
    phase: str
    """The call and how long it runs, "policy.update (for 3.1 s)", or "" between calls."""
    stack: str
    """Stacks of all threads, "" if they could not be had."""


class Backend(Protocol):
    """N workers. Each executes the calls that it was sent in order, one at a time, and answers control
    messages meanwhile."""

    @property
    def workers(self) -> int:
        """Their number; ranks are 0 to workers - 1."""
        ...

    @property
    def store(self) -> Store:
        """The payload store, as the controller sees it."""
        ...

    def submit(self, rank: int, call: Call) -> Future[Reply]:
        """Send a call and return at once. The future fails with a TilthError: the worker's own class, WorkerError or
        WorkerLost. TimeoutError if the message itself could not be sent within the limit."""
        ...

    def control(self, rank: int, role: str, method: str, arguments: Mapping[str, Any]) -> Any:
        """Ask a role on a worker something at once, beside its calls. Raises WorkerError, or WorkerLost: no answer."""
        ...

    def probe(self, rank: int) -> Probe:
        """Look at a worker from outside; takes at most about a second."""
        ...

    def close(self, kill: bool) -> None:
        """Free every process and all payload. kill: at once; else the workers may finish. Twice is fine."""
        ...


class PickledKwargs:
    """Keyword arguments of a factory. They travel by cloudpickle, so functions of ``__main__`` and lambdas can."""

    def __init__(self, kwargs: Mapping[str, Any]) -> None:
        self.kwargs = dict(kwargs)

    def __reduce__(self) -> tuple[Callable[[bytes], "PickledKwargs"], tuple[bytes]]:
        return _unpack, (cloudpickle.dumps(self.kwargs),)


def _unpack(data: bytes) -> PickledKwargs:
    return PickledKwargs(cloudpickle.loads(data))
