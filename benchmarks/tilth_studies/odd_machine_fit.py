"""Rules of odd machines learned from jobs: floors and thresholds from healthy ones, the order from faulty ones."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tilth.config.errors import ArgumentError
from tilth.guard.odd_machines import (
    OddMachineRules,
    SampleTable,
    distances,
    equals,
    leave_one_out,
    levels,
    sustained,
)


def with_floors(rules: OddMachineRules, healthy: Sequence[SampleTable]) -> OddMachineRules:
    """Return the rules with the typical distance of two healthy machines of a role as each metric's floor."""
    if not healthy:
        raise ArgumentError("healthy=() gives no floors; use tables of jobs without a fault", key="healthy")
    found = []
    for rule in rules.metrics:
        means = [
            typical(level[:, columns]).mean()
            for table in healthy
            for level in [levels(table, rule, rules.windows(table.interval)[0])]
            for columns in equals(table)
        ]
        found.append(replace(rule, floor=max(float(np.median(means)) if means else 0.0, 1e-6)))
    return replace(rules, metrics=tuple(found))


def peaks(table: SampleTable, rules: OddMachineRules) -> np.ndarray:
    """Return the largest score of each metric that one machine holds for the span of an alert."""
    window, length = rules.windows(table.interval)
    found = np.zeros(len(rules.metrics))
    for i, rule in enumerate(rules.metrics):
        level = levels(table, rule, window)
        for columns in equals(table):
            score = leave_one_out(distances(level[:, columns]), rule.floor)
            found[i] = max(found[i], sustained(score, length).max(initial=0.0))
    return found


def with_thresholds(rules: OddMachineRules, healthy: np.ndarray, margin: float) -> OddMachineRules:
    """Return the rules with thresholds this many times what healthy jobs reach. healthy: [jobs, metrics] peaks."""
    if not margin > 0:
        raise ArgumentError(f"margin={margin!r} cannot be used; use a number above 0", key="margin")
    if not len(healthy):
        raise ArgumentError("healthy has no rows; use the peaks of at least one healthy job", key="healthy")
    highest = np.maximum(healthy.max(axis=0), 1.0) * margin
    return replace(rules, metrics=tuple(replace(rule, threshold=float(at)) for rule, at in zip(rules.metrics, highest)))


def in_order(rules: OddMachineRules, peak: np.ndarray, faulty: np.ndarray) -> OddMachineRules:
    """Return the rules with the most telling metric first: a decision list of thresholds. peak: [jobs, metrics].

    Each time the metric comes next whose threshold parts healthy from faulty jobs best (Gini impurity) among the jobs
    that no metric before it has reported. faulty: [jobs] of bool.
    """
    left, rest, order = np.ones(len(peak), bool), list(range(len(rules.metrics))), list[int]()
    above = peak > np.array([rule.threshold for rule in rules.metrics])
    while rest:
        best = min(rest, key=lambda metric: (_impurity(above[left, metric], faulty[left]), rest.index(metric)))
        order.append(best)
        rest.remove(best)
        left &= ~above[:, best]
    return replace(rules, metrics=tuple(rules.metrics[metric] for metric in order))


def typical(level: np.ndarray) -> np.ndarray:
    """Return the mean distance of two machines in each window."""
    count = level.shape[1]
    mean: np.ndarray = distances(level).sum(axis=1) / max(1, count * (count - 1))
    return mean


def _impurity(split: np.ndarray, faulty: np.ndarray) -> float:
    """Return the Gini impurity of both sides, weighted by their jobs."""
    total = 0.0
    for side in (faulty[split], faulty[~split]):
        share = side.mean() if len(side) else 0.0
        total += len(side) * 2 * share * (1 - share)
    return float(total)
