"""The ``inline`` backend: one worker in this process, plain calls, breakpoints work."""

import os
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager

from tilth.cluster.fleet import Call, Probe, Reply
from tilth.cluster.host import Host
from tilth.core.batch import Handle, Ragged


class InlineStore:
    """Payload in a dictionary of this process. What the controller fetches is counted all the same."""

    def __init__(self) -> None:
        self._columns: dict[str, Ragged] = {}
        self._next = 0
        self.fetched_bytes = 0

    def put(self, column: str, data: Ragged) -> Handle:
        """Keep a column under a new key."""
        key = f"{column}-{self._next}"
        self._next += 1
        self._columns[key] = data
        return Handle(key, data.values.nbytes + data.offsets.nbytes)

    def get(self, handle: Handle) -> Ragged:
        """A worker's read."""
        return self._columns[handle.key]

    def fetch(self, handle: Handle) -> Ragged:
        """The controller's read."""
        self.fetched_bytes += handle.nbytes
        return self._columns[handle.key]

    def free(self, handle: Handle) -> None:
        """Forget a column; KeyError if it is not there (any more)."""
        del self._columns[handle.key]

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Free at the end of the block everything that was put inside it and not freed yet."""
        before = set(self._columns)
        try:
            yield
        finally:
            for key in set(self._columns) - before:
                del self._columns[key]

    @property
    def nbytes(self) -> int:
        """Bytes of payload held now."""
        return sum(r.values.nbytes + r.offsets.nbytes for r in self._columns.values())


class InlineFleet:
    """One worker in this process: a call runs when it is submitted, and what it raises goes up as it is."""

    workers = 1

    def __init__(self, timeout: float = 600.0) -> None:
        self.store = InlineStore()
        self.host = Host(0, 1, self.store, timeout=timeout, alone=True)

    def submit(self, rank: int, call: Call) -> Future[Reply]:
        """Run it now."""
        future: Future[Reply] = Future()
        future.set_result(self.host.handle(call))
        return future

    def probe(self, rank: int) -> Probe:
        """This process."""
        return Probe(rank, os.getpid(), "running", self.host.phase, "")

    def close(self, kill: bool) -> None:
        """Nothing to free: the payload goes with the store."""
