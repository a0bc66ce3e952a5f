"""A worker process of the local backend: ``python -m tilth.cluster.worker.local_worker FOLDER RANK WORKERS TIMEOUT``.

One thread receives, so that the end of the connection ends the process at once whatever the main thread does (a Unix
socket, multiprocessing.connection); the main thread executes the calls in the order of arrival.
"""

import os
import pickle
import signal
import sys
import threading
from functools import partial
from multiprocessing.connection import Client, Connection
from pathlib import Path
from queue import SimpleQueue

import psutil

from tilth.cluster.backends import control
from tilth.cluster.backends.base import Call, Failure, Reply
from tilth.cluster.backends.probe import show_stacks
from tilth.cluster.backends.session_dir import SessionDir
from tilth.cluster.backends.status import StatusBoard
from tilth.cluster.backends.store import FolderStore
from tilth.cluster.worker import reaper
from tilth.cluster.worker.executor import Executor, failure

GONE = 70
"""Exit code of a worker whose controller is gone."""


def main(folder: SessionDir, rank: int, workers: int, timeout: float) -> None:
    """Connect to the controller of this folder and serve it until it says ``end``."""
    leave_to_controller()
    with connect(folder) as controller:
        serve(controller, folder, rank, workers, timeout)


def leave_to_controller() -> None:
    """Do nothing on signals that a terminal or a launcher sends to all processes: the controller saves and ends.

    By a handler, which processes that a role starts do not inherit, as they would SIG_IGN.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)


def connect(folder: SessionDir) -> Connection:
    """FileNotFoundError or ConnectionRefusedError if no controller listens there."""
    return Client(folder.socket, "AF_UNIX", authkey=folder.key)


def serve(controller: Connection, folder: SessionDir, rank: int, workers: int, timeout: float) -> None:
    """Be the worker with this rank until the controller says ``end``."""
    show_stacks(folder.stack(rank))
    board = StatusBoard(folder.board)
    host = Executor(
        rank,
        workers,
        FolderStore(folder.payload, str(rank)),
        local_rank=rank,
        init_method=folder.init_method if workers > 1 else "",
        timeout=timeout,
        note=partial(board.mark, rank),
    )
    control.serve(folder.control(rank), host.control)
    controller.send_bytes(f"{rank} {os.getpid()}".encode())
    Serving(controller, host).run()


class Serving:
    """The loop of a worker."""

    def __init__(self, controller: Connection, host: Executor) -> None:
        self._controller = controller
        self._host = host
        self._inbox: SimpleQueue[bytes] = SimpleQueue()
        self._ended = False

    def run(self) -> None:
        """Execute calls until ``end`` was answered."""
        threading.Thread(target=self._receive, name="receive", daemon=True).start()
        while not self._ended:
            answer = self._execute(self._inbox.get())
            self._controller.send_bytes(encoded(answer))

    def _receive(self) -> None:
        while True:
            try:
                self._inbox.put(self._controller.recv_bytes())
            except (EOFError, OSError):
                if not self._ended:
                    reaper.kill(reaper.below(psutil.Process()))
                    os._exit(GONE)
                return

    def _execute(self, data: bytes) -> Reply | Failure:
        try:
            call: Call = pickle.loads(data)
        except Exception as error:  # noqa: BLE001 - an argument's class may raise anything; the controller is told
            return failure(error)
        answer = self._host.answer(call)
        self._ended = not call.role and call.method == "end"
        return answer


def encoded(answer: Reply | Failure) -> bytes:
    """An answer as it travels; one that cannot be pickled becomes the Failure that says so."""
    try:
        return pickle.dumps(answer, protocol=5)
    except Exception as error:  # noqa: BLE001 - whatever an answer's class raises; the controller is told
        return pickle.dumps(failure(error), protocol=5)


if __name__ == "__main__":
    main(SessionDir(Path(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
