"""Metrics that follow from the rows of a batch alone."""

import numpy as np

from tilth.core.batch import Batch
from tilth.flows.group_filters import has_spread
from tilth.roles.experience import CUT, outcome
from tilth.runs.metrics import Metrics
from tilth.runs.readers import ACCURACY, REWARD


def measure_rows(metrics: Metrics, batch: Batch) -> None:
    """Add the statistics of samples: rewards and their parts, lengths, counts."""
    reward = batch["reward"][~np.isnan(batch["reward"])]
    if len(reward):
        metrics.add("reward/mean", float(reward.mean(dtype=np.float64)), len(reward))
        metrics.add("reward/std", float(reward.std(dtype=np.float64)), len(reward))
    metrics.add("samples", float(len(batch)))
    measure_parts(metrics, batch, "reward")
    metrics.add("length/mean", float(batch["completion"].mean()), len(batch))
    metrics.add("length/max", float(batch["completion"].max()))
    metrics.add("length/cut", float((batch["finish"] == CUT).mean()), len(batch))
    metrics.add("tokens/generated", float(batch["completion"].sum()))


def measure_parts(metrics: Metrics, batch: Batch, prefix: str) -> None:
    """Add the mean of each part of the reward over the rows that have it."""
    for name in (n for n in batch.rows if n.startswith("part/")):
        known = batch[name][~np.isnan(batch[name])]
        if len(known):
            metrics.add(f"{prefix}/{name}", float(known.mean(dtype=np.float64)), len(known))


def measure_groups(metrics: Metrics, scored: Batch) -> None:
    """Add the share of groups whose rewards differ."""
    groups = len(np.unique(scored["group"]))
    metrics.add("groups/gradient", len(np.unique(scored["group"][has_spread(scored)])) / groups, groups)


def is_graded(scored: Batch) -> bool:
    """True if some outcome is neither 1 (right) nor 0 (wrong)."""
    outcomes = outcome(scored)
    return not np.isin(outcomes[~np.isnan(outcomes)], (0.0, 1.0)).all()


def figures(known: Batch, *, graded: bool) -> dict[str, float]:
    """Return the mean outcome of answers by metric name; {} if no answer has an outcome.

    It is an accuracy too, unless ``graded``: then some outcome of the run was neither right nor wrong.
    """
    outcomes = outcome(known)[~np.isnan(outcome(known))]
    names = (REWARD,) if graded else (ACCURACY, REWARD)
    return dict.fromkeys(names, float(outcomes.mean(dtype=np.float64))) if len(outcomes) else {}
