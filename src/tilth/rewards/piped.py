"""Child process of a pool that runs user code: started apart, spoken to by frames over pipes that never block, killed
with all that it started.
"""

import contextlib
import json
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tilth.rewards.process import drain


class PipedProcess:
    """One process and its pipes.

    boot: Python source, which finds ``arguments`` by ``json.loads(sys.argv.pop())``. greeting: first bytes for it.
    variables: of its environment. errors: descriptor of its standard error. pass_fds: descriptors that it gets.
    """

    def __init__(
        self,
        boot: str,
        arguments: Sequence[Any],
        greeting: bytes,
        *,
        variables: Mapping[str, str] | None = None,
        errors: int | None = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        threads = dict.fromkeys(["OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"], "1")
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", boot, json.dumps(arguments)],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            # A fixed hash seed: code that iterates over a set returns the same when the run is replayed.
            env={"PYTHONHASHSEED": "0", **os.environ, **threads, **(variables or {})},
            pass_fds=pass_fds,
            start_new_session=True,  # Ctrl-C goes to the run alone; killing the group ends the code's children too
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self.requests, self.replies = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self.requests, False)
        os.set_blocking(self.replies, False)
        self._outbox, self._inbox = bytearray(greeting), bytearray()

    @property
    def unsent(self) -> bool:
        """True if bytes wait to be written to the process."""
        return bool(self._outbox)

    def send(self, data: bytes) -> None:
        """Queue a frame."""
        self._outbox += data
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
        while len(self._inbox) >= 8:
            end = 8 + struct.unpack_from("<Q", self._inbox)[0]
            if len(self._inbox) < end:
                return
            body = bytes(self._inbox[8:end])
            del self._inbox[:end]
            yield body

    def kill(self) -> int:
        """Kill the process and its children, read its last messages, return its exit code (-n: by signal n). May be
        called twice."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # does not change the exit code of one that died already
        code = self._process.wait()
        assert self._process.stdin is not None and self._process.stdout is not None
        if not self._process.stdout.closed:
            self.read()
        self._process.stdin.close()
        self._process.stdout.close()
        return code

    def hang_up(self) -> None:
        """Close its request pipe, on which an idle process ends."""
        assert self._process.stdin is not None
        self._process.stdin.close()


def death(code: int) -> str:
    """Return how a process ended, by its exit code."""
    return f"died with exit code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"
