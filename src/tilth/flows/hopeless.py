"""Warn of consecutive steps without a learning signal, which can otherwise last for days."""

from collections.abc import Mapping

import numpy as np

from tilth.config.schema import Recipe
from tilth.core.batch import Batch
from tilth.flows.group_filters import has_spread
from tilth.rl.estimators import Advantage
from tilth.roles.experience import CALLS, CUT, is_right

PATIENCE = 20
"""Consecutive steps without a learning signal before the warning."""
MANY = 0.5
"""Share of cut answers from which on the warning proposes a larger rollout.max_tokens."""


def counted(before: Mapping[str, float], sampled: Batch, estimator: Advantage, group: int) -> dict[str, float]:
    """Return the episode after one more step: number of steps, lowest and highest reward; {} if it has ended.

    A step continues the episode if no two rewards of a group differ; for an estimator that learns from flat groups, if
    all rewards of the episode are equal. A step without any reward changes nothing.
    """
    scored = sampled.select(~np.isnan(sampled["reward"]))
    if not len(scored) or not estimator.reads_reward:
        return dict(before)
    low, high = float(scored["reward"].min()), float(scored["reward"].max())
    joined = {
        "steps": before.get("steps", 0.0) + 1,
        "low": min(low, before.get("low", low)),
        "high": max(high, before.get("high", high)),
    }
    if group > 1 and not estimator.flat_teaches:
        return {} if has_spread(scored).any() else joined
    if joined["low"] == joined["high"]:
        return joined
    return {"steps": 1.0, "low": low, "high": high} if low == high else {}


def warning(episode: Mapping[str, float], sampled: Batch, recipe: Recipe) -> str:
    """Return the warning after the ``PATIENCE``-th step of an episode, else ""."""
    if episode.get("steps") != PATIENCE:
        return ""
    one, r = episode["low"] == episode["high"], recipe.rollout
    same = f"every reward was {episode['low']:g}" if one else "all answers to a prompt earned the same reward"
    tries = ["tilth reward try (can the reward tell a right answer from a wrong one?)"]
    cut = float((sampled["finish"] == CUT).mean())
    if cut >= MANY:
        tries.append(f"a larger rollout.max_tokens={r.max_tokens} ({cut:.0%} of the answers are cut)")
    if r.temperature < 1:
        tries.append(f"a higher rollout.temperature={r.temperature:g}")
    if r.group > 1:
        tries.append(f"a larger rollout.group={r.group}")
    if is_right(sampled).all():
        tries.append("harder prompts (data.source)")
    else:
        warm = f"a longer warm-up (supervised.steps={recipe.supervised.steps})"
        tries.append(warm if recipe.supervised.steps else "a warm-up on answers (supervised.steps)")
        tries.append("easier prompts (data.source)")
    return f"nothing can be learned from the last {PATIENCE} steps: {same}; the run goes on; try {'; '.join(tries)}"


def uncalled(sampled: Batch, environment: str) -> str:
    """Return the warning of a step whose prompts list tools that no answer calls, else ""."""
    calls = sampled.rows.get(CALLS, np.empty(0))
    calls = calls[~np.isnan(calls)]
    if not len(calls) or calls.any():
        return ""
    return (
        f"none of {len(calls)} answers calls a tool, though each prompt lists those of {environment}; a model that was "
        f"fine-tuned without the list has never seen one: flow sft shows it with rollout.environment={environment}, or "
        "with the column tools of its records (docs/agents.md)"
    )
