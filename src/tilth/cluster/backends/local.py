"""The ``local`` backend: worker processes on one machine, Unix sockets, payload in shared memory files.

Nothing here schedules or negotiates: processes are started, each connects, calls go out in order.
"""

import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import IO, Any

import psutil

from tilth.cluster.backends import control
from tilth.cluster.backends.base import Call, Probe, Reply
from tilth.cluster.backends.capacity import check_room, cores, patience
from tilth.cluster.backends.connection import WorkerConnection
from tilth.cluster.backends.probe import NodeProbe
from tilth.cluster.backends.session_dir import SessionDir
from tilth.cluster.backends.store import FolderStore
from tilth.cluster.worker import reaper
from tilth.core.errors import RecipeError, StorageError, WorkerLost
from tilth.core.memory import oom_kills

START = 120.0
"""Seconds in which every worker must have connected, on a machine at rest (``patience``)."""
END = 10.0
"""Seconds that a worker has to end by itself."""


class LocalBackend:
    """Workers as processes of this machine. ``start``: the ranks to start here (None: all); others connect by
    themselves (cluster.local_worker) to ``folder``."""

    def __init__(
        self,
        workers: int,
        timeout: float = 600.0,
        gpus: bool = False,
        *,
        folder: SessionDir | None = None,
        start: Sequence[int] | None = None,
    ) -> None:
        _check(workers, gpus, start is None)
        self.workers = workers
        self.folder = folder or SessionDir.create()
        self.store = FolderStore(self.folder.payload, "controller")
        self.links: list[WorkerConnection] = []
        self.watch = self._watch()
        self._encoded: tuple[Call | None, bytes] = None, b""
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._kills = oom_kills()
        self._keeper = _start_keeper(self.folder)
        self._unkept = self._closed = False
        try:
            with _listen(self.folder.socket) as door:
                for rank in range(workers) if start is None else start:
                    self._start(rank, timeout)
                found = self._accept(door, timeout)
        except BaseException:  # also for an interrupt while they start: no process may be left
            self.close(kill=True)
            raise
        self.links = [
            WorkerConnection(rank, found[rank][0], found[rank][1], partial(self._ending, rank))
            for rank in range(workers)
        ]

    def _watch(self) -> NodeProbe:
        try:
            return NodeProbe(self.folder, self.workers)
        except StorageError:
            self.folder.remove()
            raise

    def _start(self, rank: int, timeout: float) -> None:
        command = [sys.executable, "-u", "-P", "-m", "tilth.cluster.worker.local_worker"]
        arguments = [str(self.folder.path), str(rank), str(self.workers), str(timeout)]
        with open(self.folder.log(rank), "ab") as log:
            process = subprocess.Popen(
                command + arguments,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment(self.workers),
                start_new_session=True,  # an interrupt at the terminal is the controller's to handle
            )
        self._processes[rank] = process
        self._keep(process.pid)

    def _keep(self, pid: int) -> None:
        self._tell(f"{pid}\n")

    def _tell(self, line: str) -> None:
        """A keeper that is lost is told about once, and missed only if this process is killed."""
        pipe: IO[bytes] = self._keeper.stdin  # type: ignore[assignment]
        try:
            pipe.write(line.encode())
            pipe.flush()
        except BrokenPipeError:
            self._keeper_lost(f"(process {self._keeper.pid}) {_told(self._keeper.wait())}")

    def _keeper_lost(self, how: str) -> None:
        if not self._unkept:
            self._unkept = True
            print(f"tilth: the keeper of the workers {how}; the run itself is not affected", file=sys.stderr)

    def _end_keeper(self) -> None:
        self._tell("done\n")
        try:
            self._keeper.communicate(timeout=END)
        except subprocess.TimeoutExpired:
            self._keeper_lost(f"(process {self._keeper.pid}) has not ended within {END:g} s and was killed")
            self._keeper.kill()
            self._keeper.wait()

    def _accept(self, door: socket.socket, timeout: float) -> dict[int, tuple[int, Connection]]:
        """(process id, connection) of every rank. WorkerLost if one ends, or has not come in time."""
        found: dict[int, tuple[int, Connection]] = {}
        limit, key = patience(START), self.folder.key
        until = time.monotonic() + limit
        while len(found) < self.workers:
            try:
                guest, _ = door.accept()
            except TimeoutError:
                self._check_started(found, until, limit)
                continue
            guest.setsockopt(
                socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(timeout), int(timeout % 1 * 1e6))
            )
            connection = Connection(guest.detach())
            deliver_challenge(connection, key)
            answer_challenge(connection, key)
            rank, pid = map(int, connection.recv_bytes().split())
            found[rank] = pid, connection
            if rank not in self._processes:
                self._keep(pid)
        return found

    def _check_started(self, found: dict[int, tuple[int, Connection]], until: float, limit: float) -> None:
        missing = [rank for rank in range(self.workers) if rank not in found]
        ended = [rank for rank in missing if rank in self._processes and self._processes[rank].poll() is not None]
        if ended:
            raise WorkerLost(f"rank {ended[0]}, start: {self._ending(ended[0])}", key="cluster.start")
        if time.monotonic() > until:
            log = self.watch.log_end(missing[0])
            raise WorkerLost(
                f"rank {missing[0]}, start: the worker has not connected within {limit:g} s{log}", key="cluster.start"
            )

    def submit(self, rank: int, call: Call) -> Future[Reply]:
        """Send a call. The same Call for several ranks, one after the other, is encoded once."""
        if self._encoded[0] is not call:
            self._encoded = call, pickle.dumps(call, protocol=5)
        return self.links[rank].submit(call, self._encoded[1])

    def control(self, rank: int, role: str, method: str, arguments: Mapping[str, Any]) -> Any:
        """Ask at the worker's own socket."""
        return control.ask(self.folder.control(rank), rank, role, method, arguments)

    def probe(self, rank: int) -> Probe:
        """What the operating system, the phase board and the worker's signal handler say."""
        return self.watch.probe(rank, self.links[rank].pid)

    def _ending(self, rank: int) -> str:
        """How a worker that has left its connection ended."""
        how, process = "has ended", self._processes.get(rank)
        if process is not None:
            try:
                how = _told(process.wait(END), self._kills)
            except subprocess.TimeoutExpired:
                how = "has closed its connection"
        pid = process.pid if process is not None else self.links[rank].pid
        return self.watch.ending(rank, pid, how)

    def close(self, kill: bool) -> None:
        """End the workers (kill: at once, else they have END seconds after their connection ended) and remove the
        folder with all payload."""
        if self._closed:
            return
        self._closed = True
        if kill:
            self._kill()
        for link in self.links:
            link.close()
        for process in self._processes.values():
            try:
                process.wait(END)
            except subprocess.TimeoutExpired:
                self._kill()
        self._end_keeper()
        self.watch.board.close()
        self.folder.remove()

    def _kill(self) -> None:
        """All workers and what their roles have started."""
        pids = {link.pid for link in self.links} | {process.pid for process in self._processes.values()}
        reaper.kill(psutil.Process(pid) for pid in pids if psutil.pid_exists(pid))


