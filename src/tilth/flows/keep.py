"""Which experience to learn from: functions from a batch of rows to a boolean mask over its rows."""

import numpy as np

from tilth.core.batch import Batch


def has_spread(batch: Batch) -> np.ndarray:
    """bool [n]: rows of groups whose rewards are not all equal; the others have no gradient under a group baseline."""
    _, group = np.unique(batch["group"], return_inverse=True)
    low = np.full(group.max(initial=-1) + 1, np.inf)
    high = -low
    np.minimum.at(low, group, batch["reward"])
    np.maximum.at(high, group, batch["reward"])
    return (high > low)[group]
