"""One denominator for the whole batch: how token losses of micro-batches become shares that add up, and the check."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

import tilth.rl as rl
from tilth.config.axes import DATA
from tilth.core.batch import Jagged
from tilth.core.errors import TokenCountError
from tilth.parallel.dims import ParallelDims
from tilth.rl.aggregation import Aggregation
from tilth.training.engine import UpdateResult
from tilth.training.noise import WEIGHT
from tilth.training.packed import MicroBatch

WEIGHT_TOLERANCE = 1e-5
"""Relative; above the rounding of float32 sums (tokens that are lost one by one are counted by the engine)."""


Gather = Callable[[np.ndarray], np.ndarray]
"""From numbers of one's own rows [n] to those of the rows of all workers [whole], in any order."""


def alone(numbers: np.ndarray) -> np.ndarray:
    """Return the numbers of one worker that has all rows."""
    return numbers


@dataclass(frozen=True)
class GlobalDenominator:
    """A recipe's aggregation, bound to one batch. whole: the weight that all tokens of the batch have together."""

    aggregation: Aggregation
    denominator: float
    whole: float

    def add_up(self, values: Tensor, micro: MicroBatch) -> Tensor:
        """Share of a micro-batch's token values [N] in the whole batch's one number."""
        return rl.aggregate(
            self.aggregation,
            values,
            mask=micro.mask,
            lengths=micro.lengths,
            denominator=self.denominator,
        )

    def weight(self, micro: MicroBatch) -> dict[str, rl.Metric]:
        """What this micro-batch weighs in the loss; ``check_weight`` wants the sum of them to be ``whole``."""
        ones = torch.ones(len(micro.ids), device=micro.ids.device)
        return {WEIGHT: rl.Metric(float(self.add_up(ones, micro)), 1, "sum")}


def global_denominator(
    aggregation: Aggregation, mask: np.ndarray, tokens: Jagged, gather: Gather = alone
) -> GlobalDenominator:
    """Count the tokens of the whole batch; on several workers a collective call. mask: [N] over this worker's rows."""
    lengths = torch.from_numpy(np.ascontiguousarray(tokens.lengths))
    own = rl.token_counts(torch.from_numpy(np.ascontiguousarray(mask)), lengths)
    counts = torch.from_numpy(gather(own.numpy()))
    denominator = rl.row_denominator(aggregation, counts)
    ones = torch.ones(int(counts.sum()))
    whole = (
        rl.aggregate(aggregation, ones, mask=ones, lengths=counts[counts > 0], denominator=denominator)
        if len(ones)
        else 0.0
    )
    return GlobalDenominator(aggregation, denominator, float(whole))


def gather_data_ranks(grid: ParallelDims) -> Gather:
    """Return what gathers numbers of rows from all data-parallel ranks; those that divide a row's tokens add up."""
    return lambda own: grid.gather_rows({"numbers": grid.sum(torch.from_numpy(own), "tokens").numpy()})["numbers"]


def is_first_data_rank(grid: ParallelDims) -> bool:
    """True on the first data-parallel rank, which reports values that all ranks share."""
    return grid.first(*DATA)


def account(found: UpdateResult, grid: ParallelDims) -> dict[str, rl.Metric]:
    """What one optimizer step of a model that learns reports, whatever its loss was; without the loss's value."""
    padded = {"micro_batches/padded": rl.Metric(found.padded, 1, "sum")} if found.padded else {}
    return (
        found.metrics
        | padded
        | {
            "grad_norm": rl.Metric(found.grad_norm, 1, "mean"),
            "lr": rl.Metric(found.lr, 1, "mean"),
            "tokens/trained": rl.Metric(found.tokens, 1, "sum"),
            "steps/skipped": rl.Metric(float(found.skipped and is_first_data_rank(grid)), 1, "sum"),
        }
    )


def check_weight(metrics: dict[str, rl.Metric], expected: float, grid: ParallelDims) -> None:
    """Raise TokenCountError unless all micro-batches of all ranks weigh together what the whole batch does.

    Takes the metric out. Every data-parallel rank must ask.
    """
    own = float(metrics.pop(WEIGHT).total) if WEIGHT in metrics else 0.0
    (found,) = grid.sum(torch.tensor([own], dtype=torch.float64)).tolist()
    if abs(found - expected) > WEIGHT_TOLERANCE * max(abs(expected), 1.0):
        raise TokenCountError(
            f"the micro-batches weigh {found:.6g} in the loss, their whole batch {expected:.6g}: "
            "some tokens count twice or not at all, or a part was divided by its own denominator",
            key=WEIGHT,
        )
