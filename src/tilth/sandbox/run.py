"""Run programs in a sandbox: limits, outcomes, and the process that they are forked from."""

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import tilth
from tilth.process.child import Child, finalize
from tilth.process.frames import frame, read_frame
from tilth.sandbox.kernel import SandboxError

BOOT = (
    "import json, sys; path, door = json.load(sys.stdin); sys.path.append(path); "
    "from tilth.sandbox.zygote import main; sys.path.remove(path); main(door)"
)
"""Program of the first process, which needs nothing of Tilth's folder once it is imported. Programs see its command
line, so that the folder comes by its standard input."""
START = 30.0
"""Seconds for the first process to be ready."""
SPARE = 5.0
"""Seconds for the answer of a program whose time is over."""
DYING = 0.5
"""Seconds in which the first process ends once its forks have died with it; later, a fork alone has died."""


@dataclass(frozen=True)
class SandboxLimits:
    """Limits of one program.

    seconds: of wall time. cpu: seconds of each process, in whole ones. memory: bytes of address space of each process.
    processes: threads too. files: bytes of all files in /work, and in /tmp. output: bytes of stdout and stderr.
    """

    seconds: float = 5.0
    cpu: float = 5.0
    memory: int = 512 << 20
    processes: int = 16
    files: int = 16 << 20
    output: int = 1 << 20

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not value > 0:
                raise SandboxError(f"sandbox limit {name} = {value!r}; it must be above 0", key=f"sandbox.{name}")


@dataclass(frozen=True)
class SandboxOutcome:
    """Outcome of a program. state: ok, error (exit code not 0), or limit; then ``limit`` is the one it broke."""

    state: str
    limit: str
    code: int
    """Exit code; 128 + N after signal N."""
    stdout: str
    stderr: str
    seconds: float
    cpu: float
    """Processor seconds of all its processes that it waited for."""


class Sandbox:
    """Runs Python programs that nobody trusts. Threads may share one.

    If a process of it dies, a program of which nothing has come out runs once more, in a new first process if need be.
    Raises SandboxError if the kernel does not give what it needs: then nothing is run.
    """

    def __init__(self, limits: SandboxLimits | None = None) -> None:
        self.limits = limits or SandboxLimits()
        self._lock, self._done = threading.Lock(), False
        self._begin()

    def _begin(self) -> None:
        """Start the first process. SandboxError if it cannot run a program."""
        self._door, theirs = socket.socketpair()
        path = str(Path(tilth.__file__).parents[1])
        with theirs:
            self._process = Child(
                [os.path.realpath(sys.executable), "-I", "-S", "-c", BOOT],
                {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"},
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
            )
            self._process.tell(json.dumps([path, theirs.fileno()]).encode())
        self._closed = finalize(self, _end, self._process, self._door)
        self._door.settimeout(START)
        try:
            problem = "" if self._door.recv(1) == b"\0" else self._door.recv(4096).decode() or "its first process ended"
            if (
                not problem
                and (found := _ask(self._door, _request("print(6 * 7)", self.limits), START)).stdout != "42\n"
            ):
                problem = found.stderr.strip().rpartition("\n")[2] or f"a first program ended with {found.state}"
        except TimeoutError:
            problem = f"its first process is not ready within {START:g} s"
        except OSError as error:
            problem = str(error)
        if problem:
            self._closed()
            raise SandboxError(f"no sandbox on this machine: {problem}; programs are not run without", key="sandbox")

    def run(
        self,
        program: str,
        *,
        stdin: str = "",
        files: Mapping[str, str] | None = None,
        limits: SandboxLimits | None = None,
    ) -> SandboxOutcome:
        """Execute Python source with these texts as files in its working directory. SandboxError if it cannot be run.

        What it does cannot be seen by a later program: each has its own file system, processes and network.
        """
        chosen = limits or self.limits
        request, seconds, door = _request(program, chosen, stdin, files or {}), chosen.seconds + SPARE, self._door
        try:
            try:
                return _ask(door, request, seconds)
            except TimeoutError:
                raise
            except OSError:  # a process of it has died, or another thread has closed the door of one that has
                self._renew(door)
                return _ask(self._door, request, seconds)
        except OSError as error:
            raise SandboxError(f"the sandbox does not answer: {error}", key="sandbox.answer") from None

    def _renew(self, door: socket.socket) -> None:
        """Start another first process if that of this door has ended, unless another thread did."""
        with self._lock:
            if self._done:
                raise SandboxError("the sandbox is closed", key="sandbox.closed")
            if door is self._door and self._process.wait(DYING) is not None:
                self._closed()
                self._begin()

    def close(self) -> None:
        """End it. May be called twice."""
        with self._lock:
            self._done = True
            self._closed()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _request(program: str, limits: SandboxLimits, stdin: str = "", files: Mapping[str, str] | None = None) -> bytes:
    """Return a request as the first process reads it. SandboxError for a text or name that it cannot have."""
    names = files or {}
    parts = {name: Path(name).parts for name in names}
    if wrong := [n for n, p in parts.items() if not p or p[0] == "/" or ".." in p or "\0" in n]:
        raise SandboxError(f"file {wrong[0]!r} is not below the working directory", key="sandbox.files")
    for text in (stdin, *names, *names.values()):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise SandboxError(f"the input or a file has no UTF-8: {error}", key="sandbox.text") from None
    found = json.dumps({"program": program, "stdin": stdin, "files": dict(names), "limits": asdict(limits)}).encode()
    return frame(found)


def _ask(door: socket.socket, request: bytes, seconds: float) -> SandboxOutcome:
    """Return the outcome of a request. ConnectionError if a process that had it has died; OSError."""
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            socket.send_fds(door, [b"\0"], [theirs.fileno()])
        ours.settimeout(seconds)
        ours.sendall(request)
        with ours.makefile("rb") as answers:
            outcome = read_frame(answers)
    if outcome is None:
        raise ConnectionResetError("it ended without an outcome")
    return SandboxOutcome(**json.loads(outcome))


def _end(process: Child, door: socket.socket) -> None:
    door.close()
    process.kill()
