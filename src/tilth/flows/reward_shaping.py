"""What changes rewards and weights on their way into an update: functions of rows and of metrics."""

from collections.abc import Mapping, Sequence

import numpy as np

import tilth.rl as rl
from tilth.config.schema import AlgorithmConfig
from tilth.core.batch import Batch
from tilth.roles.experience import CUT

_ADAPTED = {"kl_coef": "kl_target", "entropy_coef": "entropy_target"}
"""Keys of [algorithm] that may be adapted -> the key that says to what."""


def overlong(batch: Batch, how: AlgorithmConfig, most: int) -> Batch:
    """Soft overlong punishment (DAPO 2503.14476, eq. 13): in the last share ``overlong_buffer`` of ``most`` tokens the
    reward falls linearly, by ``overlong_penalty`` in all; a completion of ``most`` tokens loses the whole of it."""
    if not how.overlong_buffer:
        return batch
    buffer = max(how.overlong_buffer * most, 1.0)
    excess = np.clip((batch["completion"] - (most - buffer)) / buffer, 0.0, 1.0)
    return batch.with_rows(reward=(batch["reward"] - how.overlong_penalty * excess).astype(np.float32))


def uncut(batch: Batch, how: AlgorithmConfig) -> Batch:
    """Overlong filtering: without completions that were cut, so that they have no part in the loss or in what it is
    divided by. They have been part of their group's statistics."""
    return batch.select(batch["finish"] != CUT) if how.overlong_filter else batch


def current(how: AlgorithmConfig, weights: Mapping[str, float]) -> dict[str, float]:
    """Key of the recipe's algorithm -> its value now, of those that ``adapted`` has found one for.

    An adapted entropy bonus is in the loss only while the entropy of the step before was at most its target.
    """
    held = _held(how, weights)
    keys = {name: held[name] for name in _ADAPTED if name in held}
    if "entropy" in held:
        coef = keys.get("entropy_coef", how.entropy_coef)
        keys["entropy_coef"] = rl.entropy_bonus(coef, held["entropy"], target=how.entropy_target)
    return keys


def adapted(
    how: AlgorithmConfig, weights: Mapping[str, float], updates: Sequence[Mapping[str, rl.Metric]], samples: int
) -> dict[str, float]:
    """Key -> its new value, for weights that the recipe wants adapted, from the metrics of a step's updates; the value
    in the recipe that each began from; and the entropy where that decides.

    weights: what it found before, in place of which this is.
    """
    found = _held(how, weights)
    before = how.model_copy(update={name: found[name] for name in _ADAPTED if name in found})
    means = {name: _mean(name, updates) for name in ("kl_ref", "entropy")}
    if how.kl_target and means["kl_ref"] is not None:
        kl = means["kl_ref"]
        found["kl_coef"] = rl.adapt(before.kl_coef, kl, target=how.kl_target, horizon=how.kl_horizon, count=samples)
    if how.entropy_target and means["entropy"] is not None:
        found["entropy"] = means["entropy"]
        found["entropy_coef"] = rl.adapt_entropy(before.entropy_coef, means["entropy"], target=how.entropy_target)
    return found | {f"{name}_from": getattr(how, name) for name in _ADAPTED if name in found}


def _held(how: AlgorithmConfig, weights: Mapping[str, float]) -> dict[str, float]:
    """What was found before and still holds. A weight has its value while its target is set and the recipe has the
    value that it began from: so one that was changed in the recipe begins anew."""
    found = {"entropy": weights["entropy"]} if how.entropy_target and "entropy" in weights else {}
    for name, target in _ADAPTED.items():
        if getattr(how, target) and weights.get(f"{name}_from") == getattr(how, name):
            found[name] = weights[name]
    return found


def _mean(name: str, updates: Sequence[Mapping[str, rl.Metric]]) -> float | None:
    parts = [update[name] for update in updates if name in update]
    if not parts:
        return None
    merged = rl.merge_metrics([{name: part} for part in parts])[name]
    return float(merged) if float(merged.count) else None
