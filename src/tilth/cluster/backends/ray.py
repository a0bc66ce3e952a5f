"""The ``ray`` backend: one actor per worker, on any number of machines.

Ray starts processes, carries bytes and reports dead actors; the controller does the rest, as for every backend. Ray is
imported only when a ``RayBackend`` is constructed (extra ``tilth-train[ray]``).
"""

import os
import pickle
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from types import FrameType, ModuleType
from typing import Any, NamedTuple, NoReturn

from tilth.cluster.backends.base import Call, Probe, Reply, place_of, settle
from tilth.cluster.backends.capacity import check_room, patience
from tilth.cluster.backends.ray_actors import NodeAgent, RayStore, RayWorker
from tilth.core.errors import RecipeError, TilthError, WorkerError, WorkerLost

START = 120.0
"""Seconds in which all workers must run, on an idle machine (``patience``)."""
LOOK = 5.0
"""Seconds for a node to answer a question about a worker."""
INLINE = 64 * 1024
"""Bytes of a call above which it is put into the object store once, instead of sent with each message."""
LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
RIGHT = "it is HOST:PORT, as in 10.0.0.1:6379, or auto on a node of the cluster"
"""Valid values of ``cluster.address``, for error messages."""
QUIET = {"log_to_driver": False, "configure_logging": False}
HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""First bytes of an HTTP/2 client: preface and empty settings."""
THREADS = 16
"""Concurrent requests that a NodeAgent answers."""


class Node(NamedTuple):
    """Node of the Ray cluster."""

    id: str
    address: str
    room: int
    """Workers that fit its CPUs (and GPUs)."""


class RayBackend:
    """Workers as actors. address: of a Ray cluster; "": the one that this process is connected to, else a new one on
    this machine, which listens on the loopback interface only, with a token, and ends with this backend."""

    def __init__(self, workers: int, *, timeout: float = 600.0, address: str = "", gpus: bool = False) -> None:
        if workers < 1:
            raise RecipeError(f"cluster.workers = {workers}: at least 1 is needed", key="cluster.workers")
        self.workers = workers
        self._ray = import_ray(address)
        self._machines: list[Any] = []
        self._actors: list[Any] = []
        self._pids: list[int] = []
        self._encoded: tuple[Call | None, int, Any] = None, 0, b""
        self._closed = False
        self._started = connect(self._ray, workers, address)
        try:
            self._nodes, self._on = self._places(gpus)
            self._machines = [self._machine(node) for node in self._nodes]
            self.store = RayStore(self._machines, 0, "controller")
            self._begin(timeout, gpus)
        except BaseException:  # an interrupt too: no process may be left
            self.close(kill=True)
            raise

    def _places(self, gpus: bool) -> tuple[list[Node], list[int]]:
        """Return the nodes that get workers, this one first if it does, and the node index of each rank."""
        here = self._ray.get_runtime_context().get_node_id()
        nodes = sorted(nodes_of(self._ray.nodes(), gpus), key=lambda node: (node.id != here, node.address, node.id))
        on = spread([node.room for node in nodes], self.workers, "GPUs" if gpus else "CPUs")
        used = sorted(set(on))
        return [nodes[i] for i in used], [used.index(i) for i in on]

    def _actor(self, kind: type, node: Node, *args: Any, **options: Any) -> Any:
        there = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node.id, soft=False)
        actor = self._ray.remote(kind).options(scheduling_strategy=there, max_restarts=0, **options)
        return actor.remote(*args)

    def _machine(self, node: Node) -> Any:
        return self._actor(NodeAgent, node, self.workers, num_cpus=0, max_concurrency=THREADS)

    def _begin(self, timeout: float, gpus: bool) -> None:
        folders = self._wait_for([machine.folder.remote() for machine in self._machines])
        init_method = self._init_method(folders)
        for rank, at in enumerate(self._on):
            local = 0 if gpus else self._on[:rank].count(at)  # Ray shows each worker its own GPU alone
            store = RayStore(self._machines, at, str(rank))
            arguments = rank, self.workers, local, init_method, timeout, folders[at], store
            options = {"num_cpus": 1, "num_gpus": int(gpus), "max_task_retries": 0}
            self._actors.append(self._actor(RayWorker, self._nodes[at], *arguments, **options))
        self._pids = self._wait_for([actor.pid.remote() for actor in self._actors])

    def _init_method(self, folders: Sequence[str]) -> str:
        """Return a file if all workers are on one node, else a port of the first node."""
        if self.workers == 1:
            return ""
        if len(self._nodes) == 1:
            return f"file://{folders[0]}/meeting"
        port = self._wait_for([self._machines[0].free_port.remote()])[0]
        return f"tcp://{self._nodes[0].address}:{port}"

    def _wait_for(self, references: Sequence[Any]) -> list[Any]:
        """Return the answers of starting actors. Raises RecipeError if they do not start, WorkerLost if one dies."""
        limit = patience(START)
        try:
            answers: list[Any] = self._ray.get(list(references), timeout=limit)
        except self._ray.exceptions.GetTimeoutError:
            raise RecipeError(
                f"cluster.workers = {self.workers}: Ray has not started them within {limit:g} s; is the cluster "
                "busy with another job? (ray status)",
                key="cluster.workers",
            ) from None
        except self._ray.exceptions.RayError as error:
            raise WorkerLost(f"a worker could not start: {str(error).strip()}", key="cluster.start") from None
        return answers

    def submit(self, rank: int, call: Call) -> Future[Reply]:
        """Send a call; consecutive submissions of one Call pickle it once."""
        if self._encoded[0] is not call:
            data = pickle.dumps(call, protocol=5)
            self._encoded = call, len(data), self._ray.put(data) if len(data) > INLINE else data
        future: Future[Reply] = Future()
        _, sent, message = self._encoded
        answer = self._actors[rank].answer.remote(message).future()
        answer.add_done_callback(partial(self._land, rank, call, sent, future))
        return future

    def _land(self, rank: int, call: Call, sent: int, future: Future[Reply], answer: Future[bytes]) -> None:
        """Resolve a call. Runs in Ray's thread, which must not wait for Ray: another thread asks about a death."""
        error = answer.exception()
        if error is not None:
            look = threading.Thread(target=self._fail, args=(rank, call, future, error), daemon=True)
            look.start()
            return
        settle(future, call, rank, sent, answer.result())

    def _fail(self, rank: int, call: Call, future: Future[Reply], error: BaseException) -> None:
        where = place_of(call, rank)
        if isinstance(error, self._ray.exceptions.RayActorError):
            future.set_exception(WorkerLost(f"{where}: {self._ending(rank)}", key=call.operation))
        else:
            future.set_exception(WorkerError(f"{where}: {type(error).__name__}: {error}", key=call.operation))

    def _ending(self, rank: int) -> str:
        """Describe how a worker was lost, by its node if that still answers."""
        pid, at = self._pids[rank], self._on[rank]
        if not self._closed:
            with suppress(self._ray.exceptions.RayError):
                return str(self._ray.get(self._machines[at].ending.remote(rank, pid, "has died"), timeout=LOOK))
        return f"the worker (process {pid}) has died with its machine {self._nodes[at].address}"

    def control(self, rank: int, role: str, method: str, arguments: Mapping[str, Any]) -> Any:
        """Send a control message by the worker's node, since an actor's methods wait for the running call."""
        machine = self._machines[self._on[rank]]
        try:
            return self._ray.get(machine.control.remote(rank, role, method, arguments), timeout=2 * LOOK)
        except self._ray.exceptions.RayTaskError as error:
            known = error.cause if isinstance(error.cause, TilthError) else None
            raise (known or WorkerError(str(error), key=f"{role}.{method}")) from None
        except self._ray.exceptions.RayError as error:
            message = f"role {role}, rank {rank}, {method}: {str(error).strip()}"
            raise WorkerLost(message, key=f"{role}.{method}") from None

    def probe(self, rank: int) -> Probe:
        pid, machine = self._pids[rank], self._machines[self._on[rank]]
        try:
            found: Probe = self._ray.get(machine.probe.remote(rank, pid), timeout=LOOK)
        except self._ray.exceptions.RayError:
            return Probe(rank, pid, "gone", "", f"machine {self._nodes[self._on[rank]].address} does not answer")
        return found

    def close(self, kill: bool) -> None:
        """End workers and node agents with all payload, and a Ray that was started here. The workers are idle."""
        if self._closed:
            return
        self._closed = True
        if not kill:
            self._kill(self._actors)
        ends = [machine.end.remote(self._pids_on(at), kill) for at, machine in enumerate(self._machines)]
        if ends:
            self._ray.wait(ends, num_returns=len(ends), timeout=4 * LOOK)
        self._kill([*self._actors, *self._machines])
        if self._started:
            self._ray.shutdown()

    def _kill(self, actors: Sequence[Any]) -> None:
        """Let Ray end actors; a stopped process does not react."""
        for actor in actors:
            self._ray.kill(actor)

    def _pids_on(self, at: int) -> list[int]:
        return [pid for pid, place in zip(self._pids, self._on) if place == at]


