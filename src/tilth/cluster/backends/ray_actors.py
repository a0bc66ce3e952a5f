"""Actors of the ``ray`` backend: a NodeAgent per node, which owns payload and probes workers, and the workers.

Both are plain classes, which ``backends.ray`` turns into actors; Ray is imported when one of them runs.
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
"""Seconds for processes to vanish; the system frees their memory first."""


class NodeAgent:
    """Agent of a node: session directory, payload columns, state of its workers from outside.

    It owns its columns in Ray's object store, so they outlive the worker that put them.
    """

    def __init__(self, workers: int) -> None:
        self._folder = SessionDir.create()
        self._watch = NodeProbe(self._folder, workers)
        self._lock = threading.Lock()
        self._columns: dict[str, tuple[Any, int]] = {}  # reference, bytes

    def folder(self) -> str:
        """Return the path of the session directory on this node."""
        return str(self._folder.path)

    def free_port(self) -> int:
        """Return a free port."""
        with socket.socket() as door:
            door.bind(("", 0))
            return int(door.getsockname()[1])

    def keep(self, key: str, column: Jagged, nbytes: int) -> None:
        """Take ownership of a column."""
        import ray

        reference = ray.put(column)
        with self._lock:
            self._columns[key] = reference, nbytes

    def find(self, key: str) -> list[Any]:
        """Return [reference to a column], or [] if it was released."""
        with self._lock:
            return [self._columns[key][0]] if key in self._columns else []

    def release(self, prefix: str) -> None:
        with self._lock:
            self._columns = {k: column for k, column in self._columns.items() if not k.startswith(prefix)}

    def held(self) -> dict[str, int]:
        with self._lock:
            return {key: nbytes for key, (_, nbytes) in self._columns.items()}

    def probe(self, rank: int, pid: int) -> Probe:
        return self._watch.probe(rank, pid)

    def control(self, rank: int, role: str, method: str, arguments: Mapping[str, Any]) -> Any:
        return control.ask(self._folder.control(rank), rank, role, method, arguments)

    def ending(self, rank: int, pid: int, how: str) -> str:
        return self._watch.ending(rank, pid, how)

    def end(self, pids: Sequence[int], kill: bool) -> None:
        """Wait for the workers, kill those that stay (kill: all, at once) and their children, remove the directory."""
        workers = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
        _, left = psutil.wait_procs(workers, 0 if kill else GONE)
        reaper.kill(left)
        psutil.wait_procs(left, GONE)
        self._watch.board.close()
        self._folder.remove()


class RayWorker:
    """Process of one rank: executes calls in order, one at a time."""

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
        """Return the process id, once the worker is ready."""
        return os.getpid()

    def answer(self, data: bytes) -> bytes:
        """Execute a pickled Call; return a pickled Reply or Failure."""
        try:
            call = pickle.loads(data)
        except Exception as error:  # noqa: BLE001 - unpickling runs code of the arguments' classes
            return encoded(failure(error))
        return encoded(self._host.answer(call))


def _print_to(log: Path) -> None:
    """Redirect the output of this process to a file, which its node quotes if the process is lost."""
    with open(log, "ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def interface_for(init_method: str) -> str:
    """Return the network interface for collectives: loopback on one node, else the one with this node's address in the
    cluster; "" if none has it."""
    address = "127.0.0.1" if init_method.startswith("file:") else _own_address()
    wanted = "127.0.0.1" if address.startswith("127.") else address
    interfaces = psutil.net_if_addrs().items()
    return next((name for name, found in interfaces if any(a.address == wanted for a in found)), "")


def _own_address() -> str:
    import ray

    return str(ray.util.get_node_ip_address())


class RayStore:
    """Payload in Ray's object store: a column is owned by the NodeAgent of its node and read from any node.

    machines: NodeAgent actors; home: index of this process's node; writer: makes keys unique.
    """

    def __init__(self, machines: Sequence[Any], home: int, writer: str) -> None:
        self.lease = ""
        self._machines = list(machines)
        self._home = home
        self._writer = writer
        self._numbers = count()

    def put(self, column: str, data: Jagged) -> Handle:
        key = f"{self._home}/{column_key(self.lease, column, self._writer, next(self._numbers))}"
        nbytes = data.values.nbytes + data.offsets.nbytes
        with span("payload.put", bytes=nbytes):
            self._ask(key, "keep", key, data, nbytes)
        return Handle(key, nbytes)

    def get(self, handle: Handle) -> Jagged:
        """Return a writable copy of a column. Raises KeyError if it was released."""
        with span("payload.get", bytes=handle.nbytes):
            found = self._ask(handle.key, "find", handle.key)
            if not found:
                raise KeyError(handle.key)
            column: Jagged = _resolved(found[0], handle.key)
            return Jagged(column.values.copy(), column.offsets.copy())

    def release(self, lease: str) -> None:
        self._all([machine.release.remote(f"{home}/{lease}~") for home, machine in enumerate(self._machines)])

    def held(self) -> dict[str, int]:
        tables = self._all([machine.held.remote() for machine in self._machines])
        return {key: nbytes for table in tables if table is not None for key, nbytes in table.items()}

    def _ask(self, key: str, method: str, *args: Any) -> Any:
        machine = self._machines[int(key.partition("/")[0])]
        return _resolved(getattr(machine, method).remote(*args), key)

    def _all(self, references: Sequence[Any]) -> list[Any]:
        """Return the answers of the NodeAgents; None for one that is gone with its columns."""
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
