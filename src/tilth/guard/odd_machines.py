"""Odd machines of a job by their metrics: one machine that differs from its peers for long, in one metric.

As in Minder (arXiv 2411.01791): a job balances its work, so healthy machines look alike; a fault lasts; each metric is
judged alone, the most telling first. A metric's values are divided by its physical range, spikes are removed by a
median of five samples, and a window's embedding is its mean. With x_i the embedding of machine i among N, and
D_i = sum_j |x_i - x_j|, its score leaves the machine out of the scale that it is measured with:

    score_i = mean_j |x_i - x_j| / (floor + mean_{j,k != i} |x_j - x_k|)
            = D_i / (N - 1)      / (floor + (sum_j D_j - 2 D_i) / ((N - 1)(N - 2)))

It has no bound in a small job, where a z-score cannot exceed (N - 1) / sqrt(N). All D_i of a window follow exactly from
one sort and prefix sums, in N log N and not N^2 steps. A machine is odd if its score exceeds the metric's threshold in
every window of a span: ``continuity`` seconds and what the windows smear.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tilth.config.errors import ArgumentError
from tilth.guard.verdict import Verdict

MISSING = "missing samples"
"""Metric that every table has: the share of a machine's metrics without a sample."""
DESPIKED = 5
"""Samples whose median replaces the one in their middle."""
FEWEST = 4
"""Machines that can be compared: one, and three to compare it with."""


@dataclass(frozen=True)
class SampleTable:
    """Samples of all machines on one clock. values: [metrics, samples, machines], NaN where there is none."""

    metrics: tuple[str, ...]
    machines: tuple[str, ...]
    values: np.ndarray
    start: float = 0.0
    """Seconds of the first sample."""
    interval: float = 1.0
    """Seconds from a sample to the next."""
    groups: tuple[int, ...] = ()
    """Role of each machine (its pipeline stage): only equals are compared. () if all are equal."""
    ranks: tuple[tuple[int, ...], ...] = ()
    """Workers of each machine. () if they are not known."""

    def __post_init__(self) -> None:
        shape = (len(self.metrics), len(self.machines))
        if self.values.ndim != 3 or (self.values.shape[0], self.values.shape[2]) != shape:
            raise _wrong("values", self.values.shape, f"[{shape[0]} metrics, samples, {shape[1]} machines]")
        for key, names in (("metrics", self.metrics), ("machines", self.machines)):
            if not names or len(set(names)) < len(names):
                raise _wrong(key, names, "names, each once")
        if not self.interval > 0:
            raise _wrong("interval", self.interval, "a number of seconds above 0")
        for key, of in (("groups", self.groups), ("ranks", self.ranks)):
            if of and len(of) != len(self.machines):
                raise _wrong(key, of, f"one entry for each of {len(self.machines)} machines, or ()")


@dataclass(frozen=True)
class MetricRule:
    """One metric: its physical limits, and how far healthy machines differ."""

    name: str
    low: float
    high: float
    floor: float = 0.0
    """Distance of healthy machines, as a share of the limits' range."""
    threshold: float = float("inf")
    """Score that no healthy machine holds for the span of an alert."""

    def __post_init__(self) -> None:
        if not self.low < self.high:
            raise _wrong(f"{self.name}.high", self.high, f"above the low limit {self.low}")
        if not self.floor >= 0:
            raise _wrong(f"{self.name}.floor", self.floor, "a distance of at least 0")
        if not self.threshold > 0:
            raise _wrong(f"{self.name}.threshold", self.threshold, "a score above 0")


@dataclass(frozen=True)
class OddMachineRules:
    """Rules of a detector. metrics: the most telling first."""

    metrics: tuple[MetricRule, ...]
    window: float = 60.0
    """Seconds of a window; about two steps of the job, or phases differ."""
    continuity: float = 120.0
    """Seconds that a machine must differ: shorter ones never alert."""
    cool_down: float = 600.0
    """Seconds in which a machine must look healthy before it is reported again."""

    def __post_init__(self) -> None:
        names = [rule.name for rule in self.metrics]
        if not names or len(set(names)) < len(names):
            raise _wrong("metrics", names, "rules of metrics, each once")
        for key in ("window", "continuity"):
            if not 0 < getattr(self, key) < float("inf"):
                raise _wrong(key, getattr(self, key), "a number of seconds above 0")
        if not self.cool_down >= 0:
            raise _wrong("cool_down", self.cool_down, "a number of seconds, at least 0")

    def windows(self, interval: float) -> tuple[int, int]:
        """Return the samples of a window, and how many windows in a row are an alert."""
        window = max(1, round(self.window / interval))
        return window, int(np.ceil(self.continuity / interval)) + window - 1 + DESPIKED // 2 * 2


