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
import itertools
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from tilth.cluster.backends.capacity import patience
from tilth.cluster.backends.fork_server import START, ServerProcess
from tilth.cluster.backends.local import environment
from tilth.cluster.backends.session_dir import SessionDir
from tilth.core.errors import TilthError, WorkerLost
from tilth.core.memory import oom_kills
from tilth.guard.recovery import Recovery
from tilth.guard.verdict import Verdict
from tilth.process.child import how_ended
from tilth.runs.updates import NONE, RecipeChange, Update, read_updates

REPLACEABLE = ("local", "ray")
"""Backends whose runs are supervised."""
RUN = "run"
"""File of the handover with the path of the run's folder."""
TAKEN = "taken"
"""File of the handover that is there once the controller has committed a step with the update that it tries."""
LEFT = 75
"""Exit code of a controller that leaves its run to the next one, which has an update (EX_TEMPFAIL)."""
PULSE = "pulse"
"""File of the handover with a number that grows while the controller runs Python."""
BEGUN = "begun"
"""File of the handover with the ``time.monotonic`` from which the controller recovers from failures by itself."""
FELL = "fell"
"""File of the handover with the error of a worker that was lost before: ``key`` and ``evidence``."""
ASKED = "asked"
"""File of the handover with the name of the signal that has asked the controller to end."""
BEAT = 0.25
"""Seconds between two beats of the pulse."""
TICK = 0.5
"""Seconds between two looks at it."""
LEAST = 5.0
"""Seconds that a controller may stand still at least."""
_SUBREAPER, _IS_SUBREAPER = 36, 37
"""PR_SET_CHILD_SUBREAPER: orphans among the descendants become children of this process; and what asks for it."""
_ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_FATAL = (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSYS)
"""Signals after which the controller is started again."""


@dataclass(frozen=True)
class Death:
    """Death of a controller. at: ``time.monotonic`` of this machine; step: last committed; lost: seconds since then,
    or since the recovery from an earlier death."""

    at: float
    step: int
    lost: float
    evidence: str

    def record(self, action: str = "replace") -> dict[str, Any]:
        """Return the line of a recovery from it, as of now; action "stop": there is none."""
        seconds = 0.0 if action == "stop" else round(time.monotonic() - self.at, 3)
        facts = {"kind": "controller", "ranks": [], "evidence": self.evidence, "action": action, "replaced": []}
        return {"step": self.step, **facts, "seconds": seconds, "lost": round(self.lost, 3)}


@dataclass(frozen=True)
class Inherited:
    """Inheritance of a controller from its supervisor.

    folder: in shared memory, outlives controllers; run: folder of the run that a former controller began, "": none;
    death: of that controller; change: updates of the recipe; tried: number of the newest update, with which no step was
    committed yet; 0: none; undone: why the former controller has failed with it, and this one goes on without.
    """

    folder: str
    run: str = ""
    death: Death | None = None
    change: RecipeChange = NONE
    tried: int = 0
    undone: str = ""

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "Inherited":
        """Return it from its JSON."""
        death = None if values["death"] is None else Death(**values["death"])
        if "tried" not in values:  # of a supervisor of an earlier version
            undone = values["undone"] and "it ended before its first commit"
            values = {**values, "tried": values["change"]["number"], "undone": undone or ""}
        return cls(**{**values, "death": death, "change": RecipeChange.of(values["change"])})

    def enter(self, run: Path) -> None:
        """Let the supervisor know the folder of the run."""
        (Path(self.folder) / RUN).write_text(str(run.resolve()))

    def take(self) -> None:
        """Let the supervisor know that a step is committed with the update that was tried."""
        new = Path(self.folder) / f"{TAKEN}.new"
        new.write_text(str(self.change.number))  # the number for supervisors of an earlier version
        os.replace(new, Path(self.folder) / TAKEN)

    def begin(self) -> None:
        """Let the supervisor know that the run goes on: whatever fails now, this process recovers from it."""
        (Path(self.folder) / BEGUN).write_text(str(time.monotonic()))

    def fall(self, error: TilthError) -> bool:
        """Leave a failure to the supervisor, if it came before the run went on and nobody has asked it to end."""
        folder = Path(self.folder)
        if (folder / BEGUN).exists() or (folder / ASKED).exists():
            return False
        (folder / FELL).write_text(json.dumps({"key": error.key, "evidence": str(error)}))
        return True

    def ask(self, number: int) -> None:
        """Let the supervisor know, in the handler of a signal, that it has asked this process to end."""
        (Path(self.folder) / ASKED).write_text(signal.Signals(number).name)

    def beat(self) -> None:
        """Show the supervisor from now on that this process runs."""

        def run() -> None:
            with open(Path(self.folder) / PULSE, "wb", buffering=0) as file:
                for beats in itertools.count(1):
                    os.pwrite(file.fileno(), beats.to_bytes(8, "little"), 0)
                    time.sleep(BEAT)  # nothing to wait on

        threading.Thread(target=run, name="pulse", daemon=True).start()


