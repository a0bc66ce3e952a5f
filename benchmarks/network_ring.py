"""A ring of local processes whose links are throttled, and steps of data-parallel training over it.

The backward pass is sleeps of known length, after each of which a gradient is ready: so the processor is free for the
transport, which is what is measured. Gradients are put together and added up by a thread of each process, as Horovod
and DDP do it.
"""

import multiprocessing
import queue
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

import numpy as np
from network_fusion import Fusion

PIECE = 65536
"""Bytes that are sent at once, between two looks at the bucket."""
BURST = 0.005
"""Seconds of the link's rate that may be sent late, so that a late thread does not slow the link."""


@dataclass(frozen=True)
class Work:
    """A step: seconds of the forward pass, and of the backward pass up to each gradient; bytes of each gradient."""

    forward: float
    layers: tuple[float, ...]
    bytes: tuple[int, ...]


@dataclass(frozen=True)
class Timed:
    """Of one step. Seconds since it began."""

    ready: tuple[float, ...]
    back: float
    end: float
    buckets: tuple[tuple[float, float, int], ...]
    """Start, end, bytes."""


class TokenBucket:
    """A rate of bytes a second that its user keeps by sleeping, which costs no processor."""

    def __init__(self, bandwidth: float) -> None:
        self.bandwidth = bandwidth
        self._free = 0.0

    def take(self, nbytes: float) -> None:
        """Return when so many bytes may have been sent."""
        wait_until(self.begin(nbytes))

    def begin(self, nbytes: float) -> float:
        """Begin to send so many bytes, after those before; return when they are sent, by ``time.perf_counter``."""
        self._free = max(self._free, time.perf_counter() - BURST) + nbytes / self.bandwidth
        return self._free


def wait_until(end: float) -> None:
    """Sleep until this time of ``time.perf_counter``."""
    if (left := end - time.perf_counter()) > 0:
        time.sleep(left)


class Link:
    """To the right neighbour and from the left one, at most so many bytes a second."""

    def __init__(self, left: socket.socket, right: socket.socket, bandwidth: float) -> None:
        self.left, self.right, self.bucket = left, right, TokenBucket(bandwidth)
        self.jobs: queue.SimpleQueue[memoryview | None] = queue.SimpleQueue()
        self.sent = threading.Semaphore(0)
        threading.Thread(target=self._send, daemon=True).start()

    def exchange(self, out: np.ndarray, into: np.ndarray) -> None:
        """Send one vector to the right while one comes from the left; back when both are done."""
        self.jobs.put(out.data.cast("B"))
        view = into.data.cast("B")
        while len(view):
            view = view[self.left.recv_into(view) :]
        self.sent.acquire()

    def _send(self) -> None:
        while (view := self.jobs.get()) is not None:
            for i in range(0, len(view), PIECE):
                piece = view[i : i + PIECE]
                self.bucket.take(len(piece))
                self.right.sendall(piece)
            self.sent.release()


class Ring:
    """All-reduce of float32 vectors: N - 1 exchanges of an N-th with additions, N - 1 without."""

    def __init__(self, rank: int, ranks: int, link: Link) -> None:
        self.rank, self.ranks, self.link = rank, ranks, link

    def all_reduce(self, vector: np.ndarray) -> None:
        """In place."""
        if self.ranks == 1:
            return
        parts = np.array_split(vector, self.ranks)
        other = np.empty(len(parts[0]), np.float32)
        for s in range(self.ranks - 1):
            mine = parts[(self.rank - s - 1) % self.ranks]
            self.link.exchange(parts[(self.rank - s) % self.ranks], other[: len(mine)])
            np.add(mine, other[: len(mine)], out=mine)
        for s in range(self.ranks - 1):
            self.link.exchange(parts[(self.rank + 1 - s) % self.ranks], parts[(self.rank - s) % self.ranks])


