"""Controller's end of the connection to one worker process."""

import os
import select
import socket
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing.connection import Connection

from tilth.cluster.backends.base import Call, Reply, place_of, settle
from tilth.core.errors import WorkerLost


class WorkerConnection:
    """Sends calls and matches their answers, which arrive in the same order, in a reader thread.

    ending: returns how the worker ended, once it has.
    """

    def __init__(self, rank: int, pid: int, connection: Connection, ending: Callable[[], str]) -> None:
        self.rank, self.pid = rank, pid
        self._connection = connection
        self._ending = ending
        self._lock = threading.Lock()
        self._pending: deque[tuple[Call, int, Future[Reply]]] = deque()
        self._lost = ""
        self._reader = threading.Thread(target=self._read, name=f"worker-{rank}", daemon=True)
        self._reader.start()

    def submit(self, call: Call, data: bytes) -> Future[Reply]:
        """Send a pickled call. Raises TimeoutError if the worker reads nothing within the limit of the socket."""
        future: Future[Reply] = Future()
        with self._lock:
            if self._lost:
                future.set_exception(self._error(call))
                return future
            self._pending.append((call, len(data), future))
            try:
                self._connection.send_bytes(data)
            except BlockingIOError:
                raise TimeoutError(f"worker {self.rank} takes no message") from None
            except OSError:  # the worker is gone: the reader fails what is pending
                return future
        return future

    def _read(self) -> None:
        ready = select.poll()
        ready.register(self._connection.fileno(), select.POLLIN)
        process = _process_handle(self.pid)
        if process is not None:  # a child of the worker may keep the connection open when the worker is dead
            ready.register(process, select.POLLIN)
        with suppress(EOFError, OSError):  # the end of the connection is the end of the worker
            while self._connection.fileno() in dict(ready.poll()) or self._connection.poll():
                data = self._connection.recv_bytes()
                call, sent, future = self._pending.popleft()
                settle(future, call, self.rank, sent, data)
        if process is not None:
            os.close(process)
        self._fail_pending()

    def _fail_pending(self) -> None:
        lost = self._ending()
        with self._lock:
            self._lost = lost
            pending, self._pending = list(self._pending), deque()
        for call, _, future in pending:
            future.set_exception(self._error(call))

    def _error(self, call: Call) -> WorkerLost:
        error = WorkerLost(f"{place_of(call, self.rank)}: {self._lost}", key=call.operation)
        error.ranks = (self.rank,)
        return error

    def close(self) -> None:
        """Close the connection, which ends the worker, and join the reader."""
        if self._connection.closed:
            return
        with (
            socket.socket(fileno=os.dup(self._connection.fileno())) as both,
            suppress(OSError),
        ):  # the worker may be gone
            both.shutdown(socket.SHUT_RDWR)
        self._reader.join()
        self._connection.close()


def _process_handle(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid) if hasattr(os, "pidfd_open") else None
    except ProcessLookupError:
        return None
