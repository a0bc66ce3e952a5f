"""Faults for drills on one's own running cluster: ``inject`` acts from another process, ``strike`` inside a worker.

Nothing of it is in a run that nobody asks: a worker imports this module when a control message with its session's key
asks for a fault, and only then ``span.__enter__`` is replaced, until the fault has struck once (``slow``: for good).
"""

import ctypes
import hmac
import os
import re
import resource
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from tilth.cluster.backends.control import ask
from tilth.cluster.backends.session_dir import SessionDir
from tilth.cluster.backends.status import SLOT
from tilth.cluster.backends.store import FolderStore
from tilth.cluster.worker.executor import Executor
from tilth.core.errors import DataError, WorkerLost
from tilth.roles.state import Learner
from tilth.trace.ops import kind as kind_of
from tilth.trace.spans import span

CALL = "call"
"""Default moment: the next call of the worker."""
PAUSE = 4.0
"""Seconds of ``pause``."""
SLOWER = 0.1
"""Seconds that ``slow`` adds to each forward pass."""
HOUR = 3600.0
_FOREVER = 1 << 20
_MOST = 1 << 52
_PEER = struct.Struct("3i")


def inject(session: SessionDir, kind: str, rank: int, at: str = "") -> int:
    """Let a fault happen to a worker; return its process id.

    at: operation (``trace.ops``) or call (``policy.update``) at whose next begin it strikes; "": a signal at once, the
    others at the next call. DataError for an unknown kind, moment or rank; WorkerLost without an answer.
    """
    fault = named(kind)
    _check_moment(at)
    workers = session.board.stat().st_size // SLOT
    if not 0 <= rank < workers:
        raise DataError(f"--rank {rank} is not a worker; this run has 0 to {workers - 1}", key="--rank")
    if fault.signal and not at:
        pid = pid_of(session, rank)
        os.kill(pid, fault.signal)
        return pid
    wanted = {"kind": kind, "at": at or CALL, "key": session.key.hex()}
    return int(ask(session.control(rank), rank, "", "inject", wanted))


def named(kind: str) -> "Fault":
    """Return a fault by its name. Raises DataError."""
    if kind not in FAULTS:
        raise DataError(f"{kind!r} is not a fault; use one of {', '.join(FAULTS)}", key="KIND")
    return FAULTS[kind]


def session_of(controller: int) -> SessionDir:
    """Return the session directory that a controller of this user and machine holds. Raises DataError."""
    try:
        files = [Path(file.path) for file in psutil.Process(controller).open_files()]
    except psutil.Error as error:
        raise DataError(f"process {controller} cannot be looked at: {error}", key="run.json.pid") from None
    ours = [file.parent for file in files if file.name == "alive" and file.parent.name.startswith("tilth-")]
    if not ours:
        raise DataError(
            f"process {controller} has no worker processes here: only a run with cluster.backend=local can have faults",
            key="cluster.backend",
        )
    return SessionDir(max(ours, key=lambda folder: (folder / "alive").stat().st_mtime))  # of its newest run


def pid_of(session: SessionDir, rank: int) -> int:
    """Return the process at the other end of a worker's control socket. WorkerLost if there is none."""
    try:
        with socket.socket(socket.AF_UNIX) as there:
            there.connect(session.control(rank))
            peer = there.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    except OSError as error:
        raise WorkerLost(f"rank {rank}: no worker is there: {error}", key="guard.inject") from None
    return int(_PEER.unpack(peer)[0])


def _check_moment(at: str) -> None:
    """Raise DataError for what is neither an operation nor ROLE.METHOD."""
    try:
        kind_of(at or CALL)
    except KeyError as error:
        if not re.fullmatch(r"[a-z_]+\.[a-z_]+", at):
            raise DataError(f"--at {at}: {error.args[0]}, nor is it a call as policy.update", key="--at") from None


# ---- in the worker ----


class InjectedFault(RuntimeError):
    """The exception of a drill."""


@dataclass(frozen=True)
class Fault:
    """A kind of fault. signal: that makes it from outside, 0: none; strike: makes it in the worker's own thread."""

    about: str
    strike: Callable[[Executor], None]
    signal: int = 0


def strike(executor: Executor, kind: str, at: str, key: str) -> int:
    """Arm a fault in this worker: it strikes once, where the next span of this operation or call begins. Return the
    process id.

    key: of the session, in hex. DataError for another one, or for an unknown kind.
    """
    store = executor.store
    own = SessionDir(store.folder.parent).key.hex() if isinstance(store, FolderStore) else ""
    if not own or not hmac.compare_digest(own, key):
        raise DataError("a fault needs the key of this worker's session", key="key")
    fault, plain = named(kind), span.__enter__

    def entered(self: span) -> span:
        if at in (self.op, self.detail):
            _set_enter(plain)
            opened = plain(self)
            try:
                fault.strike(executor)
            except BaseException as error:
                self.__exit__(type(error), error, error.__traceback__)
                raise
            return opened
        return plain(self)

    _set_enter(entered)
    return os.getpid()