def step(ring: Ring, work: Work, fusion: Fusion) -> Timed:
    """One step: sleeps, and beside them a thread that fuses and adds up. RuntimeError where a sum is wrong."""
    gradients = [np.full(n // 4, ring.rank + 1, np.float32) for n in work.bytes]
    arrived: queue.SimpleQueue[int | None] = queue.SimpleQueue()
    buckets: list[tuple[float, float, int]] = []
    began = time.perf_counter()
    reducer = threading.Thread(target=_reduce, args=(ring, gradients, arrived, fusion, began, buckets))
    reducer.start()
    time.sleep(work.forward)
    ready, at = [], began + work.forward
    for i, seconds in enumerate(work.layers):
        at += seconds
        time.sleep(max(0.0, at - time.perf_counter()))
        ready.append(time.perf_counter() - began)
        arrived.put(i)
    arrived.put(None)
    back = time.perf_counter() - began
    reducer.join()
    end = time.perf_counter() - began
    wanted = ring.ranks * (ring.ranks + 1) / 2
    if any(g[0] != wanted or g[-1] != wanted for g in gradients):
        raise RuntimeError("the ring added up wrongly")
    return Timed(tuple(ready), back, end, tuple(buckets))


def _reduce(
    ring: Ring,
    gradients: list[np.ndarray],
    arrived: "queue.SimpleQueue[int | None]",
    fusion: Fusion,
    began: float,
    done: list[tuple[float, float, int]],
) -> None:
    """Buckets as ``network_fusion.fuse`` has them, but ranks must agree: only the number of gradients closes one."""
    several = max(1, int(fusion.limit // gradients[0].nbytes))
    held: list[int] = []
    open_ = True
    while open_ or held:
        got = arrived.get() if open_ else None
        open_ = open_ and got is not None
        held += [] if got is None else [got]
        if held and (len(held) == several or not open_):
            start = time.perf_counter() - began
            nbytes = add_up(ring, [gradients[i] for i in held])
            done.append((start, time.perf_counter() - began, nbytes))
            held = []


def add_up(ring: Ring, gradients: Sequence[np.ndarray]) -> int:
    """A bucket: put together, added up, and taken apart again. Its bytes."""
    vector = np.concatenate(gradients)
    ring.all_reduce(vector)
    for gradient, part in zip(gradients, np.split(vector, len(gradients))):
        gradient[:] = part
    return vector.nbytes


def run(work: Work, ranks: int, bandwidth: float, fusion: Fusion, steps: int) -> tuple[list[list[Timed]], list[float]]:
    """Steps of every rank, and seconds of all-reduces of one bucket alone, the slowest rank's each."""
    context = multiprocessing.get_context("fork")
    pairs = [socket.socketpair() for _ in range(ranks)]
    pipes = [context.Pipe() for _ in range(ranks)]
    jobs = [
        context.Process(target=_work, args=(r, ranks, pairs, bandwidth, work, fusion, steps, pipes[r][1]))
        for r in range(ranks)
    ]
    for job in jobs:
        job.start()
    told = [pipe.recv() for pipe, _ in pipes]
    for job in jobs:
        job.join()
    return [timed for timed, _ in told], np.max([alone for _, alone in told], axis=0).tolist()


def _work(
    rank: int,
    ranks: int,
    pairs: Sequence[tuple[socket.socket, socket.socket]],
    bandwidth: float,
    work: Work,
    fusion: Fusion,
    steps: int,
    told: Connection,
) -> None:
    ring = Ring(rank, ranks, Link(pairs[rank][1], pairs[(rank + 1) % ranks][0], bandwidth))
    alone, timed = [], []
    bucket = [np.zeros(n // 4, np.float32) for n in work.bytes[: max(1, int(fusion.limit // work.bytes[0]))]]
    meet = np.zeros(ranks, np.float32)
    for _ in range(steps):
        ring.all_reduce(meet)  # so that they begin together
        began = time.perf_counter()
        add_up(ring, bucket)
        alone.append(time.perf_counter() - began)
    for _ in range(steps):
        ring.all_reduce(meet)
        timed.append(step(ring, work, fusion))
    told.send((timed, alone))


def adding(sizes: Sequence[int], repeats: int = 9) -> list[float]:
    """Seconds to add two float32 vectors of so many bytes, the median."""
    found = []
    for size in sizes:
        a, b = np.ones(size // 4, np.float32), np.ones(size // 4, np.float32)
        times = []
        for _ in range(repeats):
            began = time.perf_counter()
            np.add(a, b, out=a)
            times.append(time.perf_counter() - began)
        found.append(float(np.median(times)))
    return found
