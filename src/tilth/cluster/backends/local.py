"""The ``local`` backend: worker processes of one machine, Unix sockets, payload in files of shared memory."""

import os
import pickle
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import IO, Any

from tilth.cluster.backends import control
from tilth.cluster.backends.base import Call, Probe, Reply, lost, settle
from tilth.cluster.backends.capacity import check_room, cores, patience
from tilth.cluster.backends.fork_server import StartedWorker, start_worker
from tilth.cluster.backends.probe import NodeProbe
from tilth.cluster.backends.session_dir import SessionDir
from tilth.cluster.backends.store import FolderStore
from tilth.cluster.worker import reaper
from tilth.core.errors import RecipeError, StorageError, WorkerLost
from tilth.core.memory import oom_kills
from tilth.process.child import Child, how_ended

START = 120.0
"""Seconds in which all workers must connect, on an idle machine (``patience``)."""
END = 10.0
"""Seconds for a worker to end by itself."""


class WorkerConnection:
    """Sends calls and matches their answers, which arrive in the same order, in a reader thread.

    ending: returns how the worker ended, once it has.
    """

    def __init__(self, rank: int, pid: int, connection: Connection, ending: Callable[[], str]) -> None:
        self.rank, self.pid = rank, pid
        self._connection = connection
        self._ending = ending
        self._lock = threading.Lock()
        self._pending: deque[tuple[Call, int, Future[Reply]]] = deque()
        self._lost = ""
        self._reader = threading.Thread(target=self._read, name=f"worker-{rank}", daemon=True)
        self._reader.start()

    def submit(self, call: Call, data: bytes) -> Future[Reply]:
        """Send a pickled call. Raises TimeoutError if the worker reads nothing within the limit of the socket."""
        future: Future[Reply] = Future()
        with self._lock:
            if self._lost:
                future.set_exception(self._error(call))
                return future
            self._pending.append((call, len(data), future))
            try:
                self._connection.send_bytes(data)
            except BlockingIOError:
                raise TimeoutError(f"worker {self.rank} takes no message") from None
            except OSError:  # the worker is gone: the reader fails what is pending
                return future
        return future

    def _read(self) -> None:
        ready = select.poll()
        ready.register(self._connection.fileno(), select.POLLIN)
        process = _process_handle(self.pid)
        if process is not None:  # a child of the worker may keep the connection open when the worker is dead
            ready.register(process, select.POLLIN)
        with suppress(EOFError, OSError):  # the end of the connection is the end of the worker
            while self._connection.fileno() in dict(ready.poll()) or self._connection.poll():
                data = self._connection.recv_bytes()
                call, sent, future = self._pending.popleft()
                settle(future, call, self.rank, sent, data)
        if process is not None:
            os.close(process)
        self._fail_pending()

    def _fail_pending(self) -> None:
        how = self._ending()
        with self._lock:
            self._lost = how
            pending, self._pending = list(self._pending), deque()
        for call, _, future in pending:
            future.set_exception(self._error(call))

    def _error(self, call: Call) -> WorkerLost:
        return lost(call, self.rank, self._lost, (self.rank,))

    def close(self) -> None:
        """Close the connection, which ends the worker, and join the reader."""
        if self._connection.closed:
            return
        with (
            socket.socket(fileno=os.dup(self._connection.fileno())) as both,
            suppress(OSError),
        ):  # the worker may be gone
            both.shutdown(socket.SHUT_RDWR)
        self._reader.join()
        self._connection.close()


def _process_handle(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid) if hasattr(os, "pidfd_open") else None
    except ProcessLookupError:
        return None