class PulseWatch:
    """Watches how long a controller has stood still: its pulse does, it computes nothing, and no debugger holds it.

    Only time in which this process runs itself counts: not that of a machine that sleeps, of jumping clocks, or of a
    terminal that has stopped both (Ctrl-Z). A controller that holds the GIL and computes is at work.
    """

    def __init__(self, pulse: Path, controller: psutil.Process) -> None:
        self._pulse, self._controller = pulse, controller
        self._seen: tuple[bytes, float] = b"", 0.0
        self._looked = time.monotonic()
        self.seconds = 0.0

    def look(self) -> None:
        """Add the time since the last look, or begin anew."""
        now = time.monotonic()
        passed, self._looked = min(now - self._looked, 2 * TICK), now
        try:
            spent, held = sum(self._controller.cpu_times()[:2]), self._controller.status() == psutil.STATUS_TRACING_STOP
            seen = self._pulse.read_bytes(), spent
        except (FileNotFoundError, psutil.NoSuchProcess):  # it begins, or it is gone
            return
        self.seconds = 0.0 if held or seen != self._seen else self.seconds + passed
        self._seen = seen

    def evidence(self) -> str:
        """Describe what holds it."""
        how = "a signal has stopped it" if self._controller.status() == psutil.STATUS_STOPPED else "it runs no Python"
        return f"stood still for {self.seconds:.1f} s (guard.hang_after): {how}"


@contextmanager
def _subreaper() -> Iterator[None]:
    """Be the parent of orphans among the descendants of this process."""
    prctl, before = ctypes.CDLL(None).prctl, ctypes.c_int()
    prctl(_IS_SUBREAPER, ctypes.byref(before))
    prctl(_SUBREAPER, 1)
    try:
        yield
    finally:
        prctl(_SUBREAPER, before.value)


