"""Losses of one worker's rows with the denominators of the whole batch, and log-probs of a batch under a model."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

import tilth.rl as rl
from tilth.config.axes import DATA
from tilth.core.batch import Batch, Jagged, Store
from tilth.core.errors import TokenCountError
from tilth.parallel.dims import ParallelDims
from tilth.parallel.sharded import ShardedModel
from tilth.plan.batch import MicroBatchLimits
from tilth.rl.aggregation import Aggregation
from tilth.rl.algorithm import Algorithm
from tilth.roles.experience import of_pass, on_rows, put_like
from tilth.training.engine import UpdateResult
from tilth.training.noise import WEIGHT
from tilth.training.packed import MicroBatch, limits_of

WEIGHT_TOLERANCE = 1e-5
"""Relative; above the rounding of float32 sums (the engine counts single tokens)."""

NOT_FINITE = "steps/not_finite"

Gather = Callable[[np.ndarray], np.ndarray]
"""Gathers numbers of this worker's rows [n] and of all others' [whole], in any order."""


def alone(numbers: np.ndarray) -> np.ndarray:
    """Return the numbers unchanged: one worker has all rows."""
    return numbers


@dataclass(frozen=True)
class GlobalDenominator:
    """Aggregation bound to one batch. whole: weight of all tokens of the batch together."""

    aggregation: Aggregation
    denominator: float
    whole: float

    def add_up(self, values: Tensor, micro: MicroBatch) -> Tensor:
        """Return the share of a micro-batch's token values [N] in the whole batch's number."""
        return rl.aggregate(
            self.aggregation, values, mask=micro.mask, lengths=micro.lengths, denominator=self.denominator
        )

    def weight(self, micro: MicroBatch) -> dict[str, rl.Metric]:
        """Return the weight of this micro-batch in the loss; ``check_weight`` requires their sum to be ``whole``."""
        ones = torch.ones(len(micro.ids), device=micro.ids.device)
        return {WEIGHT: rl.Metric(self.add_up(ones, micro).double(), 1, "sum")}


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
    """Return what gathers numbers of rows from all ranks that divide rows."""
    return lambda own: grid.gather_rows({"numbers": own})["numbers"]


def is_first_data_rank(grid: ParallelDims) -> bool:
    """True on the first data-parallel rank, which reports values that all ranks share."""
    return grid.first(*DATA)


def account(found: UpdateResult, grid: ParallelDims) -> dict[str, rl.Metric]:
    """Return the metrics of one optimizer step, without the value of the loss."""
    padded = {"micro_batches/padded": rl.Metric(found.padded, 1, "sum")} if found.padded else {}
    return (
        found.metrics
        | padded
        | count_not_finite(found, grid)
        | {
            "grad_norm": rl.Metric(found.grad_norm, 1, "mean"),
            "lr": rl.Metric(found.lr, 1, "mean"),
            "tokens/trained": rl.Metric(found.tokens, 1, "sum"),
            "steps/skipped": rl.Metric(float(found.skipped and is_first_data_rank(grid)), 1, "sum"),
        }
    )


def count_not_finite(found: UpdateResult, grid: ParallelDims) -> dict[str, rl.Metric]:
    """Return the metric of an optimizer step that was left out because it was not finite."""
    return {NOT_FINITE: rl.Metric(float(is_first_data_rank(grid)), 1, "sum")} if found.not_finite else {}


def check_weight(metrics: dict[str, rl.Metric], expected: float, grid: ParallelDims) -> None:
    """Raise TokenCountError unless the micro-batches of all ranks have the weight of the whole batch together.

    Removes the metric. Every data-parallel rank must call it.
    """
    own = float(metrics.pop(WEIGHT).total) if WEIGHT in metrics else 0.0
    (found,) = grid.sum(torch.tensor([own], dtype=torch.float64)).tolist()
    if abs(found - expected) > WEIGHT_TOLERANCE * max(abs(expected), 1.0):
        raise TokenCountError(
            f"the micro-batches weigh {found:.6g} in the loss, their whole batch {expected:.6g}: "
            "some tokens count twice or not at all, or a part was divided by its own denominator",
            key=WEIGHT,
        )


Found = TypeVar("Found")


class Scores(Protocol):
    """Model, micro-batch size and parity of a role that scores."""

    sharded: ShardedModel
    micro_tokens: int
    parity: bool

    @property
    def limits(self) -> MicroBatchLimits:
        """Limits of its micro-batches."""
        return limits_of(self.sharded, self.micro_tokens, parity=self.parity)


def forward(owner: Scores, run: Callable[..., Found], tokens: Jagged, mask: np.ndarray, **more: Any) -> Found:
    """Call one of ``training.packed.packed_*`` with the owner's model, micro-batches and parity."""
    return run(owner.sharded, tokens, mask, max_tokens=owner.micro_tokens, parity=owner.parity, **more)


