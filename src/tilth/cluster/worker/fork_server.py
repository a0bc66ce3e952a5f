"""Fork server: a process that has imported what workers and controllers need and forks one for each request.

Importing torch and the roles takes a second or two of a core. With it a machine does that once, not once for
each process, and replaces a worker or a controller that was lost in a fraction of a second.

It talks to its owner over its standard input, a socket, in JSON lines. A request ``{"arguments": [...],
"environment": {...}, "path": [...], "folder": ..., "log": ...}`` is answered with ``{"started": PID}``. Each end of a
worker is reported as ``{"ended": PID, "code": CODE}``, negative for a signal. It ends with its owner, or when it
has had no worker for a while.

An owner that supervises a run (``launch.supervisor``) asks for controllers: ``{"controller": {...}}`` comes with the
descriptors of its standard streams. The controller becomes a child of the owner, says ``{"controller": PID}``, and has
a connection of its own over which it asks for workers.
"""

import gc
import importlib
import json
import os
import random
import selectors
import signal
import socket
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from tilth.cluster.backends import fork_server
from tilth.cluster.backends.local import environment
from tilth.cluster.backends.session_dir import SessionDir
from tilth.cluster.worker import local_worker
from tilth.config.roles import resolve
from tilth.process.program import die_with

IDLE = 60.0
"""Seconds without a worker after which it ends, unless its owner supervises a run."""
END = 10.0
"""Seconds in which workers end after a controller that was killed."""
AHEAD = (
    "tilth.launch.workers", "tilth.models.family", "tilth.engines.engine", "tilth.guard.diagnosis", "numpy.random",
    "torch._inductor.codecache",
)  # fmt: skip
"""Modules of the shipped roles, which belong to packages that build on this one, and what a worker that hangs needs to
answer (torch's recorder names frames by its compiler's code)."""
CONTROLLER = ("tilth.launch.life", "tilth.cli.main", "tilth.cli.run", "tilth.ui.live", "tilth.ui.track")
"""Modules of a controller besides."""
_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main(kept: str = "") -> None:
    """Serve until the owner closes its end, which also ends the controllers that are its children.

    kept: folder of an owner that supervises a run, which is removed if the owner was killed.
    """
    for number in _STOPS:
        signal.signal(number, signal.SIG_IGN)  # the owner ends it
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    gc.disable()
    for name in (*AHEAD, *(CONTROLLER if kept else ())):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection in a worker would copy the pages that it shares with the others
    wake, woken = socket.socketpair()
    for end in (wake, woken):
        end.setblocking(False)
    signal.set_wakeup_fd(woken.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    server = Server(socket.socket(fileno=os.dup(0)), (wake, woken), kept=bool(kept))
    controller = server.serve()
    if controller is None and kept:
        server.wait()
        SessionDir(Path(kept)).remove()
    server.close()
    if controller is not None:
        controller.run()


class Server:
    """Connections, workers and requests of one fork server."""

    def __init__(self, owner: socket.socket, wakes: tuple[socket.socket, socket.socket], *, kept: bool) -> None:
        """wakes: the ends of a pair that brings a byte for each signal."""
        self._owner, self._wake, self._wakes, self._kept = owner, wakes[0], wakes, kept
        self._ready = selectors.DefaultSelector()
        self._rests: dict[socket.socket, bytes] = {owner: b""}
        """Connection -> beginning of a request that has not come whole yet."""
        self._workers: dict[int, socket.socket] = {}
        """Process id -> connection over which it was asked for."""
        self._streams: list[int] = []
        for end in (owner, self._wake):
            self._ready.register(end, selectors.EVENT_READ)

    def serve(self) -> "Controller | None":
        """Serve until the owner is gone, or idle. Return in the forks that become controllers too."""
        while events := [key.fileobj for key, _ in self._ready.select(self._patience())]:
            for end in events:
                if end is self._wake:
                    with suppress(BlockingIOError):
                        self._wake.recv(4096)
                    self._reap()
                    continue
                assert isinstance(end, socket.socket)
                lines = self._read(end)
                if lines is None and end is self._owner:
                    return None
                if lines is None:
                    self._drop(end)
                for line in lines or ():
                    if (controller := self._start(json.loads(line), end)) is not None:
                        return controller
        return None

    def _patience(self) -> float | None:
        return None if self._workers or self._kept else IDLE

    def _read(self, end: socket.socket) -> list[bytes] | None:
        """Return the requests that a connection has brought; None at its end."""
        try:
            data, streams, _, _ = socket.recv_fds(end, 1 << 16, 3)
        except ConnectionResetError:
            return None
        self._streams += streams
        *lines, self._rests[end] = (self._rests[end] + data).split(b"\n")
        return lines if data else None

    def _drop(self, end: socket.socket) -> None:
        """Forget a controller that has ended, with its workers, which end too."""
        self._ready.unregister(end)
        end.close()
        del self._rests[end]

    def _reap(self) -> None:
        """Report the workers that have ended."""
        with suppress(ChildProcessError):  # none is left
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                end = self._workers.pop(found[0])
                if end in self._rests:
                    _tell(end, ended=found[0], code=os.waitstatus_to_exitcode(found[1]))

    def _start(self, request: dict[str, Any], end: socket.socket) -> "Controller | None":
        """Fork a worker or a controller; return it in its own process."""
        if "controller" in request:
            return self._start_controller(request["controller"])
        if pid := os.fork():
            self._workers[pid] = end
            _tell(end, started=pid)
            return None
        self._leave()
        self.close()
        _become(request)

    def _start_controller(self, request: dict[str, Any]) -> "Controller | None":
        streams, self._streams = self._streams, []
        ours, theirs = socket.socketpair()
        begin, began = os.pipe()
        if pid := os.fork():
            theirs.close()
            self._rests[ours] = b""
            self._ready.register(ours, selectors.EVENT_READ)
            os.waitpid(pid, 0)  # from now on its parent is the owner, which adopts orphans
            for descriptor in (*streams, begin, began):
                os.close(descriptor)
            return None
        if os.fork():
            os._exit(0)
        os.close(began)
        os.read(begin, 1)
        os.close(begin)
        ours.close()
        self._leave()
        die_with(request["owner"])
        _tell(self._owner, controller=os.getpid())
        return Controller(request, streams, theirs)

    def _leave(self) -> None:
        """Leave the server's signals behind, in a fork."""
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, *_STOPS):
            signal.signal(number, signal.SIG_DFL)

    def close(self) -> None:
        """Close all connections of this process."""
        for end in (*self._rests, *self._wakes):
            end.close()
        self._ready.close()

    def wait(self) -> None:
        """Wait for the workers, which the reaper of their controller kills."""
        for end in list(self._rests):
            self._ready.unregister(end)
        until = time.monotonic() + END
        while self._workers and self._ready.select(until - time.monotonic()):
            self._wake.recv(4096)
            self._reap()