def align(
    series: Mapping[str, Mapping[str, tuple[Sequence[float], Sequence[float]]]],
    interval: float,
    groups: Mapping[str, int] | None = None,
    ranks: Mapping[str, tuple[int, ...]] | None = None,
) -> SampleTable:
    """Put series of samples on one clock. series: machine -> metric -> (times, values), times in seconds, ascending.

    A sample counts for the tick nearest to it, the last one of a tick wins.
    """
    if not interval > 0:
        raise _wrong("interval", interval, "a number of seconds above 0")
    machines = tuple(sorted(series))
    metrics = tuple(sorted({metric for of in series.values() for metric in of}))
    every = [(machine, metric, *series[machine][metric]) for machine in machines for metric in series[machine]]
    for machine, metric, times, values in every:
        if len(times) != len(values) or not (np.isfinite(times).all() and (np.diff(times) >= 0).all()):
            raise _wrong(f"{machine}.{metric}", len(times), "as many values as times, which ascend")
    ends = [(times[0], times[-1]) for *_, times, _ in every if len(times)]
    if not ends:
        raise _wrong("series", machines, "machines with samples")
    start = min(first for first, _ in ends)
    ticks = round((max(last for _, last in ends) - start) / interval) + 1
    made = np.full((len(metrics), ticks, len(machines)), np.nan, np.float32)
    for machine, metric, times, values in every:
        at = np.rint((np.asarray(times, float) - start) / interval).astype(int)
        made[metrics.index(metric), at, machines.index(machine)] = values
    of = tuple((groups or {}).get(machine, 0) for machine in machines)
    workers = tuple(ranks[machine] for machine in machines) if ranks else ()
    return SampleTable(metrics, machines, made, start, interval, of, workers)


def levels(table: SampleTable, rule: MetricRule, window: int) -> np.ndarray:
    """Return the denoised level of every window of this many samples: [windows, machines], scaled by the limits."""
    if rule.name == MISSING:
        values = np.isnan(table.values).mean(axis=0, dtype=np.float32)
    elif rule.name not in table.metrics:
        raise _wrong("metrics", rule.name, f"one of {', '.join((*table.metrics, MISSING))}")
    else:
        values = table.values[table.metrics.index(rule.name)].astype(np.float32, copy=False)
        values = filled((values - np.float32(rule.low)) / np.float32(rule.high - rule.low))
    sums = np.cumsum(_despiked(values), axis=0, dtype=np.float64)
    sums[window:] -= sums[:-window].copy()
    return (sums[window - 1 :] / window).astype(np.float32)


def filled(values: np.ndarray) -> np.ndarray:
    """Fill gaps with the sample of the machine that is nearest in time; a machine without any is like the others."""
    there = np.isfinite(values)
    if there.all():
        return values
    ticks = np.arange(len(values), dtype=np.int32)[:, None]
    before = np.maximum.accumulate(np.where(there, ticks, -len(values)), axis=0)
    after = np.minimum.accumulate(np.where(there, ticks, 2 * len(values))[::-1], axis=0)[::-1]
    nearest = np.where(ticks - before <= after - ticks, before, after)
    full = np.take_along_axis(values, np.clip(nearest, 0, len(values) - 1), axis=0)
    none = ~there.any(axis=0)
    if none.any():
        full[:, none] = np.median(full[:, ~none], axis=1, keepdims=True) if not none.all() else 0
    return full


def _despiked(values: np.ndarray) -> np.ndarray:
    """Return medians of five samples in a row, by a network of minima and maxima; ends are repeated."""
    padded = np.pad(values, ((2, 2), (0, 0)), mode="edge")
    a, b, c, d, e = (padded[i : i + len(values)] for i in range(DESPIKED))
    low, high = np.minimum(a, b), np.maximum(a, b)
    other_low, other_high = np.minimum(c, d), np.maximum(c, d)
    low, high = np.maximum(low, other_low), np.minimum(high, other_high)
    return np.maximum(np.minimum(low, high), np.minimum(e, np.maximum(low, high)))


def distances(level: np.ndarray) -> np.ndarray:
    """Return the sum of each machine's distances to all others: [windows, machines], exact, by sort and prefix sums."""
    count = level.shape[1]
    order = np.argsort(level, axis=1)
    sorted_level = np.take_along_axis(level, order, axis=1).astype(np.float64)
    sorted_level -= sorted_level[:, :1]
    prefix = np.cumsum(sorted_level, axis=1)
    sums = sorted_level * (2 * np.arange(count) + 2 - count) - 2 * prefix + prefix[:, -1:]
    found = np.empty_like(sums)
    np.put_along_axis(found, order, sums, axis=1)
    return np.maximum(found, 0)


