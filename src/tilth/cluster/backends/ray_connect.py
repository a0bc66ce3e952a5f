"""Connection to a Ray cluster: one that is started on this machine, or that is joined; its nodes and their room."""

import os
import secrets
import signal
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType, ModuleType
from typing import Any, NamedTuple, NoReturn

from tilth.cluster.backends.capacity import check_room, most_workers
from tilth.core.errors import RecipeError
from tilth.process.handlers import handling

START = 120.0
"""Seconds in which Ray must start, or let this process join."""
LOOK = 5.0
"""Seconds for the cluster's port to answer."""
LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
RIGHT = "it is HOST:PORT, as in 10.0.0.1:6379, or auto on a node of the cluster"
"""Valid values of ``cluster.address``, for error messages."""
QUIET = {"log_to_driver": False, "configure_logging": False}
HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""First bytes of an HTTP/2 client: preface and empty settings."""


class Node(NamedTuple):
    """Node of the Ray cluster."""

    id: str
    address: str
    room: int
    """Workers that fit its CPUs (and GPUs)."""
    port: int = 0
    """At which Ray's process of the node answers."""


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
    ours = {signal.SIGTERM: signal.getsignal(signal.SIGTERM), signal.SIGHUP: signal.SIG_IGN, signal.SIGALRM: _late}
    with handling(ours) as able:
        if able:
            signal.setitimer(signal.ITIMER_REAL, START)
        try:
            yield
        finally:
            if able:
                signal.setitimer(signal.ITIMER_REAL, 0)


def connect(ray: ModuleType, workers: int, address: str, spares: int = 0) -> bool:
    """Connect this process to a Ray cluster; True if it was started here. Raises RecipeError if the address has no
    cluster, or one that refuses this process or runs another version; without an address, if this machine has no room
    for workers and spares or Ray does not start; and if either takes too long."""
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
    if workers + spares > (most := most_workers()):
        message = f"guard.spares = {spares}: beside {workers} workers this machine has room for {most - workers}"
        raise RecipeError(f"{message}; use guard.spares={most - workers}", key="guard.spares")
    _start(ray, workers + spares)
    return True


def _begin(ray: ModuleType, cpus: int) -> None:
    """Start Ray, which gives up by itself after 30 s on a busy machine, as often as fits into START."""
    for left in reversed(range(max(1, int(START) // 30))):
        try:
            return ray.init(address="local", num_cpus=cpus, include_dashboard=False, **QUIET)
        except Exception as error:  # Ray raises plain Exceptions
            if not left or "timed out during startup" not in str(error):
                raise
            ray.shutdown()


def _start(ray: ModuleType, workers: int) -> None:
    """Start Ray on this machine."""
    if "RAY_AUTH_TOKEN_PATH" not in os.environ:
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    os.environ.setdefault(
        "RAY_worker_niceness", "0"
    )  # 15 is Ray's: anything else on this machine would go before training
    cpus = max(workers, os.cpu_count() or 1)
    try:
        with _loopback(True), _our_signals():
            _begin(ray, cpus)
    except (Exception, _Late) as error:  # noqa: BLE001 - Ray raises plain Exceptions
        ray.shutdown()
        why = f"not within {START:g} s" if isinstance(error, _Late) else first_line(error)
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
        raise RecipeError(f"{place}: {first_line(error)}", key=key) from None
    except ValueError as error:
        raise RecipeError(f"{place}: {first_line(error)}; {RIGHT}", key=key) from None
    except (ConnectionError, ray.exceptions.RayError) as error:
        raise RecipeError(
            f"{place}: the Ray cluster does not take this process: {first_line(error)}; set "
            "RAY_AUTH_MODE=token and RAY_AUTH_TOKEN (or RAY_AUTH_TOKEN_PATH) to what its nodes were started with",
            key=key,
        ) from None
    except (Exception, _Late) as error:  # noqa: BLE001 - Ray raises plain Exceptions
        why = f"no answer within {START:g} s" if isinstance(error, _Late) else first_line(error)
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
        with socket.create_connection((host, int(port)), LOOK) as connection:
            if os.environ.get("RAY_USE_TLS", "0") not in ("", "0"):
                return
            connection.sendall(HELLO)
            while len(answer) < 4 and (more := connection.recv(4 - len(answer))):
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
            found.append(Node(row["NodeID"], row["NodeManagerAddress"], int(room), int(row.get("NodeManagerPort", 0))))
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


def place_spares(left: Sequence[int], spares: int, workers: int, what: str = "CPUs") -> list[int]:
    """Return the node of each spare: always one where most room is left.

    left: room of each node beside its workers. Raises RecipeError if it is too little.
    """
    if sum(left) < spares:
        raise RecipeError(
            f"guard.spares = {spares}: the Ray cluster has {sum(left) + workers} {what} on {len(left)} "
            f"node{'s' * (len(left) != 1)}, of which the workers take {workers}, and each spare takes one; use "
            f"guard.spares={sum(left)} or add nodes",
            key="guard.spares",
        )
    room, places = list(left), []
    for _ in range(spares):
        places.append(room.index(max(room)))
        room[places[-1]] -= 1
    return places


def first_line(error: BaseException) -> str:
    """Return the first paragraph of an error's message as one line."""
    return " ".join(str(error).split("\n\n")[0].split())
