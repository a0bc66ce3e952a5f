"""Learning-rate schedules as pure functions of the step."""

import math
from typing import Literal

Kind = Literal["constant", "linear", "cosine", "wsd"]
DECAY_SHARE = 0.2
"""Share of all steps in which 'wsd' (warm-up, stable, decay; arXiv 2404.06395) falls linearly to zero."""


def lr_factor(kind: Kind, step: int, total: int, warmup: int) -> float:
    """Factor on the peak learning rate for step 0 .. total - 1.

    The first ``warmup`` steps rise linearly to 1 (step 0 is 1 / warmup, never 0); then 'constant' stays, 'linear' and
    'cosine' fall to 0 just after the last step, 'wsd' stays and falls linearly over the last fifth of all steps.
    """
    if step < warmup:
        return (step + 1) / warmup
    left = (total - step) / max(total - warmup, 1)
    if kind == "linear":
        return max(left, 0.0)
    if kind == "cosine":
        return 0.5 * (1 + math.cos(math.pi * (1 - max(left, 0.0))))
    if kind == "wsd":
        return min(1.0, max((total - step) / max(DECAY_SHARE * total, 1), 0.0))
    return 1.0