def environment(workers: int) -> dict[str, str]:
    """The environment of each of so many workers of this machine: the controller's own and its import path, threads
    such that they do not exceed the cores together, collectives on the loopback interface. What the user set holds."""
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), "lo")
    ours = {
        "GOMP_SPINCOUNT": "1000",
        "OMP_NUM_THREADS": str(max(1, cores() // workers)),
        "GLOO_SOCKET_IFNAME": loopback,
    }
    return {**ours, **os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}


def _check(workers: int, gpus: bool, ours: bool) -> None:
    """ours: all of them are to be started here; a launcher's are there already."""
    if ours:
        check_room(workers)
    if gpus:
        import torch

        if workers > (there := torch.cuda.device_count()):
            way = f"use at most {there}" if there else "use train.device=cpu"
            message = f"cluster.workers = {workers}, but this machine has {there} GPUs; {way}"
            raise RecipeError(message, key="cluster.workers")


def _listen(address: str) -> socket.socket:
    door = socket.socket(socket.AF_UNIX)
    door.bind(address)
    door.listen(128)
    door.settimeout(0.2)  # so often a worker that ended before it could connect is looked for
    return door


def _start_keeper(folder: SessionDir) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-P", reaper.__file__, str(folder.path)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, env=environment(1), start_new_session=True)


def _told(code: int, kills: int | None = None) -> str:
    """How a process ended. kills: processes that the kernel had killed for want of memory when it started."""
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name
    if name != "SIGKILL":
        return f"was killed by {name}"
    now = oom_kills()
    if kills is None or now is None:
        return f"was killed by {name} (often because memory ran out)"
    if now > kills:
        return f"was killed by {name} (memory ran out: the kernel has killed {now - kills} processes since it started)"
    return f"was killed by {name} (not since memory ran out: the kernel has killed nothing for that)"
