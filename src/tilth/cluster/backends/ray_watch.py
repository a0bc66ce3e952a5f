"""Nodes and processes of the ``ray`` backend, and the thread that hears of their deaths."""

import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from tilth.cluster.backends.base import Call, Reply
from tilth.cluster.backends.ray_connect import Node, first_line

SILENT = 10.0
"""Seconds without an answer of a node's agent after which a node that cannot be reached is taken to be lost."""
DEAF = 60.0
"""Those after which a node is, whose own process can be reached: its agent may wait for a core."""
LATE = 1.0
"""Seconds without an answer after which the node's own process is asked whether it lives."""
KNOCK = 1.0
"""Seconds for a node to take a connection."""
PAUSE = 0.05
"""Seconds before an agent is asked again that could not be reached."""


@dataclass(eq=False)
class Machine:
    """Node with an agent. home: its number in the keys of payload."""

    node: Node
    home: int
    agent: Any
    folder: str = ""


@dataclass(eq=False)
class Process:
    """Actor of a worker; without a rank it is a spare. ready: reference that resolves when it has started."""

    actor: Any
    machine: Machine
    ready: Any
    rank: int = -1
    pid: int = 0
    lost: str = ""
    """How it was lost; "": it lives."""
    calls: dict[Future[Reply], Call] = field(default_factory=dict)
    """In flight."""


def unreachable(node: Node) -> OSError | None:
    """Return why Ray's process of a node takes no connection: ConnectionRefusedError if it is not there."""
    try:
        socket.create_connection((node.address, node.port), KNOCK).close()
    except OSError as error:
        return error
    return None


def is_lost(silent: float, node: Node, ask: Callable[[Node], OSError | None] = unreachable) -> bool:
    """Return True if a node is lost whose agent has not answered for ``silent`` seconds."""
    if silent <= LATE:
        return False
    why = ask(node)
    limit = LATE if isinstance(why, ConnectionRefusedError) else SILENT if why is not None else DEAF
    return silent > limit


class NodeWatch:
    """Thread that asks the agent of each node, again and again, for deaths and signs of life of its workers.

    Ray reports most deaths within milliseconds too, but those of a node only after many seconds.

    workers: machine -> (process id -> rank), read before each question. died(machine, process
    id, how) and gone(machine, why) are called from the thread.
    """

    def __init__(
        self,
        ray: ModuleType,
        workers: Callable[[], Mapping[Machine, Mapping[int, int]]],
        died: Callable[[Machine, int, str], None],
        gone: Callable[[Machine, str], None],
    ) -> None:
        self._ray, self._workers, self._died, self._gone = ray, workers, died, gone
        self.lives: dict[int, tuple[int, int]] = {}
        """Rank -> its signs of life when they were last seen."""
        self._asked: dict[Any, Machine] = {}
        self._heard: dict[Machine, float] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nodes", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._over.set()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while not self._over.is_set():
            for machine, workers in self._workers().items():
                self._heard.setdefault(machine, time.monotonic())
                if machine not in self._asked.values():
                    self._asked[machine.agent.watch.remote(workers)] = machine
            if not self._asked:
                self._over.wait(PAUSE)
                continue
            ready, _ = self._ray.wait(list(self._asked), num_returns=1, timeout=1.0)
            for reference in ready:
                self._hear(reference, self._asked.pop(reference))
            self._look_for_silence()

    def _hear(self, reference: Any, machine: Machine) -> None:
        try:
            lives, dead = self._ray.get(reference)
        except self._ray.exceptions.ActorUnavailableError as error:
            if isinstance(unreachable(machine.node), ConnectionRefusedError):
                self._gone(machine, first_line(error))
            self._over.wait(PAUSE)  # else a connection broke: it is asked again
        except self._ray.exceptions.RayError as error:
            self._gone(machine, first_line(error))
        else:
            self._heard[machine] = time.monotonic()
            self.lives.update(lives)
            for pid, how in dead.items():
                self._died(machine, pid, how)

    def _look_for_silence(self) -> None:
        now = time.monotonic()
        for reference, machine in list(self._asked.items()):
            silent = now - self._heard[machine]
            if is_lost(silent, machine.node):
                del self._asked[reference]
                self._gone(machine, f"no answer for {silent:.1f} s")
