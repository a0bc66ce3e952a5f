"""Actors of the ``ray`` backend: a NodeAgent per node, which owns payload and probes workers, and the workers.

Both are plain classes, which ``backends.ray`` turns into actors; Ray is imported when one of them runs.
"""

import importlib
import os
import select
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import xxhash

from tilth.cluster.backends import control
from tilth.cluster.backends.base import Probe
from tilth.cluster.backends.probe import NodeProbe
from tilth.cluster.backends.session_dir import SessionDir
from tilth.cluster.backends.store import column_key, column_of, process_name
from tilth.cluster.worker import reaper
from tilth.cluster.worker.fork_server import AHEAD, print_to
from tilth.cluster.worker.local_worker import executor
from tilth.core.batch import Handle, Jagged
from tilth.core.errors import StorageError
from tilth.core.memory import oom_kills
from tilth.process.child import MEMORY_RAN_OUT
from tilth.trace.spans import span

EVERY = 0.25
"""Seconds for which a NodeAgent waits for the end of a worker, and so between two reports of signs of life."""
ANSWER = 20.0
"""Seconds for a piece of a file from another node."""
GONE = 5.0
"""Seconds for processes to vanish; the system frees their memory first."""
LATELY = 2 * GONE
"""Seconds before the end of a worker in which the kernel must have killed a process for want of memory, if that was
this one."""


PIECE = 32 * 2**20
"""Bytes that travel at once."""
Read = Callable[[str, int], tuple[np.ndarray, int, int]]
"""(file, offset) -> bytes from there on, their checksum, size of the file: ``Scratch.read`` of another node."""


class Scratch:
    """Folder under the same path on every node. Names are relative to it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def read(self, name: str, offset: int) -> tuple[np.ndarray, int, int]:
        """Return up to ``PIECE`` bytes of a file from an offset, their checksum, and the file's size."""
        path = self.folder / name
        size = path.stat().st_size
        data = np.fromfile(path, np.uint8, max(0, min(PIECE, size - offset)), offset=offset)
        return data, xxhash.xxh3_64_intdigest(data.data), size

    def listing(self, folder: str) -> dict[str, tuple[int, int]] | None:
        """Return name -> (size, time of the last change in ns) of the files of a folder; None if there is none."""
        if not (self.folder / folder).is_dir():
            return None
        found = sorted((self.folder / folder).glob("[!.]*"))
        return {path.name: ((stat := path.stat()).st_size, stat.st_mtime_ns) for path in found}

    def copy(self, name: str, read: Read) -> int:
        """Copy a file of another node; return its bytes. It is there in one piece or not at all.

        StorageError without room, and for bytes that differ on the way.
        """
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary, offset, size = path.with_name(f".{path.name}.part"), 0, -1
        try:
            with open(temporary, "wb") as file:
                while offset != size:
                    data, wanted, size = read(name, offset)
                    if xxhash.xxh3_64_intdigest(data.data) != wanted or (not len(data) and offset < size):
                        raise StorageError(f"{name}: bytes from {offset} on changed on the way", key="snapshot")
                    file.write(data.data)
                    offset += len(data)
            os.replace(temporary, path)
        except OSError as error:
            raise StorageError(f"no copy of {name}: {error.strerror or error}", key="snapshot") from error
        finally:
            temporary.unlink(missing_ok=True)
        return offset

    def follow(self, folder: str, listing: Mapping[str, tuple[int, int]] | None, read: Read) -> int:
        """Make a folder equal to another node's: fetch what is new or has changed, remove the rest; return bytes. It
        stays as it is if the other node has none."""
        if listing is None:
            return 0
        ours, nbytes = self.listing(folder) or {}, 0
        for name, (size, changed) in listing.items():
            if ours.get(name) != (size, changed):
                nbytes += self.copy(f"{folder}/{name}", read)
                os.utime(self.folder / folder / name, ns=(changed, changed))
        for name in ours.keys() - listing.keys():
            (self.folder / folder / name).unlink(missing_ok=True)
        return nbytes

    def make(self, folder: str, files: Mapping[str, bytes], links: Mapping[str, str]) -> None:
        """Make a folder anew: files with these bytes, and links to files of the scratch folder."""
        place = self.folder / folder
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        for name, data in files.items():
            (place / name).write_bytes(data)
        for name, target in links.items():
            os.link(self.folder / target, place / name)

    def remove(self, folder: str) -> None:
        shutil.rmtree(self.folder / folder, ignore_errors=True)


