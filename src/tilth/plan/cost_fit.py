"""Fit seconds against amounts of work: non-negative and robust; the cost of an operation from its measured spans.

Times have outliers on one side (a busy machine, a page fault), often many, and errors that grow with the times. The fit
minimises absolute relative errors, so as many times lie above it as below, at any distance.
"""

import itertools

import numpy as np

from tilth.plan.costs import Compute, Error

APART = 1.25
"""The fixed part can be fitted if the most tokens of a span are at least this many times the fewest."""
LONGER = 2.0
"""The cost of squares can be fitted if mean lengths at the upper of ``EDGES`` are this many times those at the lower;
a few odd spans do not suffice."""
EDGES = (0.05, 0.95)
ENOUGH = 20_000
"""Most rows of a fit; of more, a random sample (seeded). Evenly spaced rows would all be of one rank where ranks take
turns."""
_NEAR = np.geomspace(0.1, 1e-6, 40)
"""Relative errors below which an error counts by its square, per iteration: nearly absolute errors at the end."""
_TINY = 1e-12


def fit(features: np.ndarray, seconds: np.ndarray, weight: np.ndarray | None = None) -> np.ndarray:
    """Return coefficients >= 0, float64 [k], with features [n, k] @ coefficients near ``seconds`` [n].

    A column of zeros gets 0, and so does every column if n is 0. Rows of 0 seconds are left out. Of equal columns the
    first one counts. weight: float64 [n], above 0.
    """
    x, y = np.asarray(features, np.float64), np.asarray(seconds, np.float64)
    scale = np.abs(x).max(0, initial=0.0)
    some, there = np.flatnonzero(y > 0), scale > 0
    if len(some) > ENOUGH:
        some = some[np.random.default_rng(0).permutation(len(some))[:ENOUGH]]
    found = np.zeros(len(scale))
    if len(some) and there.any():
        counts = np.ones(len(some)) if weight is None else np.asarray(weight, np.float64)[some]
        found[there] = _robust(x[some][:, there] / scale[there], y[some], counts) / scale[there]
    return found


def error(features: np.ndarray, seconds: np.ndarray, coefficients: np.ndarray, *, held_out: bool = False) -> Error:
    """Return the relative error of coefficients on rows [n, k] and [n]; rows of 0 seconds are left out."""
    return relative_error(np.asarray(features, np.float64) @ coefficients, seconds, held_out=held_out)


def relative_error(predicted: np.ndarray, seconds: np.ndarray, *, held_out: bool = False) -> Error:
    """Return the relative error of predicted seconds [n]; rows of 0 measured seconds are left out."""
    y = np.asarray(seconds, np.float64)
    apart = np.abs(predicted[y > 0] - y[y > 0]) / y[y > 0]
    if not len(apart):
        return Error(float("nan"), float("nan"), 0, held_out)
    return Error(float(np.median(apart)), float(np.quantile(apart, 0.9)), len(apart), held_out)


def held_out_error(
    features: np.ndarray, seconds: np.ndarray, step: np.ndarray, weight: np.ndarray | None = None
) -> Error:
    """Return the error of a fit on four of five steps on the rows of every fifth; of a single step, on its own rows.

    step: int64 [n]; features, seconds and weight: see ``fit``.
    """
    there, place = np.unique(step, return_inverse=True)
    every = min(5, max(len(there), 1))
    held = (place.reshape(-1) % every == every - 1) & (len(there) > 1)
    found = fit(features[~held], seconds[~held], None if weight is None else weight[~held])
    if not held.any():
        return error(features, seconds, found)
    return error(features[held], seconds[held], found, held_out=True)


def fit_compute(
    op: str, role: str, tokens: np.ndarray, squares: np.ndarray, seconds: np.ndarray, rank: np.ndarray, step: np.ndarray
) -> Compute:
    """Fit the cost of an operation of a role on n > 0 spans: amounts, times, rank and step of each, [n]."""
    separate = bool(tokens.max() == 0 or tokens.max() >= APART * tokens.min())
    lengths = squares / np.maximum(tokens, 1)
    short, long = np.quantile(lengths, EDGES)
    differ = bool(long >= LONGER * short)
    features = np.stack([tokens, squares * differ, np.full(len(tokens), int(separate))], 1)
    found = fit(features, seconds)
    times = seconds / np.maximum(features @ found, _TINY)
    ranks = tuple((int(r), float(np.median(times[rank == r]))) for r in np.unique(rank))
    per_token, per_square, fixed = found.tolist()
    return Compute(
        op, role, fixed, per_token, per_square, (int(tokens.min()), int(tokens.max())),
        (int(squares.min()), int(squares.max())), (float(lengths.min()), float(lengths.max())), len(tokens), ranks,
        separate, differ and bool(squares.any()), held_out_error(features, seconds, step),
    )  # fmt: skip


def nonnegative(gram: np.ndarray, moment: np.ndarray) -> np.ndarray:
    """Minimise |X b - y| over b >= 0, float64 [k], from X'X [k, k] and X'y [k].

    The positive entries of the best b solve the equations of their columns alone, so each set of columns is tried:
    exact, and cheap for a handful of columns.
    """
    k = len(moment)
    best, least = np.zeros(k), 0.0
    for size in range(1, k + 1):
        for columns in itertools.combinations(range(k), size):
            mine = list(columns)
            b = np.linalg.lstsq(gram[np.ix_(mine, mine)], moment[mine], rcond=None)[0]
            rest = float(b @ gram[np.ix_(mine, mine)] @ b - 2 * b @ moment[mine])
            if (b >= 0).all() and rest < least - _TINY * abs(least):
                best, least = np.zeros(k), rest
                best[mine] = b
    return best


def _robust(x: np.ndarray, y: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Fit by iterated weights (Schlossmacher 1973)."""
    b = _weighted(x, y, counts * y**-2)
    for near in _NEAR:
        at = np.maximum(x @ b, _TINY + 1e-3 * y)  # relative to the fit: to the data, low ones would count more
        b = _weighted(x, y, counts / (np.maximum(np.abs(y - at) / at, near) * at**2))
    return b


def _weighted(x: np.ndarray, y: np.ndarray, weight: np.ndarray) -> np.ndarray:
    weight = weight / weight.max()
    return nonnegative(x.T @ (weight[:, None] * x), x.T @ (weight * y))
