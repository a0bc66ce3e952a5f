"""Rule for jumps of a metric: several times its running median (ByteRobust, arXiv 2509.16293, section 4)."""

import math
from collections import deque
from statistics import median

FACTOR = 5.0
PAST = 100
"""Values that the median is of."""
LEAST = 20
"""Values before which nothing is a jump: a metric moves much while training begins."""


class SpikeRule:
    """Jumps of one metric. A row of jumps is reported once, and jumps count in the median: a new level ends them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._past: deque[float] = deque(maxlen=PAST)
        self._high = False

    def add(self, value: float) -> str:
        """Add the next value; return a warning if a jump begins with it, else ""."""
        if not math.isfinite(value):  # ``guard.on_nan`` decides about it
            return ""
        usual = median(self._past) if len(self._past) >= LEAST else math.inf
        self._past.append(value)
        before, self._high = self._high, value > FACTOR * usual > 0
        if not self._high or before:
            return ""
        return (
            f"{self.name} is {value:.3g}, {value / usual:.1f} times the median of the last {len(self._past) - 1} steps"
        )
