"""pass@k and avg@k of a policy, and the change between two evaluations, with 95 % confidence intervals over prompts.

Sources: pass@k of Chen et al. 2021 (arXiv 2107.03374); Wilson 1927; expanded percentile bootstrap of Hesterberg 2015
(arXiv 1411.5279); paired shares of Agresti and Min 2005 (Statistics in Medicine 24).
Random numbers are counted, so the same values and seed give the same interval, bit for bit.
"""

import math
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from tilth.core.errors import ArgumentError
from tilth.core.random import stream

RESAMPLES = 2000
LARGE = 20_000
"""Number of prompts from which the normal interval replaces the bootstrap; they agree within its error."""
_CHUNK = 1 << 22
"""Draws at a time: 32 MiB of indices."""


class Interval(NamedTuple):
    """Mean over prompts and its confidence interval; NaN if undefined."""

    value: float
    low: float
    high: float


def pass_at_k(right: np.ndarray, known: np.ndarray, k: int) -> np.ndarray:
    """Return the chance that at least one of ``k`` samples is right, estimated without bias from ``known`` >= k
    samples.

    right, known: integers [P], right samples and samples of each prompt. float64 [P]: 1 - C(n-c, k) / C(n, k), as a
    product of k factors, so that nothing overflows; NaN for a prompt with fewer than k samples. ValueError for k < 1.
    """
    if k < 1:
        raise ArgumentError(f"k={k}: pass@k needs k of at least 1", key="k")
    wrong, n = (known - right).astype(np.float64), known.astype(np.float64)
    miss = np.ones(len(n))
    for drawn in range(k):
        miss *= np.maximum(wrong - drawn, 0) / np.maximum(n - drawn, 1)
    return np.where(known >= k, 1 - miss, np.nan)


def avg_at_k(values: np.ndarray, k: int) -> np.ndarray:
    """Return the mean of the first ``k`` known values of each prompt: [P, n], NaN missing -> float64 [P], NaN fewer."""
    if k < 1:
        raise ArgumentError(f"k={k}: avg@k needs k of at least 1", key="k")
    known = ~np.isnan(values)
    first = known & (known.cumsum(1) <= k)
    return np.where(known.sum(1) >= k, np.where(first, values, 0).sum(1, dtype=np.float64) / k, np.nan)


def interval(values: np.ndarray, seed: int = 0, level: float = 0.95) -> Interval:
    """Return mean and confidence interval of one value for each prompt ([P]; NaN is left out).

    Prompts are taken as a random sample. Values that are all 0 or 1 get Wilson's interval, which also holds for few
    prompts and for shares near 0 and 1; others a bootstrap over prompts, or for very many the normal interval.
    """
    known = values[~np.isnan(values)].astype(np.float64)
    if not len(known):
        return Interval(math.nan, math.nan, math.nan)
    if np.isin(known, (0, 1)).all():
        return wilson(int(known.sum()), len(known), level)
    if len(known) == 1:
        return Interval(float(known[0]), math.nan, math.nan)
    return (normal if len(known) >= LARGE else _bootstrap)(known, seed, level)


def wilson(right: float, count: int, level: float = 0.95) -> Interval:
    """Return the share of ``right`` in ``count`` independent trials with Wilson's score interval."""
    z, p = NormalDist().inv_cdf((1 + level) / 2), right / count
    middle = p + z * z / (2 * count)
    spread = z * math.sqrt(p * (1 - p) / count + (z / (2 * count)) ** 2)
    scale = 1 + z * z / count
    # The ends are 0 and 1 exactly where no or every trial is right; rounding must not say otherwise.
    low = 0.0 if right == 0 else (middle - spread) / scale
    return Interval(p, low, 1.0 if right == count else (middle + spread) / scale)


def paired_change(before: np.ndarray, after: np.ndarray, seed: int = 0, level: float = 0.95) -> Interval:
    """Return the mean of ``after - before`` and its confidence interval; both hold one value for each prompt ([P]).

    NaN in either leaves the prompt out. Values that are all 0 or 1 get the adjusted interval for matched pairs, which
    also holds where few prompts changed; others get ``interval`` of the differences.
    """
    known = ~(np.isnan(before) | np.isnan(after))
    old, new = before[known].astype(np.float64), after[known].astype(np.float64)
    if not len(old) or not np.isin([old, new], (0, 1)).all():
        return interval(new - old, seed, level)
    better, worse, n = float((new > old).sum()), float((new < old).sum()), len(old) + 2
    middle, z = (better - worse) / n, NormalDist().inv_cdf((1 + level) / 2)
    reach = z * math.sqrt(better + worse + 1 - (better - worse) ** 2 / n) / n
    return Interval((better - worse) / len(old), max(middle - reach, -1.0), min(middle + reach, 1.0))


def normal(values: np.ndarray, seed: int, level: float) -> Interval:
    """Mean and normal interval of many values; draws nothing."""
    del seed
    mean, error = float(values.mean()), float(values.std(ddof=1)) / math.sqrt(len(values))
    reach = error * NormalDist().inv_cdf((1 + level) / 2)
    return Interval(mean, mean - reach, mean + reach)


def _bootstrap(values: np.ndarray, seed: int, level: float) -> Interval:
    n, numbers = len(values), stream(seed, "bootstrap")
    means, rows = np.empty(RESAMPLES), max(1, _CHUNK // n)
    for begin in range(0, RESAMPLES, rows):
        end = min(begin + rows, RESAMPLES)
        drawn = numbers.integers(begin * n, (end - begin) * n, n).numpy()
        means[begin:end] = values[drawn].reshape(-1, n).mean(1)
    low, high = np.quantile(means, [tail := _tail(n, level), 1 - tail])
    return Interval(float(values.mean()), float(low), float(high))


def _tail(n: int, level: float) -> float:
    """The percentile to cut at: a plain percentile interval of n values is too narrow by sqrt((n-1)/n) and by t."""
    z, free = NormalDist().inv_cdf((1 + level) / 2), n - 1
    # Student's t by two terms of its Cornish-Fisher expansion: within 2 % of exact from 4 values on.
    t = z + (z**3 + z) / (4 * free) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * free**2)
    return NormalDist().cdf(-t * math.sqrt(n / free))
