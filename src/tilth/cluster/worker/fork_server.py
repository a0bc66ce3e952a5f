"""Fork server of the local workers: a process that has imported what they need and forks one for each request.

Importing torch and the roles takes a second or two of a core. With it a machine does that once, not once for
each worker, and replaces a worker that was lost in a fraction of a second.

It talks to its controller over its standard input, a socket, in JSON lines. A request ``{"arguments": [...],
"environment": {...}, "path": [...], "folder": ..., "log": ...}`` is answered with ``{"started": PID}``. Each end of a
worker is reported as ``{"ended": PID, "code": CODE}``, negative for a signal. It ends with its controller, or when it
has had no worker for a while.
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
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from tilth.cluster.backends.session_dir import SessionDir
from tilth.cluster.worker import local_worker

Closable = socket.socket | selectors.BaseSelector
IDLE = 60.0
"""Seconds without a worker after which it ends."""
AHEAD = (
    "tilth.flows.workers",
    "tilth.models.family",
    "tilth.rollout.engine",
    "tilth.guard.diagnosis",
    "numpy.random",
    "torch._dynamo",
    "torch._inductor.codecache",
)
"""Modules of the shipped roles, which belong to packages that build on this one, what roles import when they are
made (torch._dynamo: every optimizer), and what a worker that hangs needs to answer (torch's recorder names frames by
its compiler's code)."""


def main() -> None:
    """Serve until the controller closes its end."""
    gc.disable()
    for name in AHEAD:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection in a worker would copy the pages that it shares with the others
    wake, woken = socket.socketpair()
    for end in (wake, woken):
        end.setblocking(False)
    signal.set_wakeup_fd(woken.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the controller ends it
    with socket.socket(fileno=os.dup(0)) as controller, selectors.DefaultSelector() as ready:
        ready.register(controller, selectors.EVENT_READ)
        ready.register(wake, selectors.EVENT_READ)
        _serve(controller, wake, woken, ready)


def _serve(controller: socket.socket, wake: socket.socket, woken: socket.socket, ready: selectors.BaseSelector) -> None:
    rest, living = b"", 0
    while events := {key.fileobj for key, _ in ready.select(None if living else IDLE)}:
        if wake in events:
            with suppress(BlockingIOError):
                wake.recv(4096)
            living -= _reap(controller)
        if controller in events:
            data = controller.recv(1 << 16)
            if not data:
                return
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                _start(json.loads(line), controller, (wake, woken, ready))
                living += 1


def _reap(controller: socket.socket) -> int:
    """Report the workers that have ended; return their number."""
    count = 0
    with suppress(ChildProcessError):  # none is left
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            _tell(controller, ended=found[0], code=os.waitstatus_to_exitcode(found[1]))
            count += 1
    return count


def _tell(controller: socket.socket, **message: int) -> None:
    with suppress(BrokenPipeError, ConnectionResetError):  # the controller is gone, which the next read shows
        controller.sendall(json.dumps(message).encode() + b"\n")


def _start(
    request: dict[str, Any], controller: socket.socket, ours: tuple[socket.socket | selectors.BaseSelector, ...]
) -> None:
    if pid := os.fork():
        _tell(controller, started=pid)
        return
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    for end in (controller, *ours):
        end.close()
    _become(request)


def _become(request: dict[str, Any]) -> NoReturn:
    """Be the worker of a request, in a fork of the server. Never returns into the server."""
    code = 1
    try:
        os.setsid()
        _redirect(request["log"])
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["folder"])
        sys.path[:] = request["path"]
        sys.argv = ["tilth.cluster.worker.local_worker", *request["arguments"]]
        random.seed()
        gc.enable()
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


def _redirect(log: str) -> None:
    """Read nothing, and print to a file."""
    with open(os.devnull, "rb") as nothing, open(log, "ab", buffering=0) as out:
        os.dup2(nothing.fileno(), 0)
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)


if __name__ == "__main__":
    main()
