"""Rules by which what is lost with a process, or with a step, begins again."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class RestartPolicy:
    """Rules that end restarts, and how long each one waits.

    attempts: times that one piece of work begins. fruitless: losses in a row, without anything done in between, that
    are borne. backoff: seconds before the second attempt, twice as many before each further one, at most ``latest``.
    """

    attempts: float = math.inf
    fruitless: float = math.inf
    backoff: float = 0.0
    latest: float = math.inf

    def again(self, begun: int = 0, *, fruitless: int = 0) -> bool:
        """Return whether work begins again that has begun, or was lost without fruit, this many times."""
        return begun < self.attempts and fruitless <= self.fruitless

    def pause(self, begun: int) -> float:
        """Return the seconds before work begins again that has begun this many times."""
        return min(self.backoff * 2 ** (begun - 1), self.latest)
