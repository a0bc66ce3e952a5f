"""Metrics that follow from the rows of a batch alone."""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from tilth.core.batch import Batch
from tilth.flows.reward_shaping import has_spread
from tilth.rl.passk import interval, paired_change
from tilth.roles.experience import CUT, outcome
from tilth.roles.rollout import EngineCounts
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


def measure_engines(metrics: Metrics, counts: Sequence[Sequence[float]], *, drafts: bool) -> None:
    """Add how full KV caches were and, with drafts, what these saved. counts: of each engine,
    ``RolloutWorker.engine_counts``."""
    if not counts:
        return
    engines = [EngineCounts(*count) for count in counts]
    total = EngineCounts(*map(sum, zip(*engines)))
    if total.looks:
        metrics.add_sum("kv_cache_usage/mean", total.used, total.looks)
        metrics.add("kv_cache_usage/max", max(one.peak for one in engines))
    if not drafts:
        return
    if total.drafted:
        metrics.add("draft/acceptance", total.accepted / total.drafted, total.drafted)
    if total.drawn:
        metrics.add("draft/passes", 1 - total.accepted / total.drawn, total.drawn)
    for name, count in (("ahead", total.ahead), ("missed", total.missed), ("lost", total.lost)):
        if count:
            metrics.add(f"draft/{name}", float(count))


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


def outcomes(known: Batch) -> dict[str, float]:
    """Return the index of each prompt, as JSON has it -> the outcome of its answer."""
    pairs = zip(known["prompt"].tolist(), outcome(known).tolist())
    return {str(prompt): found for prompt, found in pairs if not math.isnan(found)}


def uncertainty(now: Mapping[str, float], before: Mapping[str, float], seed: int) -> dict[str, float]:
    """Return the 95 % interval over prompts of the mean outcome, and of its change where prompts were answered before.

    now, before: ``outcomes`` of this evaluation, and of the one that began the phase.
    """
    own = interval(np.array(list(now.values())), seed)
    found = {"low": own.low, "high": own.high, "prompts": float(len(now))}
    if both := [prompt for prompt in now if prompt in before]:
        old, new = (np.array([one[prompt] for prompt in both]) for one in (before, now))
        change = paired_change(old, new, seed)
        found |= {"change_low": change.low, "change_high": change.high}
    return {f"{REWARD}/{name}": value for name, value in found.items() if not math.isnan(value)}
