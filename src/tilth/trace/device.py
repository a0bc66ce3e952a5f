"""Times of spans on a CUDA device, by CUDA events around them; training never waits for these.

A span measures the host, which only queues the work of a GPU. CUDA events give the milliseconds between each other on
their own clock, as 32-bit floats. So times are counted from a recent anchor, which is tied to the host's clock: before
the first step by waiting for it, later whenever the writer's thread sees an event complete (MegaScale, arXiv
2402.15627, waits at each flush).
"""

import sys
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.cuda import Event as CudaEvent

MOST = 20_000  # most spans with pending work; further ones are not timed on the device
LOOKS, PAUSE = 50, 1e-4  # number of times that the writer polls for the completion of an event, and the seconds between


class DeviceClock:
    """Device times of spans by their ids. Any thread may call ``begin`` and ``end``; one calls ``take``.

    make: makes an event. unfit: True while none can be recorded (a graph is being captured). now: ns on the clock of
    spans.
    """

    def __init__(
        self,
        make: Callable[[], "CudaEvent"],
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

    def begin(self) -> "CudaEvent | None":
        """Record an event before the work of a span; None if the span is not timed."""
        if len(self._new) + len(self._open) >= MOST or self._unfit():
            return None
        return self._marked()

    def end(self, span: int, begun: "CudaEvent") -> None:
        """Record the event behind the work of a span."""
        if not self._unfit():
            self._new.append((span, begun, self._marked()))

    def _marked(self) -> "CudaEvent":
        mark = self._make()
        mark.record()
        return mark

    def take(self) -> tuple[dict[int, tuple[int, int]], frozenset[int]]:
        """Return (start, duration) in ns by id of the spans whose work is done, and the ids of pending ones.

        After a failure of the device both are empty.
        """
        self._open += [self._new.popleft() for _ in range(len(self._new))]
        try:
            self._tie()
            done = [entry for entry in self._open if entry[1].query() and entry[2].query()]
            known = {span: self._times(begun, ended) for span, begun, ended in done}
            self._open = [entry for entry in self._open if entry[0] not in known]
            if done:
                self._at, self._anchor = self._host(done[-1][2]), done[-1][2]
        except RuntimeError:  # of CUDA: the training thread gets the same error
            self._open.clear()
            return {}, frozenset()
        return known, frozenset(span for span, _, _ in self._open)

    def _times(self, begun: "CudaEvent", ended: "CudaEvent") -> tuple[int, int]:
        return self._host(begun), round(1e6 * begun.elapsed_time(ended))

    def _host(self, mark: "CudaEvent") -> int:
        return self._at + round(1e6 * self._anchor.elapsed_time(mark))

    def _tie(self) -> None:
        """Correct the anchor's time on the host, if an event completes between two polls."""
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
    """Return the clock of this process if it uses a CUDA device by now; does not import torch."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    return DeviceClock(lambda: torch.cuda.Event(enable_timing=True), torch.cuda.is_current_stream_capturing)
