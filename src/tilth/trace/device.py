"""When the work of a span ran on a CUDA device, by events recorded around it; training waits for nothing.

A span measures the host, and on a GPU that only queues its work. Events of CUDA tell milliseconds between each other as
32-bit floats, of a clock of its own. So times are counted from an anchor near by, and the anchor is tied to the host's
clock: once by waiting, before the first step, and then whenever the thread that writes the trace sees an event come to
pass (MegaScale, arXiv 2402.15627, waits at each flush).
"""

import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

MOST = 20_000
"""Most spans whose work is not done yet; beyond it they are not timed on the device."""
LOOKS, PAUSE = 50, 1e-4
"""How often, and after how many seconds each, the writer looks whether an event comes to pass."""


class CudaEvent(Protocol):
    """What is used of ``torch.cuda.Event``."""

    def record(self) -> None: ...

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: "CudaEvent", /) -> float: ...


class DeviceClock:
    """Device times of spans by their ids. Any thread may ``begin`` and ``end``; one takes what is known.

    make: a new mark. unfit: whether nothing can be recorded now (a graph is being captured). now: ns of the clock that
    spans have.
    """

    def __init__(
        self,
        make: Callable[[], CudaEvent],
        unfit: Callable[[], bool] = lambda: False,
        now: Callable[[], int] = time.perf_counter_ns,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._make, self._unfit, self._now, self._pause = make, unfit, now, pause
        self._new: deque[tuple[int, CudaEvent, CudaEvent]] = deque()
        self._open: list[tuple[int, CudaEvent, CudaEvent]] = []
        self._anchor = make()
        self._anchor.record()
        self._anchor.synchronize()
        self._at = now()

    def begin(self) -> CudaEvent | None:
        """A mark before the work of a span; None if it shall not be timed."""
        if len(self._new) + len(self._open) >= MOST or self._unfit():
            return None
        return self._marked()

    def end(self, span: int, begun: CudaEvent) -> None:
        """And one behind it."""
        if not self._unfit():
            self._new.append((span, begun, self._marked()))

    def _marked(self) -> CudaEvent:
        mark = self._make()
        mark.record()
        return mark

    def take(self) -> tuple[dict[int, tuple[int, int]], frozenset[int]]:
        """Start and duration in ns, by id, of the spans whose work is done; and the ids of those that still wait.

        A device that has failed tells nothing: then no span has, or waits for, a time on it.
        """
        self._open += [self._new.popleft() for _ in range(len(self._new))]
        try:
            self._tie()
            done = [entry for entry in self._open if entry[1].query() and entry[2].query()]
            known = {span: self._times(begun, ended) for span, begun, ended in done}
            self._open = [entry for entry in self._open if entry[0] not in known]
            if done:
                self._at, self._anchor = self._host(done[-1][2]), done[-1][2]
        except RuntimeError:  # of CUDA: whoever waits for the device will be told the same
            self._open.clear()
            return {}, frozenset()
        return known, frozenset(span for span, _, _ in self._open)

    def _times(self, begun: CudaEvent, ended: CudaEvent) -> tuple[int, int]:
        return self._host(begun), round(1e6 * begun.elapsed_time(ended))

    def _host(self, mark: CudaEvent) -> int:
        return self._at + round(1e6 * self._anchor.elapsed_time(mark))

    def _tie(self) -> None:
        """The host's time of the anchor anew, if a mark comes to pass while one looks: it did so between two looks."""
        pending = next((ended for _, _, ended in self._open if not ended.query()), None)
        if pending is None:
            return
        before = self._now()
        for _ in range(LOOKS):
            self._pause(PAUSE)
            if pending.query():
                self._at += (before + self._now()) // 2 - self._host(pending)
                return
            before = self._now()


def device_clock() -> DeviceClock | None:
    """That of this process, if it uses a CUDA device by now; torch is not imported for it."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    return DeviceClock(lambda: torch.cuda.Event(enable_timing=True), torch.cuda.is_current_stream_capturing)