class LocalBackend:
    """Workers as processes of this machine. start: ranks to start here (None: all); a launcher starts the others, which
    connect to ``folder``. lasting: scratch folder that outlives controllers."""

    beside = True

    def __init__(
        self,
        workers: int,
        timeout: float = 600.0,
        gpus: bool = False,
        *,
        folder: SessionDir | None = None,
        start: Sequence[int] | None = None,
        lasting: str = "",
    ) -> None:
        _check(workers, gpus, start is None)
        self.workers = workers
        self.folder = folder or SessionDir.create()
        self.scratch = lasting or str(self.folder.scratch)
        self.store = FolderStore(self.folder.payload, "controller")
        self.links: list[WorkerConnection] = []
        self.watch = self._watch()
        self._encoded: tuple[Call | None, bytes] = None, b""
        self._processes: dict[int, StartedWorker] = {}
        self._kills = oom_kills()
        self._reaper = Child([sys.executable, "-P", reaper.__file__, str(self.folder.path)], environment(1))
        self._reaper_lost = self._closed = False
        self.timeout = timeout
        try:
            with _listen(self.folder.socket) as listener:
                for rank in range(workers) if start is None else start:
                    self._start(rank)
                found = self._accept(listener, range(workers))
        except BaseException:  # an interrupt too: no process may be left
            self.close(kill=True)
            raise
        self.links = [self._link(rank, *found[rank]) for rank in range(workers)]

    def _link(self, rank: int, pid: int, connection: Connection) -> WorkerConnection:
        return WorkerConnection(rank, pid, connection, partial(self._ending, rank))

    def _watch(self) -> NodeProbe:
        try:
            return NodeProbe(self.folder, self.workers)
        except StorageError:
            self.folder.remove()
            raise

    def _start(self, rank: int) -> None:
        around = environment(self.workers)
        arguments = [str(self.folder.path), str(rank), str(self.workers), str(self.timeout)]
        process = start_worker(arguments, around, self.folder.log(rank))
        self._processes[rank] = process
        self._notify_reaper(process.pid)

    def _notify_reaper(self, pid: int) -> None:
        """Tell the reaper of a worker. Its loss is reported once; it matters only if this process is killed."""
        pipe: IO[bytes] = self._reaper.process.stdin  # type: ignore[assignment]
        try:
            pipe.write(f"{pid}\n".encode())
            pipe.flush()
        except BrokenPipeError:
            self._report_reaper(how_ended(self._reaper.process.wait()))

    def _report_reaper(self, how: str) -> None:
        if not self._reaper_lost:
            self._reaper_lost = True
            message = f"the reaper of the workers (process {self._reaper.pid}) {how}; the run itself is not affected"
            print(f"tilth: {message}", file=sys.stderr)

    def _end_reaper(self) -> None:
        self._reaper.tell(b"done\n")
        if (code := self._reaper.wait(END)) is None:
            self._report_reaper(f"has not ended within {END:g} s and was killed")
            self._reaper.kill()
        elif code:
            self._report_reaper(how_ended(code))

    def _accept(self, listener: socket.socket, ranks: Collection[int]) -> dict[int, tuple[int, Connection]]:
        """Return (process id, connection) of these ranks. Raises WorkerLost if one ends or does not connect in time."""
        found: dict[int, tuple[int, Connection]] = {}
        limit, key = patience(START), self.folder.key
        until = time.monotonic() + limit
        seconds = struct.pack("ll", int(self.timeout), int(self.timeout % 1 * 1e6))
        while len(found) < len(ranks):
            try:
                guest, _ = listener.accept()
            except TimeoutError:
                self._check_started([rank for rank in ranks if rank not in found], until, limit)
                continue
            guest.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, seconds)
            connection = Connection(guest.detach())
            try:
                deliver_challenge(connection, key)
                answer_challenge(connection, key)
                rank, pid = map(int, connection.recv_bytes().split())
            except (EOFError, OSError):  # it has ended, which its process or the limit shows
                connection.close()
                continue
            found[rank] = pid, connection
            if rank not in self._processes:
                self._notify_reaper(pid)
        return found

    def _check_started(self, missing: Sequence[int], until: float, limit: float) -> None:
        ended = [rank for rank in missing if rank in self._processes and self._processes[rank].poll() is not None]
        if ended:
            raise WorkerLost(f"rank {ended[0]}, start: {self._ending(ended[0])}", key="cluster.start")
        if time.monotonic() > until:
            log = self.watch.log_end(missing[0])
            raise WorkerLost(
                f"rank {missing[0]}, start: the worker has not connected within {limit:g} s{log}", key="cluster.start"
            )

    def submit(self, rank: int, call: Call) -> Future[Reply]:
        """Send a call; consecutive submissions of one Call pickle it once."""
        if (encoded := self._encoded)[0] is not call:  # of this thread: another one may submit at the same time
            encoded = self._encoded = call, pickle.dumps(call, protocol=5)
        return self.links[rank].submit(call, encoded[1])

    def control(self, rank: int, role: str, method: str, arguments: Mapping[str, Any]) -> Any:
        try:
            return control.ask(self.folder.control(rank), rank, role, method, arguments)
        except WorkerLost as error:  # with its process, whose end says more than that of its socket
            found = WorkerLost(f"role {role}, rank {rank}, {method}: {self._ending(rank)}", key=error.key)
            found.ranks = error.ranks
            raise found from error

    def probe(self, rank: int) -> Probe:
        return self.watch.probe(rank, self.links[rank].pid)

    def life(self, rank: int) -> tuple[int, int]:
        return self.watch.board.life(rank)

    def pids(self) -> dict[int, int]:
        """Return rank -> process."""
        return {link.rank: link.pid for link in self.links}

    def kill(self, ranks: Iterable[int]) -> None:
        newest = (self._processes.get(rank, self.links[rank]) for rank in ranks)  # it may be about to connect
        reaper.kill(reaper.running(process.pid for process in newest))

    @property
    def files(self) -> None:
        return None

    def nodes(self) -> tuple[Mapping[int, str], Collection[str]]:
        return {}, ()

    def replace(self, ranks: Sequence[int], evicted: Collection[int] = ()) -> None:
        if not ranks:
            return
        if launched := [rank for rank in ranks if rank not in self._processes]:
            message = f"rank {launched[0]} was started by a launcher, which must start it again"
            raise WorkerLost(message, key="cluster.start")
        self.kill(ranks)
        self._kills = oom_kills()  # those before have had their effect
        for rank in ranks:
            self.links[rank].close()
            self._processes[rank].wait(END)
            self.watch.board.clear(rank)
        with _listen(self.folder.socket) as listener:
            for rank in ranks:
                self._start(rank)
            found = self._accept(listener, ranks)
        for rank in ranks:
            self.links[rank] = self._link(rank, *found[rank])

    def _ending(self, rank: int) -> str:
        """Describe how a worker whose connection has ended was lost."""
        how, process = "has ended", self._processes.get(rank)
        if process is not None:
            try:
                code = process.wait(END)
                how = how if code is None else how_ended(code, self._kills)
            except subprocess.TimeoutExpired:
                how = "has closed its connection"
        pid = process.pid if process is not None else self.links[rank].pid
        return self.watch.ending(rank, pid, how)

    def close(self, kill: bool) -> None:
        """End the workers and remove the session directory. kill: at once, else within END seconds."""
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
        self._end_reaper()
        self.watch.board.close()
        self.folder.remove()

    def _kill(self) -> None:
        """Kill all workers and the processes that their roles have started."""
        pids = {link.pid for link in self.links} | {process.pid for process in self._processes.values()}
        reaper.kill(reaper.running(pids))


