"""Choose samples to learn from, check and shape rewards, adapt loss weights: functions of rows and metrics."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

import tilth.rl as rl
from tilth.config.schema import AlgorithmConfig, Recipe
from tilth.core.batch import Batch
from tilth.core.errors import RecipeError, RewardError
from tilth.rl.algorithm import Algorithm
from tilth.roles.experience import CUT, TURN_REWARD, is_right, outcome

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


# ---- which groups to learn from ----

Keep = Callable[[Batch], np.ndarray]
"""Maps a batch to bool [n]: the rows to learn from."""

LEAST = 1 / 8
"""Lower bound of the estimated share of kept prompts, which bounds the size of a round."""


def has_spread(batch: Batch) -> np.ndarray:
    """Return bool [n]: rows of groups whose rewards differ; flat groups have no gradient under a group baseline."""
    return _spread(batch["group"], batch["reward"])


def is_mixed(batch: Batch) -> np.ndarray:
    """Return bool [n]: rows of groups neither all right nor all wrong (DAPO's dynamic sampling, 2503.14476 eq. 11).

    It uses outcomes, since shaped rewards differ between right answers of different lengths.
    """
    return _spread(batch["group"], outcome(batch))


def group_filter(recipe: Recipe, algorithm: Algorithm) -> Keep | None:
    """Return the recipe's filter: mixed groups (dynamic sampling), groups with a gradient, or None for all."""
    if recipe.algorithm.refill:
        return is_mixed
    if not algorithm.drops_flat:
        return None
    return can_differ(recipe.judge.penalty) if recipe.flow_spec.judge else has_spread


def can_differ(coefficient: float) -> Keep:
    """Return a filter for groups whose rewards differ, or can differ after the judge's penalty on right answers."""
    if not coefficient:
        return has_spread

    def keep(batch: Batch) -> np.ndarray:
        _, group, counts = np.unique(batch["group"], return_inverse=True, return_counts=True)
        right = np.bincount(group, weights=is_right(batch), minlength=len(counts))
        return has_spread(batch) | ((right > 0) & (counts > 1))[group]

    return keep


def _spread(groups: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return bool [n]: rows of groups in which two values differ; NaN is ignored."""
    _, group = np.unique(groups, return_inverse=True)
    low = np.full(group.max(initial=-1) + 1, np.inf)
    high = -low
    np.fmin.at(low, group, values)
    np.fmax.at(high, group, values)
    return (high > low)[group]


def first_groups(batch: Batch, most: int) -> Batch:
    """Return the rows of the first ``most`` groups in the order they were drawn, regardless of their lengths."""
    first = np.unique(batch["group"])[:most]
    return batch.select(np.isin(batch["group"], first))


def missing_prompts(wanted: int, sampled: Sequence[Batch], kept: Sequence[Batch]) -> int:
    """Return how many prompts to sample next, at most ``wanted``, to keep about ``wanted``; 0 if enough are kept."""
    asked, have = (sum(len(np.unique(batch["group"])) for batch in some) for some in (sampled, kept))
    if have >= wanted:
        return 0
    return min(wanted, int(np.ceil((wanted - have) / max(have / max(asked, 1), LEAST))))
