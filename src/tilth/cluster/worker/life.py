"""Signs of life of a worker, for the controller to see that it hangs.

A thread publishes how many spans the thread that executes calls has ended, and how often it has published. It needs
the GIL for that. So both numbers stand still in a process that is stopped or in which something holds the GIL, and the
first one where the thread that executes calls waits, or loops without end.
"""

import itertools
import sys
import threading
import time
from collections.abc import Callable

from tilth.trace.spans import recorder

EVERY = 0.25
"""Seconds between two updates."""
COMPILERS = ("torch/_dynamo/convert_frame.py", "torch/_inductor/compile_fx.py")
"""Files of torch.compile that are on the stack while it compiles, and not while compiled code runs."""


def publish_life(publish: Callable[[int, int], None]) -> None:
    """Call ``publish`` from a daemon thread with the work of the calling thread, and the number of the call.

    The work grows while torch.compile works too, which ends no span for minutes.
    """
    thread = threading.get_ident()

    def run() -> None:
        compiling = 0
        for beats in itertools.count():
            compiling += _compiles(thread)
            publish(recorder.ended(thread) + compiling, beats)
            time.sleep(EVERY)  # nothing to wait on: the other thread must not pay for it

    threading.Thread(target=run, name="life", daemon=True).start()


def _compiles(thread: int) -> bool:
    """Return True if a thread is inside torch.compile's compilation."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        if frame.f_code.co_filename.endswith(COMPILERS):
            return True
        frame = frame.f_back
    return False
