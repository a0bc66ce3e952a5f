"""Plugin of row 5 of ``faults.py``: passes of the model take as long as on devices that no other rank uses.

A forward or backward pass sleeps for ``PASS`` seconds beside what it computes, so that ranks that share cores do not
make each other slow. The process whose number the file TILTH_FAULTS.slow-pass has sleeps ``SLOWER`` times as long.
"""

import os
import time
from pathlib import Path

from tilth.trace.spans import span

PASS = 0.5
"""Seconds."""
SLOWER = 1.5
PASSES = ("forward", "backward")
_enter = span.__enter__


def _entered(self: span) -> span:
    opened = _enter(self)
    if self.op in PASSES:
        chosen = Path(os.environ["TILTH_FAULTS"] + ".slow-pass")
        slow = chosen.exists() and chosen.read_text() == str(os.getpid())
        time.sleep(PASS * (SLOWER if slow else 1.0))
    return opened


setattr(span, "__enter__", _entered)  # noqa: B010 - a method of a class
