"""A pool of processes that tests of several ranks share: started once, on gloo over the loopback interface.

    @pytest.mark.dist
    def test_sum(pool):
        assert pool.run(2, "tests.parallel.test_dims:total", value=3) == [6, 6]

    def total(rank, value):  # runs in each of the processes 0 .. n-1
        grid = ParallelDims.of(Mesh(("dp",), (2,)), rank)
        ...

Arguments and results are pickled (this is test code between a process and its own children). What raises, dies or takes
too long fails the test with the rank and its traceback or log; the processes are killed, and the next test starts new
ones. They end with the test process however that ends.
"""

import ctypes
import importlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path

import pytest

from tests import forked
from tests.patience import patience
from tilth.config.imports import uncollected

ROOT = Path(__file__).parent.parent
GRACE = 3.0
"""Seconds in which the other ranks may tell what they know once one has failed."""


class PoolError(AssertionError):
    """A rank raised, died or took too long."""


class Pool:
    """2 processes, or 4 where a test asks for more than 2.

    size: start that many.
    """

    def __init__(self, size: int = 0) -> None:
        self.size = size
        self.processes: list[subprocess.Popen] = []
        self._pipes: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory | None = None

    def run(self, n: int, function: str, timeout: float = 120.0, **kwargs) -> list:
        """``module:function`` called as function(rank, **kwargs) on ranks 0 .. n-1: their results, by rank."""
        if len(self.processes) < n or any(p.poll() is not None for p in self.processes):
            self.close()
            self._start(self.size or (4 if n > 2 else 2))
        for pipe in self._pipes[:n]:
            pipe.send_bytes(pickle.dumps((function, kwargs)))
        replies = self._collect(n, time.monotonic() + patience(timeout))
        wrong = {rank: told for rank, (ok, told) in replies.items() if not ok}
        if not wrong and len(replies) == n:
            return [replies[rank][1] for rank in range(n)]
        missing = [rank for rank in range(n) if rank not in replies]
        logs = {rank: self._log(rank) for rank in missing}
        self.close()
        said = [f"rank {rank} failed:\n{told}" for rank, told in wrong.items()]
        said += [
            f"rank {rank} did not finish {function} within {timeout:g} s; its log:\n{logs[rank]}" for rank in missing
        ]
        raise PoolError("\n".join(said))

    def _collect(self, n: int, deadline: float) -> dict:
        replies, waiting = {}, dict(zip(self._pipes[:n], range(n)))
        while waiting and time.monotonic() < deadline:
            for pipe in wait(list(waiting), timeout=max(0.0, deadline - time.monotonic())):
                rank = waiting.pop(pipe)
                try:
                    replies[rank] = pickle.loads(pipe.recv_bytes())
                except (EOFError, ConnectionError):
                    replies[rank] = (
                        False,
                        f"process died with exit status {self.processes[rank].wait()}\n{self._log(rank)}",
                    )
                if not replies[rank][0]:
                    deadline = min(deadline, time.monotonic() + patience(GRACE))
        return replies

    def _start(self, size: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="tilth-pool-")
        quiet = {
            "OMP_NUM_THREADS": "1",
            "GOMP_SPINCOUNT": "1000",
            "GLOO_SOCKET_IFNAME": "lo",
            "TORCH_GLOO_LAZY_INIT": "1",
        }
        environment = {**os.environ, **quiet, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src"), *sys.path])}
        for rank in range(size):
            ours, theirs = Pipe()
            command = [*forked.python(), "-m", "tests.pool"]
            command += [str(theirs.fileno()), str(rank), str(size), self._folder.name]
            log = open(Path(self._folder.name) / f"log-{rank}", "wb")
            with theirs, log:
                fds = (theirs.fileno(),)
                made = subprocess.Popen(command, env=environment, pass_fds=fds, cwd=ROOT, stdout=log, stderr=log)
            self.processes.append(made)
            self._pipes.append(ours)

    def _log(self, rank: int) -> str:
        assert self._folder is not None
        return (Path(self._folder.name) / f"log-{rank}").read_text(errors="replace")[-4000:]

    def close(self) -> None:
        """Kill the processes."""
        for process in self.processes:
            process.kill()
        for process, pipe in zip(self.processes, self._pipes):
            process.wait()
            pipe.close()
        self.processes, self._pipes = [], []
        if self._folder is not None:
            self._folder.cleanup()


@pytest.fixture(scope="session")
def pool(pytestconfig):
    made = Pool(4 if pytestconfig.option.processes else 0)  # some of all tests ask for more than 2
    yield made
    made.close()


def _serve(pipe: Connection, rank: int, size: int, folder: str) -> None:
    with uncollected():
        import torch

        from tilth.parallel.dims import join

    torch.set_num_threads(1)
    join(rank, size, f"file://{folder}/meeting", timeout=60.0)
    while True:
        try:
            path, kwargs = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            module, _, name = path.partition(":")
            with uncollected():
                found = importlib.import_module(module)
            reply = True, getattr(found, name)(rank, **kwargs)
        except Exception:  # noqa: BLE001 - told to the test, which fails with it
            reply = False, traceback.format_exc()
        pipe.send_bytes(pickle.dumps(reply))  # not pipe.send: it would pass tensors through shared memory


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end with the test process, whatever this one does
    _serve(Connection(int(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
    os._exit(0)  # gloo's threads need not be waited for
