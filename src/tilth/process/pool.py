"""Pool of children that speak by frames: started by one thread, heard together, ended together."""

import select
import selectors
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

from tilth.process.child import PipedChild, finalize
from tilth.process.frames import drain
from tilth.process.output import Prints

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
        self._closed = finalize(self, _close, self.children, self._starter, prints)

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


def _close(children: list[C], starter: ThreadPoolExecutor, prints: Prints | None) -> None:
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
