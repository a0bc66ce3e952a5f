"""A worker process of the local backend, forked by ``worker.fork_server`` or started by a launcher.

A thread receives, so that the end of the connection ends the process at once whatever the main thread does; the main
thread executes the calls in order of arrival.
"""

import os
import pickle
import threading
from functools import partial
from multiprocessing.connection import Client, Connection
from queue import SimpleQueue
from typing import Any

import psutil

from tilth.cluster.backends import control
from tilth.cluster.backends.base import Call, Failure, Reply
from tilth.cluster.backends.probe import show_stacks
from tilth.cluster.backends.session_dir import SessionDir
from tilth.cluster.backends.status import StatusBoard
from tilth.cluster.backends.store import FolderStore
from tilth.cluster.worker import reaper
from tilth.cluster.worker.executor import Executor, failure
from tilth.cluster.worker.life import publish_life
from tilth.core.batch import Store
from tilth.process.program import outlive_signals
from tilth.trace.spans import show_open

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
        except Exception as error:  # noqa: BLE001 - unpickling runs code of the arguments' classes
            return failure(error)
        answer = self._host.answer(call)
        self._ended = not call.role and call.method == "end"
        return answer


def encoded(answer: Reply | Failure) -> bytes:
    """Pickle an answer; one that cannot be pickled becomes a Failure."""
    try:
        return pickle.dumps(answer, protocol=5)
    except Exception as error:  # noqa: BLE001 - pickling runs code of the answer's class
        return pickle.dumps(failure(error), protocol=5)
