"""Signs of life of a worker, for the controller to see that it hangs.

A thread publishes how many spans the thread that executes calls has ended, and how often it has published. It needs
the GIL for that. So both numbers stand still in a process that is stopped or in which something holds the GIL, and the
first one where the thread that executes calls waits, or loops without end. In a call that may wait for long (a patient
one) the first number grows with what its threads read and write, too, with imports and with memory that is touched;
and the second one stands still too while the thread computes and the first one does not grow: it does not wait.
"""

import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from tilth.trace.spans import recorder

EVERY = 0.25
"""Seconds between two updates."""
COMPILERS = ("torch/_dynamo/convert_frame.py", "torch/_inductor/compile_fx.py")
"""Files of torch.compile that are on the stack while it compiles, and not while compiled code runs."""
BUSY = 0.05
"""Share of a core from which on a thread computes; one that waits takes almost nothing."""
HELPERS = ("life", "control", "receive", "trace-writer")
"""Threads of a worker that do no work of a call."""


def publish_life(publish: Callable[[int, int], None], is_patient: Callable[[], bool]) -> None:
    """Call ``publish`` from a daemon thread with the work of the calling thread, and the number of the call.

    The work grows while torch.compile works too, which ends no span for minutes. is_patient: returns whether the
    running call is patient.
    """
    thread, native = threading.get_ident(), threading.get_native_id()

    def run() -> None:
        compiling = moved = beats = work = 0
        seen: tuple[int, ...] = ()
        used, at = 0.0, time.monotonic()
        while True:
            compiling += _compiles(thread)
            if patient := is_patient():
                before, seen = seen, (*_moved({thread: native}), len(sys.modules))
                moved += before != seen
            stood, work = work, recorder.ended(thread) + compiling + moved
            since, at, spent, used = at, time.monotonic(), used, _seconds(native)
            spins = patient and stood == work and used - spent > BUSY * (at - since)
            beats += not spins
            publish(work, beats)
            time.sleep(EVERY)  # nothing to wait on: the other thread must not pay for it

    threading.Thread(target=run, name="life", daemon=True).start()


def _moved(known: Mapping[int, int]) -> tuple[int, int]:
    """Return the bytes that the threads of this process have read and written, and their page faults.

    known: thread -> its number for the kernel; of a forked process's first thread Python 3.11 has the parent's.
    """
    nbytes = faults = 0
    for one in threading.enumerate():
        if one.name not in HELPERS and one.native_id is not None:
            place = Path(f"/proc/self/task/{known.get(one.ident or 0, one.native_id)}")
            with suppress(OSError):  # no Linux, or the thread has just ended
                nbytes += sum(int(line.split()[1]) for line in (place / "io").read_text().splitlines()[:2])
                words = (place / "stat").read_text().rpartition(")")[2].split()
                faults += int(words[7]) + int(words[9])
    return nbytes, faults


def _seconds(native: int) -> float:
    """Return the processor time of a thread of this process; 0 where that is unknown."""
    with suppress(OSError):  # no Linux
        return int(Path(f"/proc/self/task/{native}/schedstat").read_text().split()[0]) * 1e-9
    return 0.0


def _compiles(thread: int) -> bool:
    """Return True if a thread is inside torch.compile's compilation."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        if frame.f_code.co_filename.endswith(COMPILERS):
            return True
        frame = frame.f_back
    return False
