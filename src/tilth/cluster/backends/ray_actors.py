"""What runs inside Ray: one Machine a node, which keeps payload and looks at the workers there, and the workers.

Both are plain classes; ``cluster.ray`` makes actors of them. Nothing of Ray is imported before one of them runs.
"""

import os
import pickle
import socket
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import psutil

from tilth.cluster.backends import control
from tilth.cluster.backends.base import Probe
from tilth.cluster.backends.probe import NodeProbe, show_stacks
from tilth.cluster.backends.session_dir import SessionDir
from tilth.cluster.backends.status import StatusBoard
from tilth.cluster.backends.store import column_key, column_of
from tilth.cluster.worker import reaper
from tilth.cluster.worker.executor import Executor, failure
from tilth.cluster.worker.local_worker import encoded
from tilth.core.batch import Handle, Jagged
from tilth.core.errors import StorageError
from tilth.trace.spans import span

GONE = 5.0
"""Seconds that processes have to vanish: the system frees their memory first."""


class NodeAgent:
    """One a node: its private folder, the columns that were put there, and the view of its workers from outside.

    It owns its columns in Ray's object store, so they outlive the worker that made them.
    """

    def __init__(self, workers: int) -> None:
        self._folder = SessionDir.create()
        self._watch = NodeProbe(self._folder, workers)
        self._lock = threading.Lock()
        self._columns: dict[str, tuple[Any, int]] = {}  # reference, bytes

    def folder(self) -> str:
        """Path of the private folder, on this machine only."""
        return str(self._folder.path)

    def free_port(self) -> int:
        """A port that nobody uses now."""
        with socket.socket() as door:
            door.bind(("", 0))
            return int(door.getsockname()[1])

    def keep(self, key: str, column: Jagged, nbytes: int) -> None:
        """Own a column from now on."""
        import ray

        reference = ray.put(column)
        with self._lock:
            self._columns[key] = reference, nbytes

    def find(self, key: str) -> list[Any]:
        """[the reference to a column], or [] if it is not there (any more)."""
        with self._lock:
            return [self._columns[key][0]] if key in self._columns else []

    def release(self, prefix: str) -> None:
        """Forget every column whose key begins so."""
        with self._lock:
            self._columns = {k: column for k, column in self._columns.items() if not k.startswith(prefix)}

    def held(self) -> dict[str, int]:
        """Key -> bytes of the columns here."""
        with self._lock:
            return {key: nbytes for key, (_, nbytes) in self._columns.items()}

    def probe(self, rank: int, pid: int) -> Probe:
        """Look at a worker of this machine; takes at most about a second."""
        return self._watch.probe(rank, pid)

    def control(self, rank: int, role: str, method: str, arguments: Mapping[str, Any]) -> Any:
        """Pass a control message on to a worker of this machine."""
        return control.ask(self._folder.control(rank), rank, role, method, arguments)

    def ending(self, rank: int, pid: int, how: str) -> str:
        """A lost worker of this machine in words."""
        return self._watch.ending(rank, pid, how)

    def end(self, pids: Sequence[int], kill: bool) -> None:
        """See the workers off and remove the folder. Those that do not go by themselves (kill: all, at once, even
        stopped ones) are killed, with all that they have started."""
        workers = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
        _, left = psutil.wait_procs(workers, 0 if kill else GONE)
        reaper.kill(left)
        psutil.wait_procs(left, GONE)
        self._watch.board.close()
        self._folder.remove()


class RayWorker:
    """The process of one rank: takes calls in order, one at a time."""

    def __init__(
        self, rank: int, workers: int, local_rank: int, init_method: str, timeout: float, folder: str, store: "RayStore"
    ) -> None:
        place = SessionDir(Path(folder))
        _print_to(place.log(rank))
        show_stacks(place.stack(rank))
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
        if interface := interface_for(init_method):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        note = partial(StatusBoard(place.board).mark, rank)
        self._host = Executor(
            rank, workers, store, local_rank=local_rank, init_method=init_method, timeout=timeout, note=note
        )
        control.serve(place.control(rank), self._host.control)

    def pid(self) -> int:
        """Its process, once it is ready."""
        return os.getpid()

    def answer(self, data: bytes) -> bytes:
        """Execute one pickled Call. The answer is a pickled Reply or Failure."""
        try:
            call = pickle.loads(data)
        except Exception as error:  # noqa: BLE001 - an argument's class may raise anything; the controller is told
            return encoded(failure(error))
        return encoded(self._host.answer(call))


def _print_to(log: Path) -> None:
    """Send what this process prints to a file that its machine can quote when the process is lost."""
    with open(log, "ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def interface_for(init_method: str) -> str:
    """The network interface for collectives: loopback where all workers meet on one machine, else the one that has
    this machine's address in the cluster; "" where that cannot be told."""
    address = "127.0.0.1" if init_method.startswith("file:") else _own_address()
    wanted = "127.0.0.1" if address.startswith("127.") else address
    interfaces = psutil.net_if_addrs().items()
    return next((name for name, found in interfaces if any(a.address == wanted for a in found)), "")


def _own_address() -> str:
    import ray

    return str(ray.util.get_node_ip_address())


class RayStore:
    """Payload in Ray's object store. What a process puts is owned by the Machine of its node and read from any node.

    machines: one actor a node; home: the number of this process's own; writer: makes keys unique.
    """

    def __init__(self, machines: Sequence[Any], home: int, writer: str) -> None:
        self.lease = ""
        self._machines = list(machines)
        self._home = home
        self._writer = writer
        self._numbers = count()

    def put(self, column: str, data: Jagged) -> Handle:
        """Keep a column. StorageError if the object store is full or its keeper is gone."""
        key = f"{self._home}/{column_key(self.lease, column, self._writer, next(self._numbers))}"
        nbytes = data.values.nbytes + data.offsets.nbytes
        with span("payload.put", bytes=nbytes):
            self._ask(key, "keep", key, data, nbytes)
        return Handle(key, nbytes)

    def get(self, handle: Handle) -> Jagged:
        """A column as it was put: a copy, which may be written to. KeyError if it was released."""
        with span("payload.get", bytes=handle.nbytes):
            found = self._ask(handle.key, "find", handle.key)
            if not found:
                raise KeyError(handle.key)
            column: Jagged = _resolved(found[0], handle.key)
            return Jagged(column.values.copy(), column.offsets.copy())

    def release(self, lease: str) -> None:
        """Forget everything that any process has put under a lease."""
        self._all([machine.release.remote(f"{home}/{lease}~") for home, machine in enumerate(self._machines)])

    def held(self) -> dict[str, int]:
        """Key -> bytes of all columns, on all nodes."""
        tables = self._all([machine.held.remote() for machine in self._machines])
        return {key: nbytes for table in tables if table is not None for key, nbytes in table.items()}

    def _ask(self, key: str, method: str, *args: Any) -> Any:
        machine = self._machines[int(key.partition("/")[0])]
        return _resolved(getattr(machine, method).remote(*args), key)

    def _all(self, references: Sequence[Any]) -> list[Any]:
        """The answers of the machines; None of one that is gone, with all that it held."""
        import ray

        answers = []
        for reference in references:
            try:
                answers.append(ray.get(reference))
            except ray.exceptions.RayActorError:
                answers.append(None)
        return answers


def _resolved(reference: Any, key: str) -> Any:
    import ray

    try:
        return ray.get(reference)
    except ray.exceptions.RayError as error:
        first = str(error).strip().splitlines()[0]
        message = f"payload column {key} is out of reach in Ray's object store: {first}"
        raise StorageError(message, key=column_of(key)) from None
