"""``tilth guard inject``: faults for drills on one's own running cluster, made here from another process.

Those inside a worker are in ``strike``. Nothing of it is in a run that nobody asks.
"""

import json
import os
import re
import signal
import socket
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from tilth.cli.main import GuardInjectCommand
from tilth.cluster.backends.control import ask
from tilth.cluster.backends.probe import SLOT
from tilth.cluster.backends.session_dir import SessionDir
from tilth.core.errors import DataError, WorkerLost
from tilth.runs.readers import read_state, supervised
from tilth.trace.ops import kind as kind_of

CALL = "call"
"""Default moment: the next call of the worker."""
PAUSE = 4.0
"""Seconds of ``pause``."""
SLOWER = 0.1
"""Seconds that ``slow`` adds to each forward pass."""
HOUR = 3600.0
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


@dataclass(frozen=True)
class Fault:
    """A kind of fault. signal: that makes it from outside, 0: none."""

    about: str
    signal: int = 0


def named(kind: str) -> Fault:
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
            f"process {controller} has no worker processes here: they start, as after a controller that was lost (try "
            "again in some seconds), or the run has another backend than cluster.backend=local, which alone has faults",
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


FAULTS: Mapping[str, Fault] = {
    "kill": Fault("SIGKILL", signal.SIGKILL),
    "stop": Fault("SIGSTOP", signal.SIGSTOP),
    "busy": Fault("a Python loop without end in the thread that trains"),
    "gil": Fault("a C call that holds the GIL and does not return"),
    "exception": Fault("an exception in a role's call"),
    "nan": Fault("NaN in one weight of this rank"),
    "nan-gradient": Fault("NaN in one gradient of this rank; use --at optimizer"),
    "flip": Fault("another bit in one weight of this rank"),
    "flip-gradient": Fault("another bit in one gradient of this rank; use --at optimizer"),
    "block": Fault("a read that never returns, in the thread that trains"),
    "pause": Fault(f"the thread that trains sleeps {PAUSE:g} s"),
    "slow": Fault(f"every further forward pass takes {SLOWER:g} s longer"),
    "collective": Fault("a collective that no other rank calls; use --at reduce"),
    "clock": Fault("the wall clock of the worker jumps an hour ahead (simulated)"),
    "disk-full": Fault("all writes of the worker to files fail (simulated)"),
    "files": Fault("the worker can open no further file"),
    "oom": Fault("an allocation that no machine has room for"),
}
"""Kinds of faults by name."""


# ---- the command ----


def drill(options: GuardInjectCommand) -> None:
    """Let a fault happen to a worker of an active run of this machine. DataError if the run is none."""
    run, kind, rank = options.run, options.kind, options.rank
    named(kind)
    _controller(run)
    time.sleep(options.after)
    pid = inject(session_of(_controller(run)), kind, rank, options.at)
    found = {"kind": kind, "rank": rank, "pid": pid, "time": time.time()}
    print(json.dumps(found) if options.as_json else f"{kind}: rank {rank}, process {pid}")


def _controller(run: Path) -> int:
    """Return the process of a run that is active on this machine. DataError for any other."""
    state = read_state(run)
    if state["state"] != "running":
        again = "; its next controller begins: ask again in some seconds" if supervised(state) else ""
        message = f"{run} is {state['state']}: a fault can only happen to an active run{again}"
        raise DataError(message, key="run.json.state")
    if state.get("host") != os.uname().nodename:
        message = f"{run} is active on {state.get('host')!r}; a drill happens on the run's own machine"
        raise DataError(message, key="run.json.host")
    return int(state["pid"])
