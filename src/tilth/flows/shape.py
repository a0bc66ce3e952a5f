"""What changes rewards and weights on their way into an update: functions of rows and of metrics."""

from collections.abc import Mapping, Sequence

import numpy as np

import tilth.rl as rl
from tilth.config.schema import Algorithm
from tilth.core.batch import Batch

CUT = 1
"""``finish`` of a completion that reached rollout.max_tokens."""


def overlong(batch: Batch, how: Algorithm, most: int) -> Batch:
    """Soft overlong punishment (DAPO 2503.14476, eq. 13): in the last share ``overlong_buffer`` of ``most`` tokens the
    reward falls linearly, by ``overlong_penalty`` in all; a completion of ``most`` tokens loses the whole of it."""
    if not how.overlong_buffer:
        return batch
    buffer = max(how.overlong_buffer * most, 1.0)
    excess = np.clip((batch["completion"] - (most - buffer)) / buffer, 0.0, 1.0)
    return batch.with_rows(reward=(batch["reward"] - how.overlong_penalty * excess).astype(np.float32))


def uncut(batch: Batch, how: Algorithm) -> Batch:
    """Overlong filtering: without completions that were cut, so that they have no part in the loss or in what it is
    divided by. They have been part of their group's statistics."""
    return batch.select(batch["finish"] != CUT) if how.overlong_filter else batch


def current(how: Algorithm, weights: Mapping[str, float]) -> Algorithm:
    """The recipe's algorithm with what ``adapted`` has found so far. An adapted entropy bonus is in the loss only while
    the entropy of the step before was at most its target."""
    keys = {name: value for name, value in weights.items() if name != "entropy"}
    if "entropy" in weights:
        coef = keys.get("entropy_coef", how.entropy_coef)
        keys["entropy_coef"] = rl.entropy_bonus(coef, weights["entropy"], target=how.entropy_target)
    return how.model_copy(update=keys)


def adapted(
    how: Algorithm, weights: Mapping[str, float], updates: Sequence[Mapping[str, rl.Metric]], samples: int
) -> dict[str, float]:
    """Key -> its new value, for weights that the recipe wants adapted, from the metrics of a step's updates; and the
    entropy where that decides.

    weights: what it found before.
    """
    before = how.model_copy(update={name: value for name, value in weights.items() if name != "entropy"})
    means = {name: _mean(name, updates) for name in ("kl_ref", "entropy")}
    found: dict[str, float] = {}
    if how.kl_target and means["kl_ref"] is not None:
        kl = means["kl_ref"]
        found["kl_coef"] = rl.adapt(before.kl_coef, kl, target=how.kl_target, horizon=how.kl_horizon, count=samples)
    if how.entropy_target and means["entropy"] is not None:
        found["entropy"] = means["entropy"]
        found["entropy_coef"] = rl.adapt_entropy(before.entropy_coef, means["entropy"], target=how.entropy_target)
    return found


def _mean(name: str, updates: Sequence[Mapping[str, rl.Metric]]) -> float | None:
    parts = [update[name] for update in updates if name in update]
    if not parts:
        return None
    merged = rl.merge_metrics([{name: part} for part in parts])[name]
    return float(merged) if float(merged.count) else None