def environment(workers: int) -> dict[str, str]:
    """Return the environment of one of N workers: the controller's, its import path, cores / N threads, collectives on
    the loopback interface, of which torch's recorder keeps the newest (2,000 take 0.1 s to read). Variables that the
    user set stay."""
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), "lo")
    ours = {
        "GOMP_SPINCOUNT": "1000",
        "OMP_NUM_THREADS": str(max(1, cores() // workers)),
        "GLOO_SOCKET_IFNAME": loopback,
        "TORCH_FR_BUFFER_SIZE": "256",
    }
    return {**ours, **os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}


def _check(workers: int, gpus: bool, ours: bool) -> None:
    """Raise RecipeError for too many workers. ours: they start here, not by a launcher."""
    if ours:
        check_room(workers)
    if gpus:
        import torch

        if workers > (there := torch.cuda.device_count()):
            way = f"use at most {there}" if there else "use train.device=cpu"
            message = f"cluster.workers = {workers}, but this machine has {there} GPUs; {way}"
            raise RecipeError(message, key="cluster.workers")


def _listen(address: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    Path(address).unlink(missing_ok=True)  # of the workers that were started before
    listener.bind(address)
    listener.listen(128)
    listener.settimeout(0.2)  # interval at which workers that ended before connecting are detected
    return listener
