"""Protocol and messages of a backend: N workers that execute calls in order, and a payload store."""

import pickle
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import cloudpickle

from tilth.core.batch import Store
from tilth.core.errors import OutOfMemory, TilthError, WorkerError, WorkerLost
from tilth.process.by_value import dumps

if TYPE_CHECKING:
    from tilth.cluster.backends.ray_files import RayFiles

OF_ROLES = ("import", "create")
"""Calls to the worker itself whose first argument is a role."""


@dataclass(frozen=True)
class Call:
    """One message to one worker. Role "" is the worker itself (import, create, trace, end)."""

    role: str
    method: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    answer: bool = True
    """False: the reply's value is None, and another rank counts its tokens."""
    step: int = -1
    """Step of the controller, for the trace; -1: none."""
    number: int = -1
    """Number of the controller's call, equal in the traces of both sides; -1: a call of the cluster itself."""
    lease: str = ""
    """Lease of the payload that the call puts; "": none."""
    least: float = 0.0
    """Seconds that it may take even if ``cluster.timeout`` is less."""
    generation: int = 0
    """Generation of its role."""
    patient: bool = False
    """True: it may work for longer than ``guard.hang_after`` without progress."""

    @property
    def name(self) -> str:
        """Name on the status board while it runs: "policy.update", "create policy"."""
        if self.role:
            return f"{self.role}.{self.method}"
        return f"{self.method} {self.args[0]}" if self.method in OF_ROLES else self.method

    @property
    def operation(self) -> str:
        """Name in byte counts and error keys: "policy.update", "policy.create", "cluster.clock"."""
        return f"{role_of(self) or 'cluster'}.{self.method}"


class Reply(NamedTuple):
    """Answer of a worker."""

    value: Any
    sums: dict[str, list[float]]
    """Sums of the spans that ended during the call, from ``recorder.rows``."""
    sent: int = 0
    """Bytes of the call; the backend sets them when the answer has arrived."""
    received: int = 0
    """Bytes of the answer."""


class Failure(NamedTuple):
    """An exception that travels from a worker to the controller. kind: its class if a TilthError, else None."""

    kind: type[TilthError] | None
    message: str
    traceback: str
    collective: str = ""
    """``WorkerError.collective``."""
    key: str = ""
    """``TilthError.key``."""

    def error(self, call: Call, rank: int) -> TilthError:
        """Return the exception to raise in the controller: ``kind``, or a WorkerError with the worker's traceback."""
        where = place_of(call, rank)
        if self.kind is None:
            found = WorkerError(f"{where}: {self.message}\n{self.traceback}", key=call.operation)
            found.collective, found.ranks = self.collective, (rank,)
            return found
        error = self.kind(f"{where}: {self.message}", key=self.key)
        error.ranks = (rank,)
        if isinstance(error, OutOfMemory):
            error.role = role_of(call)
        error.add_note(f"in the worker:\n{self.traceback}")
        return error


def settle(future: "Future[Reply]", call: Call, rank: int, sent: int, data: bytes) -> None:
    """Resolve the future of a call of ``sent`` bytes with its answer, a pickled Reply or Failure."""
    try:
        answer = pickle.loads(data)
    except Exception as error:  # noqa: BLE001 - unpickling runs code of the answer's class
        answer = WorkerError(f"{place_of(call, rank)}: its answer cannot be read here: {error}", key=call.operation)
    if isinstance(answer, Reply):
        future.set_result(answer._replace(sent=sent, received=len(data)))
    else:
        future.set_exception(answer if isinstance(answer, TilthError) else answer.error(call, rank))


def role_of(call: Call) -> str:
    """Return the role that a call addresses or makes; "" for a call of the cluster itself."""
    return call.role or (str(call.args[0]) if call.method in OF_ROLES else "")


def place_of(call: Call, rank: int) -> str:
    """Return the beginning of an error message: "role policy, rank 1, update"."""
    role = role_of(call)
    return f"role {role}, rank {rank}, {call.method}" if role else f"rank {rank}, {call.method}"


