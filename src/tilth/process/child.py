"""Child processes, seen from the process that starts them."""

import json
import os
import select
import selectors
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Generic, TypeVar

from tilth.core.memory import oom_kills
from tilth.process.frames import drain, frame, take_frames
from tilth.process.output import OutputFile, Prints

BOOT = (
    "import json, sys; sys.path[:], *rest = json.loads(sys.argv.pop()); "
    "from tilth.process.program import run; run(*rest)"
)
"""Program of a child that speaks by frames."""
MEMORY_RAN_OUT = "(memory ran out: "
"""Part of the description of a process that the kernel killed for want of memory."""
ONE_THREAD = dict.fromkeys(["OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"], "1")


class Child:
    """Process started from a command, killed with all that it started.

    environment: all of its variables. stdin, stdout, stderr: as of ``subprocess.Popen``. pass_fds: descriptors that it
    gets. session: False: it stays in the session of this process, and is killed alone.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        stdin: int = subprocess.PIPE,
        stdout: int | OutputFile | None = None,
        stderr: int | OutputFile | None = None,
        pass_fds: Sequence[int] = (),
        session: bool = True,
    ) -> None:
        self.process: subprocess.Popen[bytes] = subprocess.Popen(
            command,
            stdin=stdin,
            stdout=stdout,  # type: ignore[arg-type]  # anything with fileno()
            stderr=stderr,  # type: ignore[arg-type]
            env=environment,
            pass_fds=pass_fds,
            start_new_session=session,  # Ctrl-C goes to the run alone; killing the group ends its own children too
        )
        self._session = session

    @property
    def pid(self) -> int:
        """Number of the process."""
        return self.process.pid

    def alive(self) -> bool:
        """Return False once it has ended."""
        return self.process.poll() is None

    def tell(self, data: bytes) -> None:
        """Write to its standard input and close that. One that has ended is not told."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError), self.process.stdin as pipe:
            pipe.write(data)

    def wait(self, seconds: float) -> int | None:
        """Wait for its end; return its exit code (-N: by signal N), None while it runs."""
        with suppress(subprocess.TimeoutExpired):
            return self.process.wait(seconds)
        return None

    def kill(self) -> int:
        """Kill it and all that it started; return its exit code. May be called twice."""
        if self._session:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)  # does not change the exit code of one that died already
        else:
            self.process.kill()
        return self.process.wait()

    def end(self, seconds: float) -> None:
        """Wait for its end, and kill it if that does not come in time."""
        if self.wait(seconds) is None:
            self.kill()


