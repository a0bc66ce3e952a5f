"""Metrics of a step that follow from rows alone."""

import numpy as np

from tilth.core.batch import Batch
from tilth.roles.experience import CUT
from tilth.runs.metrics import Metrics


def measure_rows(metrics: Metrics, batch: Batch) -> None:
    """Add what samples say: rewards and their parts, lengths, counts."""
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
    """Add the mean of each part of the reward, where it is known."""
    for name in (n for n in batch.rows if n.startswith("part/")):
        known = batch[name][~np.isnan(batch[name])]
        if len(known):
            metrics.add(f"{prefix}/{name}", float(known.mean(dtype=np.float64)), len(known))