class NodeAgent(Scratch):
    """Agent of a node: session directory, payload columns, state of its workers from outside.

    It owns its columns in Ray's object store, so they outlive the worker that put them.
    """

    def __init__(self, name: str, workers: int, former: str = "") -> None:
        """name: of the session directory, equal on all machines; another agent of this machine may have it already.

        former: name of the session of a controller that was killed, whose snapshots this one takes over.
        """
        try:
            self._folder = SessionDir.create(name, former)
            if former and (left := SessionDir.find(former)) is not None:
                self._folder.inherit(left, ANSWER)
        except StorageError:
            if SessionDir.find(name) is None:
                raise
            self._folder = SessionDir.create()
        self._watch = NodeProbe(self._folder, workers)
        super().__init__(self._folder.scratch)
        self._kills = deque([(time.monotonic(), oom_kills())])
        """The kernel's kills for want of memory at looks of the last ``LATELY`` seconds, and at the last before."""
        self._lock = threading.Lock()
        self._columns: dict[str, tuple[Any, int]] = {}  # reference, bytes

    def place(self) -> str:
        """Return the path of the session directory on this node."""
        return str(self._folder.path)

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

    def release(self, prefixes: tuple[str, ...]) -> None:
        with self._lock:
            self._columns = {k: column for k, column in self._columns.items() if not k.startswith(prefixes)}

    def held(self) -> dict[str, int]:
        with self._lock:
            return {key: nbytes for key, (_, nbytes) in self._columns.items()}

    def probe(self, rank: int, pid: int) -> Probe:
        return self._watch.probe(rank, pid)

    def control(self, rank: int, role: str, method: str, arguments: Mapping[str, Any]) -> Any:
        return control.ask(self._folder.control(rank), rank, role, method, arguments)

    def watch(self, workers: Mapping[int, int]) -> tuple[dict[int, tuple[int, int]], dict[int, str]]:
        """Wait a moment, until a worker ends; return the signs of life by rank, and how workers ended by process id.

        workers: process id -> rank.
        """
        gone = _ended(workers, EVERY)
        self._count_kills()
        lives = {rank: self._watch.board.life(rank) for rank in workers.values()}
        return lives, {pid: self.ending(workers[pid], pid) for pid in gone}

    def ending(self, rank: int, pid: int) -> str:
        """Describe how a worker was lost. Only its parent, which is Ray's, learns the signal."""
        how, lately = "has died", self._count_kills()
        if lately:
            how += f" {MEMORY_RAN_OUT}the kernel has killed {lately} processes in the last {LATELY:g} s)"
        return self._watch.ending(rank, pid, how)

    def _count_kills(self) -> int:
        """Return how many processes the kernel has killed for want of memory lately."""
        now, count = time.monotonic(), oom_kills()
        with self._lock:
            self._kills.append((now, count))
            while now - self._kills[1][0] > LATELY:
                self._kills.popleft()
            before = self._kills[0][1]
        return 0 if count is None or before is None else count - before

    def kill(self, pids: Sequence[int]) -> None:
        """Kill workers with their children, also stopped ones, which do not react to Ray."""
        reaper.kill(reaper.running(pids))

    def vacate(self, workers: Mapping[int, int]) -> None:
        """Wait until killed workers are gone, and forget them. workers: process id -> rank."""
        psutil.wait_procs(reaper.running(workers), GONE)
        for rank in workers.values():
            self._watch.board.clear(rank)

    def fetch(self, sources: Mapping[str, Any]) -> tuple[int, float]:
        """Copy files of other nodes; return bytes and seconds. sources: name -> agent of the node."""
        began = time.monotonic()
        nbytes = sum(self.copy(name, partial(_read, agent)) for name, agent in sources.items())
        return nbytes, time.monotonic() - began

    def mirror(self, folder: str, source: Any) -> tuple[int, float]:
        """Make a folder equal to that of another node; return bytes and seconds."""
        began = time.monotonic()
        nbytes = self.follow(folder, _found(source.listing.remote(folder)), partial(_read, source))
        return nbytes, time.monotonic() - began

    def end(self, pids: Sequence[int], kill: bool) -> None:
        """Wait for the workers, kill those that stay (kill: all, at once) and their children, remove the directory."""
        workers = reaper.running(pids)
        _, left = psutil.wait_procs(workers, 0 if kill else GONE)
        reaper.kill(left)
        psutil.wait_procs(left, GONE)
        self._watch.board.close()
        self._folder.remove()