def lost(call: Call, rank: int, how: str, ranks: tuple[int, ...]) -> WorkerLost:
    """Return the error of a call whose worker was lost. ranks: those that were lost with it."""
    error = WorkerLost(f"{place_of(call, rank)}: {how}", key=call.operation)
    error.ranks = ranks
    return error


@dataclass(frozen=True)
class Probe:
    """State of a worker, read from outside: correct for a stopped process and for one that holds the GIL."""

    rank: int
    pid: int
    state: str
    """State from the operating system (running, sleeping, stopped, zombie ...), or "gone"."""
    phase: str
    """Call and its duration so far, "policy.update (for 3.1 s)"; "" between calls."""
    stack: str
    """Stacks of all threads; of a process that has ended, those with which an abort ended it; "" if unavailable."""
    spans: Sequence[tuple[str, int]] = ()
    """(operation, micro_batch) of the open spans of its call, the outermost first; (): none, or unknown."""


class Copied(NamedTuple):
    """Copies of files on other nodes. seconds: of the slowest node; problem: why some are not there, or ""."""

    nbytes: int
    seconds: float
    problem: str


class Backend(Protocol):
    """N workers. Each executes its calls in order of submission, one at a time, and answers control messages meanwhile.

    ``open_cluster`` constructs it as ``Backend(workers, timeout=, address=, gpus=)``: seconds per call, the address of
    an existing cluster ("": none), whether each worker gets a GPU. The constructor returns when all workers are ready.
    """

    @property
    def workers(self) -> int:
        """Number of workers; ranks are 0 to workers - 1."""

    @property
    def store(self) -> Store:
        """Payload store of the controller's process."""

    def submit(self, rank: int, call: Call) -> Future[Reply]:
        """Send a call and return at once. The future fails with the worker's TilthError, WorkerError or WorkerLost.

        Raises TimeoutError if the message could not be sent within the limit.
        """

    def control(self, rank: int, role: str, method: str, arguments: Mapping[str, Any]) -> Any:
        """Run a control method of a role now, beside its calls. Raises WorkerError, CallTimeout without an answer,
        WorkerLost."""

    def probe(self, rank: int) -> Probe:
        """Read a worker's state from outside, in at most about a second."""

    def close(self, kill: bool) -> None:
        """End all workers and free all payload; idempotent. kill: at once, else the workers may finish."""


@runtime_checkable
class RepairableBackend(Backend, Protocol):
    """A backend whose workers can be watched and replaced, so that a run survives the loss of one.

    One whose ``beside`` is True (without it: False) lets other threads call ``replace`` and ``kill`` while workers of
    other ranks are called, and ``kill`` while ``replace`` waits for a worker of the same rank, which ends both.
    """

    def life(self, rank: int) -> tuple[int, int]:
        """Return two numbers, known without asking the worker: one grows with the work of its calls, one with time
        while its process runs (and, in a patient call, waits or gets on)."""

    def kill(self, ranks: Iterable[int]) -> None:
        """Kill these workers at once with the processes that their roles have started."""

    def replace(self, ranks: Sequence[int], evicted: Collection[int] = ()) -> None:
        """Kill these workers, if they live, and start others in their place; return when they are ready.

        evicted: those whose nodes are not used again. Raises WorkerLost if one does not start.
        """

    def nodes(self) -> tuple[Mapping[int, str], Collection[str]]:
        """Return rank -> node, and the nodes whose workers find a place on others: none if there is one node."""

    @property
    def scratch(self) -> str:
        """Folder in shared memory that outlives workers, under this path on each node and here; "": none."""

    @property
    def files(self) -> "RayFiles | None":
        """Files of the scratch folders; None if there is one node."""


class PickledKwargs:
    """Keyword arguments of a factory, pickled by cloudpickle: lambdas and functions of ``__main__`` are allowed."""

    def __init__(self, kwargs: Mapping[str, Any]) -> None:
        self.kwargs = dict(kwargs)

    def __reduce__(self) -> tuple[Callable[[bytes], "PickledKwargs"], tuple[bytes]]:
        return _unpack, (dumps(self.kwargs),)


def _unpack(data: bytes) -> PickledKwargs:
    return PickledKwargs(cloudpickle.loads(data))
