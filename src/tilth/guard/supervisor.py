"""Supervisor: a small process that starts the controller of a run, and starts it again when it is killed.

    supervisor --- fork server --- controller (a child of the supervisor), workers
        |                              |
        +---- folder in shared memory -+   snapshots with their index, rows of trajectories, the run's path

``tilth run`` is this process where workers can be replaced. It imports no torch; the fork server has it and forks the
controller as it forks workers, so that another one stands in within a second. The controller has the supervisor's
standard streams, session and process group. It ends with the supervisor, and its exit code is the command's.
"""

import ctypes
import fcntl
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tilth.cluster.backends.fork_server import ServerProcess
from tilth.cluster.backends.local import environment, how_ended
from tilth.cluster.backends.session_dir import SessionDir
from tilth.core.errors import WorkerLost
from tilth.core.memory import oom_kills
from tilth.guard.recovery import Recovery
from tilth.guard.verdict import Verdict

REPLACEABLE = ("local", "ray")
"""Backends whose runs are supervised."""
RUN = "run"
"""File of the handover with the path of the run's folder."""
_SUBREAPER = 36
"""PR_SET_CHILD_SUBREAPER: orphans among the descendants become children of this process."""
_ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_FATAL = (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSYS)
"""Signals after which the controller is started again."""


@dataclass(frozen=True)
class Death:
    """Death of a controller. at: ``time.monotonic`` of this machine; step: last committed; lost: seconds since then."""

    at: float
    step: int
    lost: float
    evidence: str


@dataclass(frozen=True)
class Inherited:
    """Inheritance of a controller from its supervisor.

    folder: in shared memory, outlives controllers; run: folder of the run that a former controller began, "": none;
    death: of that controller.
    """

    folder: str
    run: str = ""
    death: Death | None = None

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "Inherited":
        """Return it from its JSON."""
        death = values.get("death")
        return cls(**{**values, "death": None if death is None else Death(**death)})

    def enter(self, run: Path) -> None:
        """Let the supervisor know the folder of the run."""
        (Path(self.folder) / RUN).write_text(str(run.resolve()))


