"""One denominator for the whole batch: how token losses of micro-batches become shares that add up, and the check."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

import tilth.rl as rl
from tilth.core.batch import Ragged
from tilth.core.errors import TokenCountError
from tilth.training.noise import WEIGHT
from tilth.training.packed import Micro

WEIGHT_TOLERANCE = 1e-5
"""Relative; above the rounding of float32 sums (tokens that are lost one by one are counted by the engine)."""


@dataclass(frozen=True)
class Shares:
    """A recipe's aggregation, bound to one batch. whole: the weight that all tokens of the batch have together."""

    aggregation: str
    denominator: float
    options: dict[str, Any]
    whole: float

    @classmethod
    def of(cls, aggregation: str, mask: np.ndarray, tokens: Ragged, norm_length: int) -> "Shares":
        """mask: [N] over all tokens of the batch; norm_length: fixed length of Dr.GRPO's aggregation."""
        batch: dict[str, Any] = {
            "mask": torch.from_numpy(np.ascontiguousarray(mask)),
            "lengths": torch.from_numpy(np.ascontiguousarray(tokens.lengths)),
        }
        takes_length = "norm_length" in rl.options("aggregations", aggregation)
        options: dict[str, Any] = {"norm_length": norm_length} if takes_length else {}
        denominator = rl.denominator(aggregation, **batch, **options)
        ones = torch.ones(len(mask))
        whole = rl.aggregate(aggregation, ones, denominator=denominator, **batch, **options) if len(mask) else 0.0
        return cls(aggregation, denominator, options, float(whole))

    def add_up(self, values: Tensor, micro: Micro) -> Tensor:
        """Share of a micro-batch's token values [N] in the whole batch's one number."""
        return rl.aggregate(
            self.aggregation,
            values,
            mask=micro.mask,
            lengths=micro.lengths,
            denominator=self.denominator,
            **self.options,
        )

    def weight(self, micro: Micro) -> dict[str, rl.Metric]:
        """What this micro-batch weighs in the loss; ``check_weight`` wants the sum of them to be ``whole``."""
        ones = torch.ones(len(micro.ids), device=micro.ids.device)
        return {WEIGHT: rl.Metric(float(self.add_up(ones, micro)), 1, "sum")}


def check_weight(metrics: dict[str, rl.Metric], expected: float) -> None:
    """Raise TokenCountError unless the micro-batches' shares of the loss add up to the whole; takes the metric out."""
    found = float(metrics.pop(WEIGHT).total) if WEIGHT in metrics else 0.0
    if abs(found - expected) > WEIGHT_TOLERANCE * max(abs(expected), 1.0):
        raise TokenCountError(
            f"the micro-batches weigh {found:.6g} in the loss, their whole batch {expected:.6g}: "
            "some tokens count twice or not at all, or a part was divided by its own denominator"
        )