class Supervisor:
    """Supervise one run. restarts: most restarts within an hour (``guard.restarts``); hang_after: seconds for which the
    controller may stand still, at least ``LEAST``; note: adds a recovery that has failed to the record of a run."""

    def __init__(self, restarts: int, hang_after: float, note: Callable[[str, Mapping[str, Any]], None]) -> None:
        self._limits = restarts, hang_after
        self._recovery, self._hang_after, self._note = Recovery(restarts), hang_after, note
        self._still: PulseWatch | None = None
        self._hung = ""
        """What held the controller that this process has killed for it."""
        self._change = NONE
        """Updates in force."""
        self._trying: Update | None = None
        """Update that the controller tries."""
        self._asked = 0
        """Signal that has asked the run to end; 0: none."""
        self._kills = oom_kills()
        self._child = 0
        """Process that does the work now: the check of the recipe, or the controller; 0: none."""
        self._served: ServerProcess | None = None
        """Fork server that has made a controller."""
        self._requested = 0.0
        """When a controller was asked for."""
        self._death: Death | None = None
        """Death that the controller recovers from."""

    @_subreaper()
    def run(self, check: int) -> int:
        """Run to the end and return the exit code. check: a child process that checks the recipe.

        Call with signals blocked (``block``). KeyboardInterrupt or Terminated if a signal comes before the controller.
        """
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
                code, why = self._control(handover)
                asked = bool(self._asked) or (self._scratch / ASKED).exists()
                if self._trying is not None and (self._scratch / TAKEN).exists():
                    self._change, self._trying = self._trying.change, None
                if self._trying is not None and code and not asked:
                    why = why or self._fallen()[0] or _last_words(self._run(), code)
                    handover = self._with_updates(self._undo(self._trying, why))
                elif code == LEFT and not asked:
                    self._inherit()
                    handover = self._with_updates(Inherited(str(self._scratch), self._run()))
                elif self._asked or not (self._fallen()[0] if code >= 0 else -code in _FATAL):
                    return _exit_code(code)
                elif (ended := self._ended(code)) is not None:
                    return ended
                else:
                    handover = self._with_updates(self._after(code))
        finally:
            self._server.kill()
            self._folder.remove()

    def _control(self, handover: Inherited) -> tuple[int, str]:
        """Start a controller and wait for its end; return its exit code, and why new code cannot be imported."""
        for again in (True, False):
            try:
                self._request(handover)
                return self._wait(), ""
            except WorkerLost as error:
                if self._trying is not None:
                    return 1, str(error)
                if not again:
                    raise
                self._server = self._serve()
        raise AssertionError("it has returned or raised")

    # ---- updates ----

    def _with_updates(self, handover: Inherited) -> Inherited:
        """Add the updates in force, and those that wait unless one has just failed, with the limits of the newest."""
        past = read_updates(handover.run) if handover.run else []
        new = [one for one in past if one.state == "waiting" and not handover.undone]
        if any(one.renews_tilth for one in new):
            self._server.kill()
            self._server = self._serve()
        self._trying = new[-1] if new else None
        change = self._trying.change if self._trying is not None else self._change
        self._recovery.restarts, self._hang_after = self._limits
        for one in past:
            if one.number == change.number:
                self._recovery.restarts, self._hang_after = one.restarts, one.hang_after or self._hang_after
        return replace(handover, change=change, tried=change.number if new else handover.tried)

    def _inherit(self) -> None:
        """Take over the updates that the run has had under another supervisor."""
        now = RecipeChange.of(_state(self._run())["change"])
        if now.number >= self._change.number:
            self._change = now

    def _undo(self, failed: Update, why: str) -> Inherited:
        """Go back from an update that failed before its first commit to the former recipe, with the plugins as kept."""
        print(f"tilth: {failed.title()} is undone: {why}", file=sys.stderr)
        kept = _state(self._run()).get("plugins")
        back = (*self._change.overrides, *([f"plugins={json.dumps(kept)}"] if kept else []))
        self._change = replace(self._change, overrides=back, allow=(*self._change.allow, *failed.change.allow))
        return Inherited(str(self._scratch), self._run(), tried=failed.number, undone=why)

    # ---- processes ----

    def _serve(self) -> ServerProcess:
        server = ServerProcess(environment(1), str(self._folder.path))
        descriptor = server.socket.fileno()
        fcntl.fcntl(descriptor, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_ASYNC)
        return server

    def _request(self, handover: Inherited) -> None:
        """Ask for a controller."""
        self._still, self._hung, self._requested = None, "", time.monotonic()
        for name in (PULSE, BEGUN, FELL, TAKEN):
            (self._scratch / name).unlink(missing_ok=True)
        streams = [number for number in range(3) if os.path.lexists(f"/proc/self/fd/{number}")]
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
            raise WorkerLost(self._server.ending(), key="launch.supervisor") from None

    def _wait(self) -> int:
        """Pass signals on until the child has ended; return its exit code, negative for a signal."""
        while True:
            info = signal.sigtimedwait({*_ENDS, signal.SIGCHLD, signal.SIGIO}, TICK)
            if info is None:
                self._hear()  # a thread may have taken the signal, of a child too
                self._look()
            if info is None or info.si_signo == signal.SIGCHLD:
                if (code := self._reap()) is not None:
                    return code
            elif info.si_signo == signal.SIGIO:
                self._hear()
            else:
                self._asked = info.si_signo
                self._end(from_process=info.si_code <= 0)

    def _look(self) -> None:
        """Kill a controller that stands still, and a fork server that does not make one."""
        if not self._child and time.monotonic() - self._requested > patience(START):
            self._server.process.kill()
        if self._still is None:
            return
        self._still.look()
        if self._still.seconds > max(self._hang_after, LEAST):
            self._hung = self._still.evidence()
            os.kill(self._child, signal.SIGKILL)
            self._still = None

    def _hear(self) -> None:
        """Read which process the controller is. WorkerLost if the fork server ended before it made one."""
        try:
            data = self._server.socket.recv(1 << 16, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except ConnectionError:  # it ended before it had read all that was asked of it
            data = b""
        for line in data.splitlines():
            self._child, self._served = json.loads(line)["controller"], self._server
            with suppress(psutil.NoSuchProcess):  # it has ended already
                self._still = PulseWatch(self._scratch / PULSE, psutil.Process(self._child))
        if not data and not self._child:
            raise WorkerLost(self._server.ending(), key="launch.supervisor")

    def _reap(self) -> int | None:
        """Return how the child ended; None while it runs. Orphans of a controller end here too."""
        found = None
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == self._server.process.pid:
                    self._server.process.returncode = os.waitstatus_to_exitcode(ended[1])
                self._hear()  # it may have ended before it was heard of
                if ended[0] == self._child:
                    found, self._child, self._still = os.waitstatus_to_exitcode(ended[1]), 0, None
        if self._server is self._served and self._server.process.returncode is not None and found is None:
            self._serve_again()
        return found

    def _serve_again(self) -> None:
        """Start another fork server beside a controller whose own has ended, so that the next one begins at once.

        One that ends before it has made a controller is not replaced before one is needed.
        """
        print(f"tilth: {self._server.ending().partition(';')[0]}; another one is started", file=sys.stderr)
        self._served = None
        try:
            self._server = self._serve()
        except OSError as error:
            print(f"tilth: it cannot be started now: {error}", file=sys.stderr)

    def _end(self, *, from_process: bool) -> None:
        """Pass a signal on that was sent to this process alone; a terminal sends it to the child too."""
        if self._child:
            if from_process:
                with suppress(ProcessLookupError):
                    os.kill(self._child, self._asked)
            return
        unblock()
        signal.raise_signal(self._asked)

    def _how(self, code: int) -> str:
        fell = self._fallen()[0]
        ended = f"could not begin: {fell}" if fell else self._hung or how_ended(code, self._kills)
        return f"the controller {ended}"

    def _fallen(self) -> tuple[str, str]:
        """Return the error of a worker that was lost before the controller could go on, and its key; "", "": none."""
        with suppress(FileNotFoundError, ValueError):  # it was killed while it wrote this
            found = json.loads((self._scratch / FELL).read_bytes())
            return found["evidence"].partition("\n")[0], found["key"]
        return "", ""

    def _ended(self, code: int) -> int | None:
        """Return the exit code of the command if the controller's death ends it: the run is finished, or it was asked
        to end. None otherwise."""
        run, asked = self._run(), self._scratch / ASKED
        if _state(run).get("state") == "finished":
            print(f"tilth: {self._how(code)} after the run had finished; tilth show {run}", file=sys.stderr)
            return 0
        if asked.exists():
            where = f"; the same command continues in {run}" if run else ""
            print(f"tilth: {self._how(code)} after {asked.read_text()} had asked it to end{where}", file=sys.stderr)
            return _exit_code(code)
        return None

    def _after(self, code: int) -> Inherited:
        """Decide what follows from the controller's death. WorkerLost if the run ends with it."""
        now, run = time.monotonic(), self._run()
        step, silent = _progress(run)
        evidence, self._kills = self._how(code), oom_kills()
        begun = self._begun()
        if begun is None and self._death is not None:  # nothing was computed since
            self._note_failed(run, self._death.record())
            lost = 0.0
        else:
            lost = max(min(silent, now - (begun or self._requested)), 0.0)
        self._death = Death(now, step, lost, evidence)
        action = self._recovery.decide(Verdict("controller", (), evidence, {"key": self._fallen()[1]}), step, now)
        if action.step == "stop":
            self._note_failed(run, self._death.record("stop"))
            where = f"; the same command continues in {run}" if run else ""
            raise WorkerLost(f"{evidence} after step {step}: {action.why}{where}", key="guard.controller")
        print(f"tilth: {evidence} after step {step}; another one goes on", file=sys.stderr)
        return Inherited(str(self._scratch), run, self._death)

    def _begun(self) -> float | None:
        """Return when the controller went on with the run; None if it did not."""
        with suppress(FileNotFoundError, ValueError):  # it was killed while it wrote this
            return float((self._scratch / BEGUN).read_text())
        return None

    def _note_failed(self, run: str, record: Mapping[str, Any]) -> None:
        """Record a recovery that its controller could not record."""
        if not run:
            return
        try:
            self._note(run, record)
        except TilthError as error:
            print(f"tilth: the death of a controller is not on record: {error}", file=sys.stderr)

    def _run(self) -> str:
        with suppress(FileNotFoundError):
            return (self._scratch / RUN).read_text()
        return ""


def block() -> None:
    """Leave signals to ``Supervisor.run``, which waits for them."""
    # Another thread, which does not block it, may get one while nobody waits: that must not end the process.
    signal.signal(signal.SIGIO, _heard)
    hangup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    ends = [number for number in _ENDS if number != signal.SIGHUP or not hangup]
    signal.pthread_sigmask(signal.SIG_BLOCK, {*ends, signal.SIGCHLD, signal.SIGIO})


def _heard(number: int, frame: object) -> None:
    """Take a signal of the fork server's that came while nobody waited: what it tells is read with the next one."""


def unblock() -> None:
    """Take signals again, but none of the fork server's."""
    signal.signal(signal.SIGIO, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {*_ENDS, signal.SIGCHLD, signal.SIGIO})


def _progress(run: str) -> tuple[int, float]:
    """Return the last committed step of a run, and the seconds since, by the wall clock."""
    path = Path(run) / "metrics.jsonl"
    if not run or not path.exists():
        return 0, 0.0
    lines = path.read_bytes().rpartition(b"\n")[0].splitlines()  # the last one may be torn
    steps = (_json_object(line).get("step") for line in reversed(lines))
    return next((step for step in steps if isinstance(step, int)), 0), max(time.time() - path.stat().st_mtime, 0.0)


def _state(run: str) -> dict[str, Any]:
    """Return run.json; {} if there is none that can be read, of which the next controller tells."""
    with suppress(OSError):
        return _json_object((Path(run) / "run.json").read_bytes()) if run else {}
    return {}


def _json_object(data: bytes) -> dict[str, Any]:
    """Return the object that a file or a line holds; {} if it holds something else."""
    with suppress(ValueError, RecursionError):
        found = json.loads(data)
        return found if isinstance(found, dict) else {}
    return {}


def _last_words(run: str, code: int) -> str:
    """Return why a controller with this exit code has failed, by the run's own record."""
    last = (_state(run).get("attempts") or [{}])[-1]
    ended = f"the controller ended by signal {-code}" if code < 0 else f"the controller ended with exit code {code}"
    return str(last["why"]) if last.get("state") == "failed" else f"{ended} before its first commit"


def _exit_code(code: int) -> int:
    """Return the exit code of a command whose child ended with this one, as shells have it for a signal."""
    return code if code >= 0 else 128 - code
