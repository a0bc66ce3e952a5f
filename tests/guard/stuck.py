"""A role that repeats collectives, until one rank does what a fault makes it do."""

import ctypes
import os
import signal
import threading
import time

import torch
import torch.distributed as dist

from tilth.cluster.protocol import transfer
from tilth.cluster.worker.context import Context
from tilth.parallel.comm import all_reduce
from tilth.parallel.dims import ParallelDims, join
from tilth.trace.spans import span

HERE = "tests.guard.stuck"
FOREVER = 60.0


class Stuck:
    """Passes over micro-batches: a forward of its own, and a backward with a collective over dp."""

    def __init__(self, context: Context) -> None:
        self.rank = context.rank
        join(context.rank, context.workers, context.init_method, timeout=FOREVER)
        self.group = ParallelDims.of(context.mesh, context.rank, context.generation).group("dp")

    @transfer("all", "all")
    def update(self, kind: str, rank: int, passes: int = 8, at: int = 3) -> int:
        for i in range(passes):
            hit = (i, self.rank) == (at, rank)
            with span("forward", micro_batch=i):
                x = torch.ones(4)
            with span("backward", micro_batch=i):
                if hit and kind in FAULTS:
                    FAULTS[kind]()
                if hit and kind == "shape":
                    dist.all_gather_into_tensor(torch.empty(16), x, group=self.group)
                if hit and kind == "alone":
                    self._alone()
                if not (hit and kind in ("missing", "shape")):
                    dist.all_reduce(x, group=self.group)
            with span("optimizer"):
                dist.all_reduce(x[:2], group=self.group)
        return int(x[0])

    def _alone(self) -> None:
        dist.all_reduce(torch.ones(7), group=self.group)


class Sleeper(Stuck):
    """Sleeps in each pass, one rank twice as long, and meets the others after the passes."""

    @transfer("all", "all")
    def update(self, slow: int, seconds: float) -> int:
        for i in range(2):
            for op, times in (("forward", 1), ("backward", 2)):
                with span(op, micro_batch=i):
                    time.sleep(seconds * times * (2 if self.rank == slow else 1))
        all_reduce(torch.ones(4), self.group).wait()
        return self.rank


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _gil() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})  # which asks for stacks, and would wake it
    ctypes.PyDLL(None).sleep(int(FOREVER))  # a call through PyDLL keeps the lock


def _busy() -> None:
    until = time.monotonic() + FOREVER
    while time.monotonic() < until:
        pass


def _lock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire(timeout=FOREVER)


def _pipe() -> None:
    reader, _ = os.pipe()
    os.read(reader, 1)  # nobody writes


FAULTS = {"stop": _stop, "gil": _gil, "busy": _busy, "lock": _lock, "pipe": _pipe}
