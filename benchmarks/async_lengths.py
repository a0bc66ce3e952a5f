"""Lengths of completions of ``async_rl.py``, known to its engine and to its check."""

from functools import cache
from math import exp

import numpy as np

MEDIAN, SIGMA = 12, 0.99
"""Of lengths, log-normal: the 99th percentile is 10 times the median."""


@cache
def length_of(trajectory: int) -> int:
    """Tokens of a completion; those of evaluations, with ids below 0, are short."""
    if trajectory < 0:
        return 4
    return max(1, round(MEDIAN * exp(SIGMA * np.random.default_rng(trajectory).standard_normal())))
