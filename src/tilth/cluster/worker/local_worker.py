"""A worker process of the local backend, forked by ``worker.fork_server`` or started by a launcher.

A thread receives, so that the end of the connection ends the process at once whatever the main thread does; the main
thread executes the calls in order of arrival.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Client, Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import psutil

from tilth.cluster.backends import control
from tilth.cluster.backends.probe import StatusBoard, show_stacks
from tilth.cluster.backends.session_dir import SessionDir
from tilth.cluster.backends.store import FolderStore
from tilth.cluster.worker import reaper
from tilth.cluster.worker.executor import Executor
from tilth.core.batch import Store
from tilth.process.program import outlive_signals
from tilth.trace.spans import recorder, show_open

GONE = 70
"""Exit code of a worker whose controller died."""


def main(folder: SessionDir, rank: int, workers: int, timeout: float) -> None:
    """Connect to the controller of this directory and serve it until it calls ``end``."""
    outlive_signals()
    with connect(folder) as controller:
        serve(controller, folder, rank, workers, timeout)


def connect(folder: SessionDir) -> Connection:
    """Connect to the controller. Raises FileNotFoundError or ConnectionRefusedError if none listens."""
    return Client(folder.socket, "AF_UNIX", authkey=folder.key)


def serve(controller: Connection, folder: SessionDir, rank: int, workers: int, timeout: float) -> None:
    """Serve as the worker of this rank until the controller calls ``end``."""
    init_method = folder.init_method if workers > 1 else ""
    store = FolderStore(folder.payload, str(rank))
    host = executor(folder, rank, workers, store, local_rank=rank, init_method=init_method, timeout=timeout)
    controller.send_bytes(f"{rank} {os.getpid()}".encode())
    Serving(controller, host).run()


def executor(folder: SessionDir, rank: int, workers: int, store: Store, **more: Any) -> Executor:
    """Return what executes the calls of this process, whose stacks, calls, operations and signs of life the session's
    folder shows. more: of ``Executor``."""
    show_stacks(folder.stack(rank))
    board = StatusBoard(folder.board)
    host = Executor(rank, workers, store, note=partial(board.mark, rank), folder=str(folder.path), **more)
    control.serve(folder.control(rank), host.control)
    publish_life(partial(board.beat, rank), host.is_patient)
    show_open(board.room(rank))
    return host


class Serving:
    """Main loop of a worker."""

    def __init__(self, controller: Connection, host: Executor) -> None:
        self._controller = controller
        self._host = host
        self._inbox: SimpleQueue[bytes] = SimpleQueue()

    def run(self) -> None:
        """Execute calls until ``end`` was answered."""
        threading.Thread(target=self._receive, name="receive", daemon=True).start()
        while not self._host.ended:
            self._controller.send_bytes(self._host.answer(self._inbox.get()))

    def _receive(self) -> None:
        while True:
            try:
                self._inbox.put(self._controller.recv_bytes())
            except (EOFError, OSError):
                if not self._host.ended:
                    reaper.kill(reaper.below(psutil.Process()))
                    os._exit(GONE)
                return


# ---- signs of life ----
#
# A thread publishes how many spans the thread that executes calls has ended, and how often it has published. It needs
# the GIL for that. So both numbers stand still in a process that is stopped or in which something holds the GIL, and
# the first one where the thread that executes calls waits, or loops without end. In a call that may wait for long (a
# patient one) the first number grows with what its threads read and write, too, with imports and with memory that is
# touched; and the second one stands still too while the thread computes and the first one does not grow: it does not
# wait.

EVERY = 0.25
"""Seconds between two updates."""
COMPILERS = ("torch/_dynamo/convert_frame.py", "torch/_inductor/compile_fx.py")
"""Files of torch.compile that are on the stack while it compiles, and not while compiled code runs."""
BUSY = 0.05
"""Share of a core from which on a thread computes; one that waits takes almost nothing."""
HELPERS = ("life", "control", "receive", "trace-writer")
"""Threads of a worker that do no work of a call."""


def publish_life(publish: Callable[[int, int], None], is_patient: Callable[[], bool]) -> None:
    """Call ``publish`` from a daemon thread with the work of the calling thread, and the number of the call.

    The work grows while torch.compile works too, which ends no span for minutes. is_patient: returns whether the
    running call is patient.
    """
    thread, native = threading.get_ident(), threading.get_native_id()

    def run() -> None:
        compiling = moved = beats = work = 0
        seen: tuple[int, ...] = ()
        used, at = 0.0, time.monotonic()
        while True:
            compiling += _compiles(thread)
            if patient := is_patient():
                before, seen = seen, (*_moved({thread: native}), len(sys.modules))
                moved += before != seen
            stood, work = work, recorder.ended(thread) + compiling + moved
            since, at, spent, used = at, time.monotonic(), used, _seconds(native)
            spins = patient and stood == work and used - spent > BUSY * (at - since)
            beats += not spins
            publish(work, beats)
            time.sleep(EVERY)  # nothing to wait on: the other thread must not pay for it

    threading.Thread(target=run, name="life", daemon=True).start()


def _moved(known: Mapping[int, int]) -> tuple[int, int]:
    """Return the bytes that the threads of this process have read and written, and their page faults.

    known: thread -> its number for the kernel; of a forked process's first thread Python 3.11 has the parent's.
    """
    nbytes = faults = 0
    for one in threading.enumerate():
        if one.name not in HELPERS and one.native_id is not None:
            place = Path(f"/proc/self/task/{known.get(one.ident or 0, one.native_id)}")
            with suppress(OSError):  # no Linux, or the thread has just ended
                nbytes += sum(int(line.split()[1]) for line in (place / "io").read_text().splitlines()[:2])
                words = (place / "stat").read_text().rpartition(")")[2].split()
                faults += int(words[7]) + int(words[9])
    return nbytes, faults


def _seconds(native: int) -> float:
    """Return the processor time of a thread of this process; 0 where that is unknown."""
    with suppress(OSError):  # no Linux
        return int(Path(f"/proc/self/task/{native}/schedstat").read_text().split()[0]) * 1e-9
    return 0.0


def _compiles(thread: int) -> bool:
    """Return True if a thread is inside torch.compile's compilation."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        if frame.f_code.co_filename.endswith(COMPILERS):
            return True
        frame = frame.f_back
    return False