def import_ray(address: str = "") -> ModuleType:
    """Import Ray, limited to the loopback interface without an address (Ray reads that once, at import). Raises
    RecipeError if it is not installed."""
    if not address and "ray" not in sys.modules:
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    with _loopback(not address):
        try:
            import ray
            import ray.util.scheduling_strategies
        except ImportError:
            raise RecipeError(
                "cluster.backend = 'ray': Ray is not installed; in Tilth's folder: pip install '.[ray]'; "
                "or use cluster.backend=local",
                key="cluster.backend",
            ) from None
    return ray


@contextmanager
def _loopback(wanted: bool) -> Iterator[None]:
    """Set Ray's switch that makes it listen on 127.0.0.1 only. Ray's processes inherit it; later processes that join a
    cluster must not, so it is removed."""
    if not wanted or LOOPBACK in os.environ:
        yield
        return
    os.environ[LOOPBACK] = "0"
    try:
        yield
    finally:
        del os.environ[LOOPBACK]


class _Late(BaseException):
    """Ray took too long. A BaseException, since Ray retries after any Exception."""


def _late(number: int, frame: FrameType | None) -> NoReturn:
    raise _Late


@contextmanager
def _our_signals() -> Iterator[None]:
    """Keep this process's handler of SIGTERM, which Ray replaces, and raise _Late after START seconds.

    Processes started inside ignore SIGHUP of a closed terminal: the controller saves and ends them. Without effect
    outside of the main thread, which alone can set signal handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ours = {signal.SIGTERM: signal.getsignal(signal.SIGTERM), signal.SIGHUP: signal.SIG_IGN, signal.SIGALRM: _late}
    before = {number: signal.signal(number, handler) for number, handler in ours.items()}
    signal.setitimer(signal.ITIMER_REAL, START)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


def connect(ray: ModuleType, workers: int, address: str) -> bool:
    """Connect this process to a Ray cluster; True if it was started here. Raises RecipeError if the address has no
    cluster, or one that refuses this process or runs another version; without an address, if this machine has no room
    for the workers or Ray does not start; and if either takes too long."""
    if ray.is_initialized():
        return False
    if address.startswith("ray://"):
        raise RecipeError(
            f"cluster.address = {address!r}: a Ray client cannot be the controller; run tilth on a node of the "
            "cluster, with cluster.address=auto",
            key="cluster.address",
        )
    if address:
        _check_address(address)
        _join(ray, address)
        return False
    check_room(workers)
    _start(ray, workers)
    return True


def _start(ray: ModuleType, workers: int) -> None:
    """Start Ray on this machine."""
    if "RAY_AUTH_TOKEN_PATH" not in os.environ:
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    cpus = max(workers, os.cpu_count() or 1)
    try:
        with _loopback(True), _our_signals():
            ray.init(address="local", num_cpus=cpus, include_dashboard=False, **QUIET)
    except (Exception, _Late) as error:  # noqa: BLE001 - Ray raises plain Exceptions
        ray.shutdown()
        why = f"not within {START:g} s" if isinstance(error, _Late) else _first(error)
        raise RecipeError(
            f"cluster.backend = 'ray': Ray does not start on this machine: {why}; is it busy, or short of memory? Its "
            "logs are in /tmp/ray/session_latest/logs; cluster.backend=local does without Ray",
            key="cluster.backend",
        ) from None


def _join(ray: ModuleType, address: str) -> None:
    """Join the Ray cluster at an address."""
    key, place = "cluster.address", f"cluster.address = {address!r}"
    try:
        with _our_signals():
            ray.init(address=address, **QUIET)
    except RuntimeError as error:  # Ray names the versions, or what it cannot reach
        raise RecipeError(f"{place}: {_first(error)}", key=key) from None
    except ValueError as error:
        raise RecipeError(f"{place}: {_first(error)}; {RIGHT}", key=key) from None
    except (ConnectionError, ray.exceptions.RayError) as error:
        raise RecipeError(
            f"{place}: the Ray cluster does not take this process: {_first(error)}; set "
            "RAY_AUTH_MODE=token and RAY_AUTH_TOKEN (or RAY_AUTH_TOKEN_PATH) to what its nodes were started with",
            key=key,
        ) from None
    except (Exception, _Late) as error:  # noqa: BLE001 - Ray raises plain Exceptions
        why = f"no answer within {START:g} s" if isinstance(error, _Late) else _first(error)
        raise RecipeError(
            f"{place}: the Ray cluster cannot be joined: {why}; see whether it is up (ray status); if not, "
            "restart it with ray stop and ray start",
            key=key,
        ) from None


def _check_address(address: str) -> None:
    """Raise RecipeError unless the address is "auto" or a HOST:PORT at which Ray answers."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise RecipeError(
            f"cluster.address = {address!r} is not the address of a Ray cluster; {RIGHT}", key="cluster.address"
        )
    _knock(address)