class Controller:
    """A fork of the server that becomes a controller of its owner's run."""

    def __init__(self, request: dict[str, Any], streams: list[int], server: socket.socket) -> None:
        self.request, self.streams, self.server = request, streams, server

    def run(self) -> None:
        """Be the command that the owner was started as. Raises SystemExit with its code."""
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if self.request["nohup"]:
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
        self._take_streams()
        _enter(self.request)
        fork_server.join(self.server, environment(1))
        sys.argv = self.request["argv"]
        resolve("tilth.cli.main:control")(self.request["handover"])

    def _take_streams(self) -> None:
        """Read from and write to the owner's standard streams; those that it has not are None."""
        place = dict(zip(self.request["streams"], self.streams))
        for target, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
            if target not in place:
                os.close(target)
                setattr(sys, name, None)
                continue
            os.dup2(place[target], target)
            os.close(place[target])
            line = 1 if mode == "w" and (target == 2 or os.isatty(target)) else -1
            errors = "backslashreplace" if target == 2 else None
            setattr(sys, name, open(target, mode, line, closefd=False, errors=errors))  # noqa: SIM115 - of the process


def _tell(end: socket.socket, **message: int) -> None:
    with suppress(BrokenPipeError, ConnectionResetError):  # the controller is gone, which the next read shows
        end.sendall(json.dumps(message).encode() + b"\n")


def _enter(request: dict[str, Any]) -> None:
    """Take the environment, the folder and the import path of a request."""
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.path[:] = request["path"]
    random.seed()
    gc.enable()


def _become(request: dict[str, Any]) -> NoReturn:
    """Be the worker of a request, in a fork of the server. Never returns into the server."""
    code = 1
    try:
        os.setsid()
        with open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), 0)
        print_to(Path(request["log"]))
        _enter(request)
        sys.argv = ["tilth.cluster.worker.local_worker", *request["arguments"]]
        folder, rank, workers, timeout = request["arguments"]
        local_worker.main(SessionDir(Path(folder)), int(rank), int(workers), float(timeout))
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:  # noqa: BLE001 - the end of the process: its log has the traceback
        traceback.print_exc()
    finally:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)  # without the server's own clean-up; the roles have closed what they opened


def print_to(log: Path) -> None:
    """Redirect the output of this process to a file, which its node quotes if the process is lost."""
    with open(log, "ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


if __name__ == "__main__":
    main(*sys.argv[1:])
