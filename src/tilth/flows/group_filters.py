"""Which experience to learn from: functions of rows, from a batch to a boolean mask or to fewer rows."""

from collections.abc import Callable, Sequence

import numpy as np

from tilth.config.schema import Recipe
from tilth.core.batch import Batch
from tilth.rl.algorithm import Algorithm
from tilth.roles.experience import is_right, outcome

Keep = Callable[[Batch], np.ndarray]
"""From a batch to bool [n]: the rows to learn from."""

LEAST = 1 / 8
"""Share of the prompts that is thought to be kept at least, so that a round is of a bounded size."""


def has_spread(batch: Batch) -> np.ndarray:
    """bool [n]: rows of groups whose rewards are not all equal; the others have no gradient under a group baseline."""
    return _spread(batch["group"], batch["reward"])


def is_mixed(batch: Batch) -> np.ndarray:
    """bool [n]: rows of groups that are neither all right nor all wrong (DAPO's dynamic sampling, 2503.14476 eq. 11).

    By what the verifier said, never by a shaped reward: that differs between equally right answers of other lengths.
    """
    return _spread(batch["group"], outcome(batch))


def group_filter(recipe: Recipe, algorithm: Algorithm) -> Keep | None:
    """Which groups a recipe keeps: mixed ones (dynamic sampling), those with a gradient, or None: all."""
    if recipe.algorithm.refill:
        return is_mixed
    if not algorithm.drops_flat:
        return None
    return can_differ(recipe.judge.penalty) if recipe.flow_spec.judge else has_spread


def can_differ(coefficient: float) -> Keep:
    """The rows of groups whose rewards differ, or will if the judge calls some of their right answers flawed.

    So a group that is all right is not left out before it is judged, and without a penalty nothing else is.
    """
    if not coefficient:
        return has_spread

    def keep(batch: Batch) -> np.ndarray:
        _, group, counts = np.unique(batch["group"], return_inverse=True, return_counts=True)
        right = np.bincount(group, weights=is_right(batch), minlength=len(counts))
        return has_spread(batch) | ((right > 0) & (counts > 1))[group]

    return keep


def _spread(groups: np.ndarray, values: np.ndarray) -> np.ndarray:
    """bool [n]: rows of groups in which two values that are known differ; NaN is unknown."""
    _, group = np.unique(groups, return_inverse=True)
    low = np.full(group.max(initial=-1) + 1, np.inf)
    high = -low
    np.fmin.at(low, group, values)
    np.fmax.at(high, group, values)
    return (high > low)[group]


def first_groups(batch: Batch, most: int) -> Batch:
    """The rows of the first ``most`` groups, in the order in which they were drawn: whole groups, whatever their
    length."""
    first = np.unique(batch["group"])[:most]
    return batch.select(np.isin(batch["group"], first))


def missing_prompts(wanted: int, sampled: Sequence[Batch], kept: Sequence[Batch]) -> int:
    """How many prompts to sample next, so that about ``wanted`` of all are kept, by the share kept so far; at most
    ``wanted``, and 0 when there are enough."""
    asked, have = (sum(len(np.unique(batch["group"])) for batch in some) for some in (sampled, kept))
    if have >= wanted:
        return 0
    return min(wanted, int(np.ceil((wanted - have) / max(have / max(asked, 1), LEAST))))