def _knock(address: str) -> None:
    """Raise RecipeError unless a gRPC server listens at "host:port"; Ray itself takes minutes to find out.

    An HTTP/2 server first sends its settings, a frame of type 4 (RFC 9113, 3.4).
    """
    host, _, port = address.rpartition(":")
    answer = b""
    try:
        with socket.create_connection((host, int(port)), LOOK) as door:
            if os.environ.get("RAY_USE_TLS", "0") not in ("", "0"):
                return
            door.sendall(HELLO)
            while len(answer) < 4 and (more := door.recv(4 - len(answer))):
                answer += more
    except OSError as error:
        message = f"cluster.address = {address!r}: no Ray cluster answers there: {error}"
        raise RecipeError(message, key="cluster.address") from None
    if answer[3:] != b"\x04":
        message = f"cluster.address = {address!r}: what answers there is no Ray cluster; {RIGHT}"
        raise RecipeError(message, key="cluster.address")


def nodes_of(table: Sequence[Mapping[str, Any]], gpus: bool) -> list[Node]:
    """Return the live nodes of ``ray.nodes()``. A worker takes a CPU and, with ``gpus``, a GPU."""
    found = []
    for row in table:
        if row["Alive"]:
            has = row["Resources"]
            room = min(has.get("CPU", 0), has.get("GPU", 0)) if gpus else has.get("CPU", 0)
            found.append(Node(row["NodeID"], row["NodeManagerAddress"], int(room)))
    return found


def spread(room: Sequence[int], workers: int, what: str = "CPUs") -> list[int]:
    """Return the node of each rank: shares as equal as the nodes' room allows, neighbouring ranks on one node.

    room: workers that fit on each node. Raises RecipeError if it is too little.
    """
    if sum(room) < workers:
        raise RecipeError(
            f"cluster.workers = {workers}: the Ray cluster has {sum(room)} {what} on {len(room)} "
            f"node{'s' * (len(room) != 1)} and each worker takes one; use cluster.workers={sum(room)} or add nodes",
            key="cluster.workers",
        )
    shares = [0] * len(room)
    for _ in range(workers):
        free = [i for i, places in enumerate(room) if shares[i] < places]
        shares[min(free, key=lambda i: shares[i])] += 1
    return [i for i, share in enumerate(shares) for _ in range(share)]


def _first(error: BaseException) -> str:
    return " ".join(str(error).split("\n\n")[0].split())
