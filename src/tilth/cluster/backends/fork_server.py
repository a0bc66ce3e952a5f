"""Controller's side of the fork server: starts it once, asks it for workers, and hears of their ends."""

import atexit
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from tilth.cluster.backends.capacity import patience
from tilth.core.errors import WorkerLost
from tilth.process.child import Child, how_ended
from tilth.process.output import OutputFile

START = 120.0
"""Seconds to import what workers need, on an idle machine (``patience``)."""
END = 10.0
"""Seconds for the server to end by itself."""
TAIL = 40
"""Lines of its output in an error."""
AT_IMPORT = ("PYTHON", "LD_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "TORCH", "CUDA_", "NVIDIA_", "MALLOC_")
"""Beginnings of variables that libraries read when they are loaded: a change asks for another server."""


class StartedWorker:
    """A worker process. ``wait`` is that of ``subprocess.Popen``; its code is None if nobody could learn it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.ended: Future[int | None] = Future()

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal, or None while it runs."""
        return self.ended.result() if self.ended.done() else None

    def wait(self, timeout: float) -> int | None:
        """Wait for the end; subprocess.TimeoutExpired."""
        try:
            return self.ended.result(timeout)
        except TimeoutError:
            raise subprocess.TimeoutExpired(str(self.pid), timeout) from None


class ServerProcess(Child):
    """The process of a fork server, which lives as long as its owner.

    socket: the owner's end; kept: folder of a supervisor, whose controllers stay in its session.
    """

    def __init__(self, environment: Mapping[str, str], kept: str = "") -> None:
        """environment: in which libraries are loaded."""
        self.socket, theirs = socket.socketpair()
        self._log = OutputFile()
        with theirs:
            super().__init__(
                [*command(environment), *([kept] if kept else [])],
                {**environment, "OMP_NUM_THREADS": "1"},
                stdin=theirs.fileno(),
                stdout=self._log,
                stderr=self._log,
                session=not kept,
            )

    def ending(self) -> str:
        """Describe how it ended, with the end of its output."""
        how = how_ended(self.process.wait())
        return f"the fork server of the workers (process {self.pid}) {how}; its output ends:\n{self._log.tail(TAIL)}"

    def close(self) -> None:
        """End the server; its workers go on."""
        with suppress(OSError):  # it has ended
            self.socket.shutdown(socket.SHUT_RDWR)
        self.end(END)


class ForkServer:
    """A fork server as one controller sees it. process: None if its supervisor owns it."""

    def __init__(
        self, environment: Mapping[str, str], connection: socket.socket, process: ServerProcess | None = None
    ) -> None:
        """environment: in which libraries were loaded."""
        self.key = loaded_by(environment)
        self._socket, self._process, self._lock = connection, process, threading.Lock()
        self.alive = True
        """True while it answers."""
        self._started: SimpleQueue[StartedWorker | None] = SimpleQueue()
        self._living: dict[int, StartedWorker] = {}
        threading.Thread(target=self._read, name="fork-server", daemon=True).start()

    def start(self, request: Mapping[str, Any]) -> StartedWorker | None:
        """Start a worker; None if the server has ended, or does not answer."""
        with self._lock:
            try:
                self._socket.sendall(json.dumps(request).encode() + b"\n")
                found = self._started.get(timeout=patience(START))
            except (OSError, Empty):
                found = None
            self.alive = found is not None
            return found

    def _read(self) -> None:
        """Read what the server reports; afterwards nobody knows how its workers end."""
        with suppress(ConnectionResetError), self._socket.makefile("rb") as lines:
            for line in lines:
                message = json.loads(line)
                if "started" in message:
                    worker = self._living[message["started"]] = StartedWorker(message["started"])
                    self._started.put(worker)
                else:
                    self._living.pop(message["ended"]).ended.set_result(message["code"])
        self.alive = False
        for worker in self._living.values():
            worker.ended.set_result(None)
        self._started.put(None)

    def ending(self) -> str:
        """Describe how it ended."""
        return self._process.ending() if self._process is not None else "the fork server of the supervisor has ended"

    def close(self) -> None:
        """Leave the server, and end it if this process owns it; its workers go on."""
        with suppress(OSError):  # it has ended
            self._socket.shutdown(socket.SHUT_RDWR)
        if self._process is not None:
            self._process.close()


_servers: list[ForkServer] = []


def start_worker(arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> StartedWorker:
    """Start a worker that prints to ``log``. Raises WorkerLost if the server cannot be started."""
    request = {
        "arguments": list(arguments),
        "environment": dict(environment),
        "path": [path or os.getcwd() for path in sys.path],
        "folder": os.getcwd(),
        "log": str(log),
    }
    for _ in range(2):  # it may just have ended, for want of work
        one = fork_server(environment)
        if (found := one.start(request)) is not None:
            return found
        one.close()
    raise WorkerLost(one.ending(), key="cluster.start")


def fork_server(environment: Mapping[str, str]) -> ForkServer:
    """Return the server of this process, a new one if it has none or libraries would load differently."""
    for one in list(_servers):
        if not one.alive or one.key != loaded_by(environment):
            _servers.remove(one)
            one.close()
    if not _servers:
        process = ServerProcess(environment)
        _servers.append(ForkServer(environment, process.socket, process))
    return _servers[0]


def join(connection: socket.socket, environment: Mapping[str, str]) -> None:
    """Use a server that a supervisor owns. environment: as of ``fork_server``."""
    _servers.append(ForkServer(environment, connection))


def command(environment: Mapping[str, str]) -> list[str]:
    """Return the command of a fork server that is to run in this environment."""
    return [sys.executable, "-u", "-P", "-m", "tilth.cluster.worker.fork_server"]


def loaded_by(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that libraries read when they are loaded."""
    each = ("OMP_NUM_THREADS", "PYTHONPATH")  # a worker's own
    return {name: value for name, value in environment.items() if name.startswith(AT_IMPORT) and name not in each}


@atexit.register
def _end() -> None:
    while _servers:
        _servers.pop().close()


def _forget() -> None:
    """Leave the server to the parent: a forked process makes its own."""
    _servers.clear()


os.register_at_fork(after_in_child=_forget)