def _set_enter(function: Callable[[span], span]) -> None:
    setattr(span, "__enter__", function)  # noqa: B010 - a method of a class


def _signal(number: int) -> Callable[[Executor], None]:
    return lambda _: os.kill(os.getpid(), number)


def _busy(_: Executor) -> NoReturn:
    while True:
        pass


def _hold_gil(_: Executor) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})  # which asks for stacks, and would wake it
    ctypes.PyDLL(None).sleep(_FOREVER)  # a PyDLL keeps the GIL during the call


def _block(_: Executor) -> None:
    """Read from a pipe to which nobody writes, as from a file system that does not answer."""
    os.read(os.pipe()[0], 1)


def _pause(_: Executor) -> None:
    time.sleep(PAUSE)


def _slow(_: Executor) -> None:
    """Make every further forward pass of this process longer."""
    plain = span.__enter__

    def entered(self: span) -> span:
        opened = plain(self)
        if self.op == "forward":
            time.sleep(SLOWER)
        return opened

    _set_enter(entered)


def _change_clock(_: Executor) -> None:
    """Set the wall clock of this process an hour ahead (for what reads it by ``time.time``)."""
    plain = time.time
    setattr(time, "time", lambda: plain() + HOUR)  # noqa: B010 - a function of a module


def _call_alone(executor: Executor) -> None:
    """Call a collective that no other rank calls, in the group of the data ranks of a role that trains."""
    for role in executor.roles.values():
        axes = role.grid.mesh.over("rows") if isinstance(role, Learner) else ()
        if isinstance(role, Learner) and (group := role.grid.group(*axes)) is not None:
            dist.all_reduce(torch.ones(7), group=group)
            return
    raise DataError(f"rank {executor.rank} has no group of ranks with other rows to call a collective in", key="--rank")


def _raise(_: Executor) -> NoReturn:
    raise InjectedFault("injected by a drill")


def _exhaust(_: Executor) -> None:
    torch.empty(_MOST, dtype=torch.uint8)


def _no_disk(_: Executor) -> None:
    """Let every further write of this process to a file fail, as on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def _parameters(executor: Executor) -> Iterator[Tensor]:
    """Yield this worker's parts of the parameters that its roles train."""
    for role in executor.roles.values():
        yield from role.engine.optimizers.parameters.values() if isinstance(role, Learner) else ()


def _weight(executor: Executor) -> Tensor:
    """Return the elements of this worker's part of the first weight of a role that trains. Raises DataError."""
    for parameter in _parameters(executor):
        if parameter.numel():
            return parameter.detach().view(-1)
    raise DataError(f"rank {executor.rank} trains nothing, so it has no weight to change", key="--rank")


def _gradient(executor: Executor) -> Tensor:
    """Return the elements of this worker's part of the first gradient that is there. Raises DataError."""
    for parameter in _parameters(executor):
        if parameter.grad is not None and parameter.numel():
            return parameter.grad.view(-1)
    raise DataError(f"rank {executor.rank} has no gradient now; use --at optimizer", key="--at")


def _put_nan(found: Callable[[Executor], Tensor]) -> Callable[[Executor], None]:
    def put(executor: Executor) -> None:
        found(executor)[0] = float("nan")

    return put


def _flip(found: Callable[[Executor], Tensor]) -> Callable[[Executor], None]:
    """Flip the highest bit of the fraction: the value changes by at most half, and stays finite."""

    def flip(executor: Executor) -> None:
        raw = found(executor)[:1].view(torch.uint8)
        raw[raw.numel() - 2] ^= 0x40

    return flip


FAULTS: Mapping[str, Fault] = {
    "kill": Fault("SIGKILL", _signal(signal.SIGKILL), signal.SIGKILL),
    "stop": Fault("SIGSTOP", _signal(signal.SIGSTOP), signal.SIGSTOP),
    "busy": Fault("a Python loop without end in the thread that trains", _busy),
    "gil": Fault("a C call that holds the GIL and does not return", _hold_gil),
    "exception": Fault("an exception in a role's call", _raise),
    "nan": Fault("NaN in one weight of this rank", _put_nan(_weight)),
    "nan-gradient": Fault("NaN in one gradient of this rank; use --at optimizer", _put_nan(_gradient)),
    "flip": Fault("another bit in one weight of this rank", _flip(_weight)),
    "flip-gradient": Fault("another bit in one gradient of this rank; use --at optimizer", _flip(_gradient)),
    "block": Fault("a read that never returns, in the thread that trains", _block),
    "pause": Fault(f"the thread that trains sleeps {PAUSE:g} s", _pause),
    "slow": Fault(f"every further forward pass takes {SLOWER:g} s longer", _slow),
    "collective": Fault("a collective that no other rank calls; use --at reduce", _call_alone),
    "clock": Fault("the wall clock of the worker jumps an hour ahead (simulated)", _change_clock),
    "disk-full": Fault("all writes of the worker to files fail (simulated)", _no_disk),
    "oom": Fault("an allocation that no machine has room for", _exhaust),
}
"""Kinds of faults by name."""
