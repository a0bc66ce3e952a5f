"""Check and shape rewards and adapt loss weights before an update: functions of rows and metrics."""

from collections.abc import Mapping, Sequence

import numpy as np

import tilth.rl as rl
from tilth.config.schema import AlgorithmConfig
from tilth.core.batch import Batch
from tilth.core.errors import RecipeError, RewardError
from tilth.rl.algorithm import Algorithm
from tilth.roles.experience import CUT, TURN_REWARD

_ADAPTED = {"kl_coef": "kl_target", "entropy_coef": "entropy_target"}
"""Keys of [algorithm] that can be adapted -> key of the target."""


def check_parts(algorithm: Algorithm, scored: Batch) -> None:
    """Raise RewardError if the estimator needs a part that the reward does not return."""
    parts = {name for name in scored.rows if name.startswith("part/")}
    wanted = algorithm.parts - parts
    if wanted and not np.isnan(scored["reward"]).all():
        have = ", ".join(sorted(name.removeprefix("part/") for name in parts)) or "none"
        raise RewardError(
            f"algorithm.advantage={algorithm.keys.advantage} wants the part {min(wanted).removeprefix('part/')!r} of "
            f"the reward, which returns these parts: {have}",
            key=min(wanted),
        )


def check_turn_rewards(algorithm: Algorithm, scored: Batch) -> None:
    """Raise RecipeError if turns have rewards of their own and the estimator reads none."""
    if not algorithm.estimator.reads_reward and scored[TURN_REWARD].any():
        raise RecipeError(
            f"the environment rewards turns, which algorithm.advantage={algorithm.keys.advantage} never reads; use "
            "grpo_process, gae or another estimator of rewards",
            key="algorithm.advantage.turn_rewards",
        )


def overlong(batch: Batch, how: AlgorithmConfig, most: int) -> Batch:
    """Apply the soft overlong punishment (DAPO 2503.14476, eq. 13).

    Over the last share ``overlong_buffer`` of ``most`` tokens the reward falls linearly by ``overlong_penalty``.
    """
    if not how.overlong_buffer:
        return batch
    buffer = max(how.overlong_buffer * most, 1.0)
    excess = np.clip((batch["completion"] - (most - buffer)) / buffer, 0.0, 1.0)
    return batch.with_rows(reward=(batch["reward"] - how.overlong_penalty * excess).astype(np.float32))


def mask_truncated(batch: Batch, how: AlgorithmConfig) -> Batch:
    """Drop cut completions from loss and denominators (overlong filtering); group statistics include them."""
    return batch.select(batch["finish"] != CUT) if how.overlong_filter else batch


def current(how: AlgorithmConfig, weights: Mapping[str, float]) -> dict[str, float]:
    """Return key of [algorithm] -> current value, for adapted weights.

    An adapted entropy bonus is in the loss only if the entropy of the previous step was at most its target.
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
    """Return the state of adapted weights after a step: key -> value, the recipe's initial values, and the entropy.

    weights: the state before; updates: metrics of the step's updates.
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
    """Return the values that are still valid: a weight starts again if its target or initial value has changed."""
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