def leave_one_out(distance: np.ndarray, floor: float) -> np.ndarray:
    """Return the score of each machine in each window from its sums of distances (see the module)."""
    count = distance.shape[1]
    others = np.maximum(distance.sum(axis=1, keepdims=True) - 2 * distance, 0) / ((count - 1) * (count - 2))
    return np.divide(distance / (count - 1), others + floor, out=np.zeros_like(distance), where=distance > 0)


def equals(table: SampleTable) -> Iterator[np.ndarray]:
    """Yield the columns of machines that may be compared."""
    groups = np.asarray(table.groups or (0,) * len(table.machines))
    for group in np.unique(groups):
        columns = np.flatnonzero(groups == group)
        if len(columns) >= FEWEST:
            yield columns


def scores(table: SampleTable, rule: MetricRule, window: int) -> np.ndarray:
    """Return the score of every machine in every window, [windows, machines]; 0 where a role has too few machines."""
    level = levels(table, rule, window)
    found = np.zeros(level.shape)
    for columns in equals(table):
        found[:, columns] = leave_one_out(distances(level[:, columns]), rule.floor)
    return found


def sustained(score: np.ndarray, length: int) -> np.ndarray:
    """Return the smallest score of this many windows in a row, by doubling; row i: windows i to i + length - 1."""
    if len(score) < length:
        return score[:0]
    reached, covered = score, 1
    while covered < length:
        step = min(covered, length - covered)
        reached = np.minimum(reached[:-step], reached[step:])
        covered += step
    return reached


class OddMachineWatch:
    """Detector that is called now and then with the last minutes of a job, and reports a machine once."""

    def __init__(self, rules: OddMachineRules) -> None:
        self.rules = rules
        self._last = dict[str, float]()

    def detect(self, table: SampleTable) -> Verdict | None:
        """Return the odd machine of the most telling metric, of several the one that was odd first, or None."""
        window, length = self.rules.windows(table.interval)
        if table.values.shape[1] < window + length - 1:
            return None
        for rule in self.rules.metrics:
            score = scores(table, rule, window)
            held = sustained(score, length)
            columns = np.flatnonzero((held > rule.threshold).any(axis=0))
            first = (held[:, columns] > rule.threshold).argmax(axis=0)
            found = sorted((int(i), -held[i, c], table.machines[c], int(c)) for i, c in zip(first, columns))
            news = [(i, column) for i, _, name, column in found if not self._known(name, table, score[:, column], rule)]
            if news:
                return self._verdict(table, rule, score[:, news[0][1]], *news[0])
        return None

    def _known(self, name: str, table: SampleTable, score: np.ndarray, rule: MetricRule) -> bool:
        """True if the machine was reported and did not look healthy for the cool-down since; note that it is odd."""
        odd = np.flatnonzero(score > rule.threshold)
        window = self.rules.windows(table.interval)[0]
        begin, end = (table.start + (int(at) + window - 1) * table.interval for at in (odd[0], odd[-1]))
        before = self._last.get(name)
        known = before is not None and begin - before <= self.rules.cool_down
        if known:
            self._last[name] = max(before or 0.0, end)
        return known

    def _verdict(self, table: SampleTable, rule: MetricRule, score: np.ndarray, first: int, column: int) -> Verdict:
        window, length = self.rules.windows(table.interval)
        name, held = table.machines[column], slice(first, first + length)
        level = levels(table, rule, window)[held] * (rule.high - rule.low) + rule.low
        group = next(columns for columns in equals(table) if column in columns)
        value, others = np.median(level[:, column]), np.median(level[:, group[group != column]])
        since = table.start + (first + window - 1) * table.interval
        alert = since + (length - 1 + DESPIKED // 2) * table.interval
        self._last[name] = table.start + (int(np.flatnonzero(score > rule.threshold)[-1]) + window - 1) * table.interval
        lowest = float(score[held].min())
        evidence = (
            f"{name}: {rule.name} is {value:.4g}, of the other machines {others:.4g}, since second {since:.0f} for "
            f"{self.rules.continuity:g} s and more: {lowest:.3g} times as far from the others as they are from each "
            f"other; healthy ones stay below {rule.threshold:.3g}"
        )
        details = {"machine": name, "metric": rule.name, "since": since, "alert": alert, "score": lowest}
        details |= {"threshold": rule.threshold, "value": float(value), "others": float(others)}
        return Verdict("odd-machine", table.ranks[column] if table.ranks else (), evidence, details)


def _wrong(key: str, value: object, right: str) -> ArgumentError:
    return ArgumentError(f"{key}={value!r} cannot be used; use {right}", key=key)