def _found(reference: Any) -> Any:
    """Return the answer of another node's agent. StorageError if there is none."""
    import ray

    try:
        return ray.get(reference, timeout=ANSWER)
    except ray.exceptions.RayError as error:
        message = f"another node does not give a file: {str(error).strip().splitlines()[-1]}"
        raise StorageError(message, key="snapshot") from None


def _read(agent: Any, name: str, offset: int) -> tuple[np.ndarray, int, int]:
    return _found(agent.read.remote(name, offset))


def _ended(pids: Iterable[int], seconds: float) -> list[int]:
    """Wait until one of these processes has ended, or for some seconds; return those that have."""
    files, gone = dict[int, int](), list[int]()
    poll = select.poll()
    try:
        for pid in pids:
            try:
                files[file := os.pidfd_open(pid)] = pid
            except ProcessLookupError:
                gone.append(pid)
                continue
            poll.register(file, select.POLLIN)
        return gone + [files[file] for file, _ in poll.poll(0 if gone else 1000 * seconds)]
    finally:
        for file in files:
            os.close(file)


class RayWorker:
    """Process of one rank, which it gets by ``begin``: executes calls in order, one at a time. Without: a spare."""

    def __init__(self) -> None:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # before torch is imported

    def warm(self) -> None:
        """Import what roles need."""
        for name in AHEAD:
            importlib.import_module(name)

    def begin(self, rank: int, workers: int, init_method: str, timeout: float, folder: str, store: "RayStore") -> int:
        """Become the worker of a rank; return the process id. Ray shows each worker its own GPU alone."""
        place = SessionDir(Path(folder))
        print_to(place.log(rank))
        if interface := interface_for(init_method):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        if init_method.startswith("tcp:"):  # torch's name for a store that is there already: rank 0 makes none
            os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        self._host = executor(place, rank, workers, store, init_method=init_method, timeout=timeout)
        return os.getpid()

    def answer(self, data: bytes) -> bytes:
        """Execute a pickled Call; return a pickled Reply or Failure."""
        return self._host.answer(data)


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


def agent_name(session: str, home: int) -> str:
    """Return the name under which Ray finds the agent of a node."""
    return f"tilth-{session}-{home}"


class RayStore:
    """Payload in Ray's object store: a column is owned by the NodeAgent of its node and read from any node.

    session: of the backend; home: number of this process's node; writer: rank, in its keys; homes: returns the numbers
    of all living nodes, for the controller.
    """

    def __init__(self, session: str, home: int, writer: str, homes: Callable[[], Iterable[int]] = tuple) -> None:
        self.lease = ""
        self._homes = homes
        self._session, self._home, self._writer = session, home, process_name(writer)
        self._agents: dict[int, Any] = {}
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

    def release(self, *leases: str) -> None:
        self._all("release", lambda home: (tuple(f"{home}/{lease}~" for lease in leases),))

    def held(self) -> dict[str, int]:
        tables = self._all("held", lambda home: ())
        return {key: nbytes for table in tables if table is not None for key, nbytes in table.items()}

    def _ask(self, key: str, method: str, *args: Any) -> Any:
        try:
            agent = self._agent(int(key.partition("/")[0]))
        except ValueError:  # so Ray reports a name that is none
            raise StorageError(f"payload column {key} is lost with its node", key=column_of(key)) from None
        return _resolved(getattr(agent, method).remote(*args), key)

    def _agent(self, home: int) -> Any:
        import ray

        if home not in self._agents:
            self._agents[home] = ray.get_actor(agent_name(self._session, home))
        return self._agents[home]

    def _all(self, method: str, arguments: Callable[[int], tuple[Any, ...]]) -> list[Any]:
        """Return the answers of the NodeAgents; None for one that is gone with its columns."""
        import ray

        answers: list[Any] = []
        asked = [getattr(self._agent(home), method).remote(*arguments(home)) for home in self._homes()]
        for reference in asked:
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
