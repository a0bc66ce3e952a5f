"""Aggregate token losses into one number: sum over rows of weight * sum of the row's tokens, over one denominator.

The denominator is that of the whole global batch, so the parts of any split into micro-batches and workers add up.
"""

from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from tilth.core.errors import TokenCountError
from tilth.rl.packing import Packing
from tilth.rl.registry import Entry, build, register


class Aggregation(Entry):
    """A way to aggregate. ``counts`` is int64 [n]: the tokens that count in each row."""

    def denominator(self, counts: Tensor) -> float:
        """Return the denominator of a global batch with these counts; at least 1, so that an empty batch has loss 0."""
        raise NotImplementedError

    def row_weights(self, counts: Tensor) -> Tensor | None:
        """Return the weight of each row's sum [n] before the division; None: 1."""
        return None


def _rows(counts: Tensor) -> float:
    """Count the rows with at least one token that counts; fully masked rows leave the mean."""
    return float(max(int((counts > 0).sum()), 1))


@register("aggregations", "token-mean")
class TokenMean(Aggregation):
    """Sum over all tokens / tokens (DAPO): every token weighs the same."""

    def denominator(self, counts: Tensor) -> float:
        return float(max(int(counts.sum()), 1))


@register("aggregations", "token-sum")
class TokenSum(Aggregation):
    """Sum over all tokens."""

    def denominator(self, counts: Tensor) -> float:
        return 1.0


@register("aggregations", "seq-mean-token-sum")
class SeqMeanTokenSum(Aggregation):
    """Mean over sequences of the sum over tokens."""

    def denominator(self, counts: Tensor) -> float:
        return _rows(counts)


@register("aggregations", "seq-mean-token-mean")
class SeqMeanTokenMean(SeqMeanTokenSum):
    """Mean over sequences of the mean over tokens (GRPO): every sequence weighs the same."""

    def row_weights(self, counts: Tensor) -> Tensor:
        return 1.0 / counts.clamp(min=1).to(torch.float64)


@register("aggregations", "seq-mean-token-sum-norm")
class SeqMeanTokenSumNorm(Aggregation):
    """seq-mean-token-sum over a fixed length (Dr.GRPO).

    Without ``norm_length`` the longest row of the global batch is taken, and the scale then differs from step to step.
    """

    norm_length: int | None = Field(None, gt=0, description="the fixed length, usually the longest completion allowed")

    def denominator(self, counts: Tensor) -> float:
        longest = self.norm_length or max(int(counts.max()) if len(counts) else 1, 1)
        return _rows(counts) * longest


def row_denominator(aggregation: str | Aggregation, counts: Tensor, **options: Any) -> float:
    """Return the global denominator from rows alone. counts: integers [n], tokens that count (0: masked out)."""
    return build("aggregations", aggregation, options, Aggregation).denominator(torch.as_tensor(counts))


def denominator(aggregation: str | Aggregation, mask: Tensor, lengths: Tensor, **options: Any) -> float:
    """Return the global denominator of a batch, which ``policy_loss`` and ``aggregate`` take for each of its
    micro-batches.

    mask: [total]; lengths: [n]; options: of the aggregation (``norm_length``).
    """
    return row_denominator(aggregation, Packing.of(lengths, mask).counts, **options)


def aggregate(
    name: str | Aggregation,
    values: Tensor,
    *,
    mask: Tensor,
    lengths: Tensor,
    denominator: float | None = None,
    **options: Any,
) -> Tensor:
    """Reduce token values [total] to one number, differentiable. Values at masked positions have no effect.

    denominator: of the global batch (``tilth.rl.denominator``); None: this call sees the whole batch.
    """
    packing = Packing.of(lengths, mask)
    entry = build("aggregations", name, options, Aggregation)
    return reduce_tokens(entry, packing.column("values", values), packing, denominator)


def reduce_tokens(entry: Aggregation, values: Tensor, packing: Packing, denominator: float | None) -> Tensor:
    """Apply a built aggregation to values [total] of a packing; see ``aggregate``."""
    denominator = entry.denominator(packing.counts) if denominator is None else float(denominator)
    if not denominator > 0:
        raise TokenCountError(f"the denominator of a loss must be positive, got {denominator}", key="denominator")
    weights = entry.row_weights(packing.counts)
    values = packing.masked(values)
    return (values if weights is None else values * packing.spread(weights).to(values.dtype)).sum() / denominator