class PipedChild(Child):
    """Child that speaks by frames over pipes that never block, with one thread for numbers.

    main: "module:function", called there with the ends of the pipes and ``arguments`` (``program.run``). greeting:
    body of its first frame. output: descriptor for what it prints. variables: of its environment. pass_fds: as of
    ``Child``.
    """

    def __init__(
        self,
        main: str,
        arguments: Sequence[Any],
        greeting: bytes,
        output: int | None = None,
        *,
        variables: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        given = json.dumps([[str(path) for path in sys.path], os.getpid(), main, *arguments])
        super().__init__(
            [sys.executable, "-P", "-c", BOOT, given],
            # A fixed hash seed: code that iterates over a set returns the same when the run is replayed.
            {"PYTHONHASHSEED": "0", **os.environ, **ONE_THREAD, **(variables or {})},
            stdout=subprocess.PIPE,
            stderr=output,
            pass_fds=pass_fds,
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self.requests, self.replies = self.process.stdin.fileno(), self.process.stdout.fileno()
        os.set_blocking(self.requests, False)
        os.set_blocking(self.replies, False)
        self._outbox, self._inbox = bytearray(frame(greeting)), bytearray()

    @property
    def idle(self) -> bool:
        """True if it ends by itself once its requests end."""
        return False

    @property
    def unsent(self) -> bool:
        """True if bytes wait to be written to the process."""
        return bool(self._outbox)

    def send(self, body: bytes) -> None:
        """Queue a frame with this body."""
        self._outbox += frame(body)
        self.write()

    def write(self) -> bool:
        """Write as much as the pipe takes; False if the other end is gone."""
        try:
            while self._outbox:
                del self._outbox[: os.write(self.requests, self._outbox)]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            return False
        return True

    def read(self) -> bool:
        """Read what there is; False at the end of the stream."""
        return drain(self.replies, self._inbox)

    def bodies(self) -> Iterator[bytes]:
        """Yield the bodies of the complete frames received so far."""
        yield from take_frames(self._inbox)

    def hang_up(self) -> None:
        """Close its request pipe, on which an idle process ends."""
        assert self.process.stdin is not None
        self.process.stdin.close()

    def kill(self) -> int:
        """Kill it and all that it started, read its last messages, return its exit code. May be called twice."""
        code = super().kill()
        assert self.process.stdout is not None
        if not self.process.stdout.closed:
            self.read()
        self.hang_up()
        self.process.stdout.close()
        return code


def finalize(owner: object, close: Callable[..., object], *arguments: Any) -> "weakref.finalize[..., Any]":
    """Call ``close`` once: when it is asked for, ``owner`` is collected, or this process ends. Not in a fork, which may
    end while what is to be closed belongs to this process."""
    return weakref.finalize(owner, _close, os.getpid(), close, *arguments)


def _close(process: int, close: Callable[..., object], *arguments: Any) -> None:
    if os.getpid() == process:
        close(*arguments)


def death(code: int) -> str:
    """Return how a process died, by its exit code."""
    return f"died with exit code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"


def how_ended(code: int, kills: int | None = None) -> str:
    """Return how a process ended, and whether for want of memory. kills: out-of-memory kills of the kernel at its
    start."""
    if code >= 0:
        return f"ended with exit code {code}"
    if code != -signal.SIGKILL:
        return death(code)
    now = oom_kills()
    if kills is None or now is None:
        return f"{death(code)} (often because memory ran out)"
    if now > kills:
        return f"{death(code)} {MEMORY_RAN_OUT}the kernel has killed {now - kills} processes since it started)"
    return f"{death(code)} (not since memory ran out: the kernel has killed nothing for that)"


# ---- pools: children started by one thread, heard together, ended together ----

CLOSE_SECONDS = 1.0
"""Seconds for idle children to end by themselves."""
C = TypeVar("C", bound=PipedChild)


class ChildPool(Generic[C]):
    """Children of one kind. ``children`` may be changed: who removes one kills it.

    make: starts one, given the descriptor for its output. prints: takes that; None: standard error of this process.
    """

    def __init__(self, make: Callable[[int | None], C], prints: Prints | None = None) -> None:
        self.children: list[C] = []
        self._make, self._prints = make, prints
        # The kernel kills a child when the *thread* that started it ends, so one long-lived thread starts them all.
        self._starter = ThreadPoolExecutor(1, "child-starter")
        self._closed = finalize(self, _end_all, self.children, self._starter, prints)

    @property
    def alive(self) -> bool:
        """False once the pool is closed."""
        return self._closed.alive

    def start(self) -> C:
        """Start a child besides."""
        output = None if self._prints is None else self._prints.writer
        child = self._starter.submit(self._make, output).result()
        self.children.append(child)
        return child

    def close(self) -> None:
        """End all children and wait for their end. May be called twice."""
        self._closed()


def ready(children: Sequence[C], seconds: float, wake: int | None = None) -> list[C]:
    """Wait for children that can be read, or written to if they have unsent bytes.

    wake: descriptor that does not block; what can be read from it is, and ends the wait.
    """
    with selectors.DefaultSelector() as selector:
        if wake is not None:
            selector.register(wake, selectors.EVENT_READ)
        for child in children:
            selector.register(child.replies, selectors.EVENT_READ, child)
            if child.unsent:
                selector.register(child.requests, selectors.EVENT_WRITE, child)
        found = [key.data for key, _ in selector.select(max(0.0, seconds))]
        if wake is not None and None in found:
            drain(wake, bytearray())
        return list({id(child): child for child in found if child is not None}.values())


def _end_all(children: list[C], starter: ThreadPoolExecutor, prints: Prints | None) -> None:
    for child in children:
        child.hang_up()
    deadline = time.monotonic() + CLOSE_SECONDS
    for child in children:
        while child.idle and child.read() and (left := deadline - time.monotonic()) > 0:
            select.select([child.replies], [], [], left)
        child.kill()
    children.clear()
    starter.shutdown()
    if prints is not None:
        prints.close()
