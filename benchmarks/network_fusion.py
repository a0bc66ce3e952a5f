"""Is the network the bottleneck? Data-parallel steps whose gradients are fused and added up over a link in full use.

After "Is network the bottleneck of distributed training?" (arXiv 2006.10103): gradients become ready during the
backward pass, are put together until there are 64 MB of them or 5 ms have passed (Horovod's defaults), and each such
bucket is added up by one ring all-reduce at a time. What a step then loses to communication is what is left after the
backward pass. Where a real step loses more, it is the transport's software, not the link.
"""

from dataclasses import dataclass, replace

import numpy as np

from tilth.core.errors import DataError
from tilth.plan.costs import wire

MOST = 1e6
"""The greatest compression that is looked for."""


@dataclass(frozen=True, eq=False)
class Step:
    """A step on one rank without communication, n gradients. Times in seconds since the step began."""

    ready: np.ndarray
    """float64 [n]: when each gradient is complete."""
    bytes: np.ndarray
    """float64 [n]."""
    back: float
    """When the backward pass ends."""
    batch: float
    """When the step ends."""

    def __post_init__(self) -> None:
        ready, size = np.asarray(self.ready, np.float64), np.asarray(self.bytes, np.float64)
        if ready.ndim != 1 or ready.shape != size.shape:
            raise DataError(f"{ready.shape} times and {size.shape} sizes of gradients; both have one number a gradient")
        if not (np.isfinite(ready) & np.isfinite(size) & (ready >= 0) & (size > 0)).all():
            raise DataError("a gradient's time is below 0, its size not above 0, or either is no number")
        if not 0 < self.batch < np.inf or not ready.max(initial=0) <= self.back <= self.batch:
            raise DataError(
                f"gradients until {ready.max(initial=0):g} s, backward pass until {self.back:g} s, step until "
                f"{self.batch:g} s: each is at least the one before"
            )


@dataclass(frozen=True)
class Fusion:
    """A bucket is sent once it has so many bytes, or so many seconds after its first gradient."""

    limit: float = 64 * 2**20
    patience: float = 5e-3


@dataclass(frozen=True, eq=False)
class Buckets:
    """m buckets in the order in which they are sent."""

    ready: np.ndarray
    """float64 [m]: seconds."""
    bytes: np.ndarray
    """float64 [m]."""
    gradients: np.ndarray
    """int64 [n]: the bucket of each gradient."""


@dataclass(frozen=True, eq=False)
class Adding:
    """AddEst: seconds to add two vectors, between measured sizes by interpolation, beyond them in proportion."""

    bytes: np.ndarray
    """float64 [k], ascending, above 0."""
    seconds: np.ndarray
    """float64 [k]."""

    def __post_init__(self) -> None:
        size, took = np.asarray(self.bytes, np.float64), np.asarray(self.seconds, np.float64)
        if size.shape != took.shape or not size.size or (np.diff(size, prepend=0.0) <= 0).any() or (took < 0).any():
            raise DataError("sizes of additions ascend from above 0, and each has a time of at least 0")

    def __call__(self, nbytes: np.ndarray | float) -> np.ndarray:
        """float64 like ``nbytes``."""
        size = np.asarray(nbytes, np.float64)
        inside = np.interp(size, self.bytes, self.seconds)
        return inside * np.maximum(size / self.bytes[-1], 1) * np.minimum(size / self.bytes[0], 1)


@dataclass(frozen=True)
class Ring:
    """All-reduce over a ring of links in full use."""

    ranks: int
    bandwidth: float
    """Bytes a second of each link."""
    latency: float = 0.0
    """Seconds a message; the paper has none."""
    compression: float = 1.0
    """Times that what is sent is smaller."""
    coding: float = 0.0
    """Seconds a byte to compress and to restore it; the paper has none."""
    adding: Adding | None = None

    def __post_init__(self) -> None:
        if self.ranks < 1 or not self.bandwidth > 0 or not self.compression >= 1 or min(self.latency, self.coding) < 0:
            raise DataError(
                f"a ring of {self.ranks} ranks, {self.bandwidth:g} bytes/s, latency {self.latency:g} s, compression "
                f"{self.compression:g}, coding {self.coding:g} s a byte: ranks and compression are at least 1, the "
                "bandwidth is above 0, times are not below 0"
            )

    def seconds(self, nbytes: np.ndarray | float) -> np.ndarray:
        """float64 like ``nbytes``: 2 S (N-1) / (N r bw) + (N-1) AddEst(S/N), with 2 (N-1) latencies and the coding."""
        size, others = np.asarray(nbytes, np.float64), self.ranks - 1
        messages, moved = wire("all_reduce", self.ranks, size)
        took = messages * self.latency + moved / (self.compression * self.bandwidth)
        if self.adding is not None:
            took = took + others * self.adding(size / self.ranks)
        return took + (size * self.coding if self.compression > 1 and others else 0.0)


