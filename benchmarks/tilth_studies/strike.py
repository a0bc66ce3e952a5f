"""Faults of drills inside a worker.

A worker imports this module when a control message with its session's key asks for a fault, and only then
``span.__enter__`` is replaced, until the fault has struck once (``slow``: for good).
"""

import ctypes
import hmac
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from tilth.cluster.backends.session_dir import SessionDir
from tilth.cluster.backends.store import FolderStore
from tilth.cluster.protocol import offered
from tilth.cluster.worker.executor import Executor
from tilth.core.errors import DataError
from tilth.roles.state import Learner
from tilth.trace.ops import declared
from tilth.trace.spans import span
from tilth_studies.drill import HOUR, PAUSE, SLOWER, named

_FOREVER = 1 << 20
_MOST = 1 << 52


class InjectedFault(RuntimeError):
    """The exception of a drill."""


def strike(executor: Executor, kind: str, at: str, key: str) -> int:
    """Arm a fault in this worker: it strikes once, where the next span of this operation or call begins. Return the
    process id.

    key: of the session, in hex. DataError for another one, for an unknown kind, or for a call that no role of this
    worker answers.
    """
    store = executor.store
    own = SessionDir(store.folder.parent).key.hex() if isinstance(store, FolderStore) else ""
    if not own or not hmac.compare_digest(own, key):
        raise DataError("a fault needs the key of this worker's session", key="key")
    named(kind)
    if at and declared(at) is None and at not in (calls := _calls(executor)):
        message = f"--at {at}: rank {executor.rank} has no such call; it answers {', '.join(calls)}"
        raise DataError(message, key="--at.call")
    plain = span.__enter__

    def entered(self: span) -> span:
        if at in (self.op, self.detail):
            _set_enter(plain)
            opened = plain(self)
            try:
                STRIKES[kind](executor)
            except BaseException as error:
                self.__exit__(type(error), error, error.__traceback__)
                raise
            return opened
        return plain(self)

    _set_enter(entered)
    return os.getpid()


def _calls(executor: Executor) -> list[str]:
    """Return the calls that the roles of a worker answer, as ROLE.METHOD."""
    return [
        f"{role}.{method}"
        for role, held in executor.roles.items()
        for method, protocol in offered(held).items()
        if not protocol.control
    ]


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


def _no_files(_: Executor) -> None:
    """Let this process open no further file."""
    used = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


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


STRIKES: Mapping[str, Callable[[Executor], None]] = {
    "kill": _signal(signal.SIGKILL), "stop": _signal(signal.SIGSTOP), "busy": _busy, "gil": _hold_gil,
    "exception": _raise, "nan": _put_nan(_weight), "nan-gradient": _put_nan(_gradient), "flip": _flip(_weight),
    "flip-gradient": _flip(_gradient), "block": _block, "pause": _pause, "slow": _slow, "collective": _call_alone,
    "clock": _change_clock, "disk-full": _no_disk, "files": _no_files, "oom": _exhaust,
}  # fmt: skip
"""What a fault of ``drill.FAULTS`` does in the thread that executes calls."""