class Supervisor:
    """Supervise one run. restarts: most restarts within an hour (``guard.restarts``)."""

    def __init__(self, restarts: int) -> None:
        self._recovery = Recovery(restarts)
        self._asked = 0
        """Signal that has asked the run to end; 0: none."""
        self._kills = oom_kills()
        self._child = 0
        """Process that does the work now: the check of the recipe, or the controller; 0: none."""

    def run(self, check: int) -> int:
        """Run to the end and return the exit code. check: a child process that checks the recipe.

        Call with signals blocked (``block``). KeyboardInterrupt or Terminated if a signal comes before the controller.
        """
        ctypes.CDLL(None).prctl(_SUBREAPER, 1)
        self._folder = SessionDir.create()
        self._scratch = self._folder.scratch
        self._server = self._serve()
        self._child = check
        try:
            code = self._wait()
            if code:
                return _exit_code(code)
            handover = Inherited(str(self._scratch))
            while True:
                self._request(handover)
                code = self._wait()
                if code >= 0 or self._asked or -code not in _FATAL:
                    return _exit_code(code)
                handover = self._after(code)
        finally:
            self._server.process.kill()
            self._server.process.wait()
            self._folder.remove()

    def _serve(self) -> ServerProcess:
        server = ServerProcess(environment(1), str(self._folder.path))
        descriptor = server.socket.fileno()
        fcntl.fcntl(descriptor, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_ASYNC)
        return server

    def _request(self, handover: Inherited) -> None:
        """Ask for a controller."""
        streams = [number for number in range(3) if _is_open(number)]
        request = {
            "owner": os.getpid(),
            "streams": streams,
            "nohup": signal.getsignal(signal.SIGHUP) is signal.SIG_IGN,
            "environment": dict(os.environ),
            "path": [path or os.getcwd() for path in sys.path],
            "folder": os.getcwd(),
            "argv": sys.argv,
            "handover": asdict(handover),
        }
        data = json.dumps({"controller": request}).encode() + b"\n"
        try:
            sent = socket.send_fds(self._server.socket, [data], streams)
            self._server.socket.sendall(data[sent:])
        except OSError:
            raise WorkerLost(self._server.ending(), key="guard.supervisor") from None

    def _wait(self) -> int:
        """Pass signals on until the child has ended; return its exit code, negative for a signal."""
        while True:
            info = signal.sigwaitinfo({*_ENDS, signal.SIGCHLD, signal.SIGIO})
            if info.si_signo == signal.SIGIO:
                self._hear()
            elif info.si_signo == signal.SIGCHLD:
                if (code := self._reap()) is not None:
                    return code
            else:
                self._asked = info.si_signo
                self._end(from_process=info.si_code <= 0)

    def _hear(self) -> None:
        """Read which process the controller is. WorkerLost if the fork server ended before it made one."""
        with suppress(BlockingIOError):
            data = self._server.socket.recv(1 << 16, socket.MSG_DONTWAIT)
            for line in data.splitlines():
                self._child = json.loads(line)["controller"]
            if not data and not self._child:
                raise WorkerLost(self._server.ending(), key="guard.supervisor")

    def _reap(self) -> int | None:
        """Return how the child ended; None while it runs. Orphans of a controller end here too."""
        found = None
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == self._server.process.pid:
                    self._server.process.returncode = os.waitstatus_to_exitcode(ended[1])
                self._hear()  # it may have ended before it was heard of
                if ended[0] == self._child:
                    found, self._child = os.waitstatus_to_exitcode(ended[1]), 0
        return found

    def _end(self, *, from_process: bool) -> None:
        """Pass a signal on that was sent to this process alone; a terminal sends it to the child too."""
        if self._child:
            if from_process:
                with suppress(ProcessLookupError):
                    os.kill(self._child, self._asked)
            return
        unblock()
        signal.raise_signal(self._asked)

    def _after(self, code: int) -> Inherited:
        """Decide what follows from the controller's death. WorkerLost if the run ends with it."""
        now, run = time.monotonic(), self._run()
        step, lost = _progress(run)
        evidence = f"the controller {how_ended(code, self._kills)}"
        action = self._recovery.decide(Verdict("controller", (), evidence), step, now)
        if action.step == "stop":
            where = f"; the same command continues in {run}" if run else ""
            raise WorkerLost(f"{evidence} after step {step}: {action.why}{where}", key="guard.controller")
        print(f"tilth: {evidence} after step {step}; another one goes on", file=sys.stderr)
        return Inherited(str(self._scratch), run, Death(now, step, lost, evidence))

    def _run(self) -> str:
        with suppress(FileNotFoundError):
            return (self._scratch / RUN).read_text()
        return ""


def block() -> None:
    """Leave signals to ``Supervisor.run``, which waits for them."""
    hangup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    ends = [number for number in _ENDS if number != signal.SIGHUP or not hangup]
    signal.pthread_sigmask(signal.SIG_BLOCK, {*ends, signal.SIGCHLD, signal.SIGIO})


def unblock() -> None:
    """Take signals again, but none of the fork server's."""
    signal.signal(signal.SIGIO, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {*_ENDS, signal.SIGCHLD, signal.SIGIO})


def _progress(run: str) -> tuple[int, float]:
    """Return the last committed step of a run, and the seconds since."""
    path = Path(run) / "metrics.jsonl"
    if not run or not path.exists():
        return 0, 0.0
    lines = path.read_bytes().rpartition(b"\n")[0].splitlines()  # the last one may be torn
    return json.loads(lines[-1])["step"] if lines else 0, max(time.time() - path.stat().st_mtime, 0.0)


def _exit_code(code: int) -> int:
    """Return the exit code of a command whose child ended with this one, as shells have it for a signal."""
    return code if code >= 0 else 128 - code


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True