@dataclass(frozen=True, eq=False)
class Synchronised:
    """When the m buckets were added up, in seconds since the step began."""

    start: np.ndarray
    """float64 [m]."""
    end: np.ndarray
    """float64 [m]."""
    overhead: float
    """t_o: seconds of communication that the backward pass does not hide."""
    scaling: float
    """f: the share of N times one rank's speed that N ranks reach, above 0, at most 1."""


def fuse(step: Step, fusion: Fusion = Fusion()) -> Buckets:
    """Gradients into buckets, in the order in which they become ready.

    A bucket is full with the gradient that makes it so, however large that is. One that becomes ready at the very end
    of the patience still goes along. What is left when the backward pass ends is sent then.
    """
    ready, size = list[float](), list[float]()
    bucket = np.zeros(len(step.ready), np.int64)
    held, deadline = 0.0, np.inf
    for i in np.argsort(step.ready, kind="stable").tolist():
        at = float(step.ready[i])
        if held and at > deadline:
            ready.append(deadline)
            size.append(held)
            held = 0.0
        deadline = deadline if held else min(at + fusion.patience, step.back)
        bucket[i], held = len(ready), held + float(step.bytes[i])
        if held >= fusion.limit:
            ready.append(at)
            size.append(held)
            held = 0.0
    if held:
        ready.append(deadline)
        size.append(held)
    return Buckets(np.array(ready), np.array(size), bucket)


def synchronise(step: Step, ring: Ring, fusion: Fusion = Fusion(), buckets: Buckets | None = None) -> Synchronised:
    """A step of ``ring.ranks`` ranks. buckets: those of the step under this fusion, if they are there already."""
    found = buckets or fuse(step, fusion)
    took = ring.seconds(found.bytes)
    done = np.cumsum(took)
    start = np.maximum.accumulate(found.ready - (done - took)) + done - took  # the later of ready and the end before
    end = start + took
    left = max(0.0, float(end.max(initial=0.0)) - step.back)
    return Synchronised(start, end, left, step.batch / (step.batch + left))


def scaling_alone(step: Step, ring: Ring) -> float:
    """f without any overlap: one all-reduce of everything after the backward pass."""
    return step.batch / (step.batch + float(ring.seconds(step.bytes.sum())))


def scaling_at_best(step: Step, ring: Ring) -> float:
    """An upper bound of f: the link is busy from the first gradient on and carries nothing but bytes."""
    _, moved = wire("all_reduce", ring.ranks, step.bytes.sum())
    first = float(step.ready.min(initial=np.inf))
    left = max(0.0, first + float(moved) / (ring.compression * ring.bandwidth) - step.back) if len(step.ready) else 0.0
    return step.batch / (step.batch + left)


def server_seconds(nbytes: float, ranks: int, servers: int, bandwidth: float) -> float:
    """To push gradients to parameter servers, each with an equal part, and to pull the sums: the busier side's link."""
    return 2 * nbytes * max(1.0, ranks / servers) / bandwidth


def compression_for(step: Step, ring: Ring, scaling: float, fusion: Fusion = Fusion()) -> float:
    """The least compression above that of ``ring`` that reaches this f, within 0.1 %; inf where none does.

    With ``scaling_of_none = synchronise(step, ring).scaling`` that is where compression pays for its own coding.
    """
    buckets = fuse(step, fusion)

    def reached(ratio: float) -> bool:
        return synchronise(step, replace(ring, compression=ratio), fusion, buckets).scaling >= scaling

    low, high = ring.compression, MOST
    if not reached(high):
        return float("inf")
    while high > low * 1.001:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if reached(middle) else (middle, high)
    return high