def scored(
    batch: Batch, store: Store, owner: Scores, run: Callable[..., np.ndarray], *names: str, op: str, **more: Any
) -> Batch:
    """Add the results of ``forward``, float32 [N] for each of these payload columns; ``op`` names the span."""
    with on_rows(op, batch):
        columns = batch.read(store, "tokens", "mask")
        tokens = columns["tokens"]
        found = forward(owner, run, tokens, columns["mask"].values, columns=of_pass(batch, store, tokens), **more)
        for name, values in zip(names, np.atleast_2d(found)):
            batch = put_like(batch, store, name, values, tokens)
        return batch


Metrics = dict[str, rl.Metric]
RIGHT = "right"
"""Column: 1 at the tokens of right answers."""


@dataclass(frozen=True)
class Objective:
    """The policy loss of one update, called with each micro-batch.

    shared: denominator of the whole batch; thresholds: results of the loss's first pass over the whole batch;
    rights: tokens of right answers in the whole batch, 0 where their likelihood is no part of the loss.
    """

    how: Algorithm
    shared: GlobalDenominator
    thresholds: Mapping[str, float] | None = None
    rights: float = 0.0

    @classmethod
    def of(
        cls,
        how: Algorithm,
        mask: np.ndarray,
        tokens: Jagged,
        *,
        gather: Gather = alone,
        thresholds: Mapping[str, float] | None = None,
        right: np.ndarray | None = None,
    ) -> "Objective":
        """Count the tokens of the whole batch; on several workers a collective call.

        mask: [N] over this worker's rows; right: [N], 1 at the tokens of right answers, if their likelihood counts.
        """
        shared = global_denominator(how.aggregation, mask, tokens, gather)
        rights = 0.0 if right is None else max(float(gather(np.array([(right * mask).sum()])).sum()), 1.0)
        return cls(how, shared, thresholds, rights)

    def __call__(self, micro: MicroBatch) -> tuple[Tensor, Metrics]:
        """Return the micro-batch's share of the loss, and its metrics."""
        how, shared, columns = self.how, self.shared, micro.columns
        found = rl.policy_loss(
            how.loss,
            logprobs=micro.logprobs,
            old_logprobs=columns.get(how.ratio_to, micro.logprobs.detach()),
            advantages=columns["advantages"],
            mask=micro.mask,
            lengths=micro.lengths,
            ref_logprobs=columns.get("ref_logprobs"),
            rollout_logprobs=columns.get("rollout_logprobs"),
            weights=columns.get("weights"),
            uniforms=columns.get("uniforms"),
            versions=columns.get("versions"),
            thresholds=self.thresholds,
            aggregation=shared.aggregation,
            denominator=shared.denominator,
        )
        total, metrics = found.loss, found.metrics | shared.weight(micro)
        if how.keys.entropy_coef:
            total = total - how.keys.entropy_coef * shared.add_up(micro.entropy, micro)
        if self.rights:
            likelihood, nll = _likelihood(micro)
            total = total + how.keys.nll_coef * likelihood / self.rights
            metrics |= nll
        entropy = rl.Metric(micro.entropy.detach().sum().double(), micro.mask.sum().double(), "mean")
        return total, metrics | {"entropy": entropy}


def _likelihood(micro: MicroBatch) -> tuple[Tensor, Metrics]:
    """Return the sum of -log p over tokens of right answers (VAPO 2504.05118, 4.3), and its mean as a metric."""
    right = (micro.columns[RIGHT] != 0) & (micro.mask != 0)
    losses = torch.where(right, -micro.logprobs, 0.0)
    return losses.sum(), {"nll/right": rl.Metric(losses.detach().sum().double(), right.sum().double(), "mean")}
