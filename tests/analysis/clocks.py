"""Clocks whose error is known, for the tests: true times become what each clock shows."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Shifted:
    """A clock that shows true + skew + drift * true (ns); from ``change`` on its drift is another one."""

    skew: int
    drift: float
    change: float = 1e18
    later: float = 0.0

    def shows(self, true):
        true = np.asarray(true, float)
        extra = np.where(true > self.change, (true - self.change) * (self.later - self.drift), 0.0)
        return np.asarray(true, np.int64) + self.skew + np.rint(self.drift * true + extra).astype(np.int64)


def bursts(clock, times, delay, rng, rounds=4, least=20e3):
    """[int64 [rounds, 3]]: a burst at each of the true times; each way takes ``least`` plus a draw of ``delay``."""
    found = []
    for time in times:
        there = time + rng.uniform(0, 3e6, rounds) + least + (out := delay(rng, rounds))
        back = least + delay(rng, rounds)
        found.append(np.stack([there - least - out, clock.shows(there), there + back], 1).astype(np.int64))
        found[-1] = found[-1] + np.array([-1, 0, 1])  # rounded outwards, as a reading before and one after are
    return found


def noisy(mean=50e3):
    return lambda rng, n: rng.exponential(mean, n)
