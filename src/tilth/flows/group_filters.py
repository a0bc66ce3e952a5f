"""Select samples to learn from: functions from the rows of a batch to a boolean mask or to fewer rows."""

from collections.abc import Callable, Sequence

import numpy as np

from tilth.config.schema import Recipe
from tilth.core.batch import Batch
from tilth.rl.algorithm import Algorithm
from tilth.roles.experience import is_right, outcome

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
