"""Packed columns: many sequences in one 1-D tensor, and the sums, broadcasts and scans over them.

Sums run row by row in a fixed order (``segment_reduce``), so a row's sum has the same bits wherever the row lies.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from tilth.core.device import to_device
from tilth.core.errors import TokenCountError

Reduce = Callable[[Tensor], Tensor]
"""Sum of a float64 vector over all workers (an all-reduce); the identity where one process sees everything."""


Columns = Mapping[str, np.ndarray]
Gather = Callable[[Columns], Columns]
"""Concatenates row columns [n] of every worker to [N]."""


def rows_alone(columns: Columns) -> Columns:
    """The ``Gather`` of a single process."""
    return columns


def alone(vector: Tensor) -> Tensor:
    """The ``Reduce`` of a single process."""
    return vector


@dataclass(frozen=True)
class Packing:
    """Layout of n sequences in one packed column. lengths: int64 [n]; mask: bool [total], tokens that count."""

    lengths: Tensor
    mask: Tensor

    @classmethod
    def of(cls, lengths: Tensor, mask: Tensor) -> "Packing":
        """Check and convert: lengths any integers [n], mask anything that is not 0 where the token counts [total]."""
        mask = torch.as_tensor(mask)
        lengths = torch.as_tensor(lengths).to(torch.int64)
        if lengths.numel() and int(lengths.min()) < 0:
            raise TokenCountError(f"lengths has {int(lengths.min())}; every length must be at least 0", key="lengths")
        total = int(lengths.sum())
        if mask.dim() != 1 or lengths.dim() != 1 or total != len(mask):
            raise TokenCountError(
                f"lengths add up to {total} tokens, but mask has the shape {tuple(mask.shape)}", key="mask.shape"
            )
        lengths = lengths if lengths.device == mask.device else to_device([lengths.cpu().numpy()], mask.device)[0]
        return cls(lengths, mask if mask.dtype == torch.bool else mask != 0)

    def column(self, name: str, values: Tensor) -> Tensor:
        """Check that a column has one value for each token; TokenCountError names it."""
        values = torch.as_tensor(values).to(self.mask.device)
        if values.shape != self.mask.shape:
            raise TokenCountError(
                f"{name} has the shape {tuple(values.shape)}, but there are {len(self.mask)} tokens",
                key=f"{name}.shape",
            )
        return values

    @cached_property
    def counts(self) -> Tensor:
        """Tokens that count in each row, int64 [n]."""
        return segment_sum(self.mask.to(torch.float64), self.lengths).to(torch.int64)

    @cached_property
    def ends(self) -> Tensor:
        """Index of the last token that counts in each row, int64 [n]; -1 if there is none."""
        return self._extreme(-1, "amax")

    @cached_property
    def firsts(self) -> Tensor:
        """Index of the first token that counts in each row, int64 [n]; the number of all tokens if there is none."""
        return self._extreme(len(self.mask), "amin")

    def _extreme(self, none: int, reduce: str) -> Tensor:
        device = self.mask.device
        position = torch.where(self.mask, torch.arange(len(self.mask), device=device), none)
        rows = self.spread(torch.arange(len(self.lengths), device=device))
        return torch.full_like(self.lengths, none).scatter_reduce(0, rows, position, reduce)

    def spread(self, rows: Tensor) -> Tensor:
        """Repeat one value for each row [n] at each of its tokens [total]."""
        return torch.repeat_interleave(rows, self.lengths, output_size=len(self.mask))

    def masked(self, values: Tensor) -> Tensor:
        """Return values where the mask is 1, and 0 (never NaN * 0) elsewhere."""
        return torch.where(self.mask, values, values.new_zeros(()))

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum of a column [total] over the tokens that count in each row [n]; has a gradient."""
        return segment_sum(self.masked(values), self.lengths)

    def keep(self, rows: Tensor) -> "Packing":
        """Mask the tokens of rows that are not kept. rows: bool [n]."""
        return Packing(self.lengths, self.mask & self.spread(rows))


def segment_sum(values: Tensor, lengths: Tensor) -> Tensor:
    """Return sums of consecutive segments of values [total] with these lengths: [n]; each adds from first to last."""
    return torch.segment_reduce(values, "sum", lengths=lengths, axis=0, unsafe=True)


def token_counts(mask: Tensor, lengths: Tensor) -> Tensor:
    """Return the tokens that count in each sequence: int64 [n]."""
    return Packing.of(lengths, mask).counts


def keep_rows(mask: Tensor, lengths: Tensor, rows: Tensor) -> Tensor:
    """Return the mask, bool [total], without the tokens of sequences where ``rows`` (bool [n]) is False."""
    packing = Packing.of(lengths, mask)
    return packing.keep(torch.as_tensor(rows).to(packing.mask.device, torch.bool)).mask


def discounted_sums(values: Tensor, lengths: Tensor, factor: float | Tensor) -> Tensor:
    """Return ``y[t] = values[t] + factor * y[t + 1]`` within each row, by doubling: log2(longest row) passes.

    values: [total]; lengths: int64 [n]; factor: one number, or one a token [total] that is constant within a row.
    """
    total = len(values)
    ends = torch.repeat_interleave(lengths.cumsum(0), lengths, output_size=total)
    behind = ends - torch.arange(total, device=values.device)
    step, longest = 1, int(lengths.max()) if len(lengths) else 0
    while step < longest:
        shifted = torch.nn.functional.pad(values[step:], (0, step))
        values = values + torch.where(behind > step, factor**step * shifted, values.new_zeros(()))
        step *= 2
    return values


def whiten(values: Tensor, reduce: Reduce = alone) -> Tensor:
    """Return values [k], float64, minus their mean, over the root of their unbiased variance + 1e-8.

    Mean and variance are over all workers' values. A single value stays as it is. All workers must call this, also with
    no values.
    """
    count, total = reduce(torch.stack([values.new_tensor(float(len(values))), values.sum()]))
    if count < 2:
        return values
    centred = values - total / count
    (squares,) = reduce((centred * centred).sum().reshape(1))
    return centred / torch.sqrt(squares / (count - 1) + 1e-8)


def whiten_rows(values: Tensor, weights: Tensor) -> Tensor:
    """Whiten as ``whiten`` would if all ``weights[i]`` tokens of row i had the value ``values[i]``: [n].

    Float64, rows of the whole batch. Rows of weight 0 have no effect. Exactly 0 where all values are equal; a single
    token stays as it is. Sums run in the order of the numbers, so the order of rows does not change a bit.
    """
    order = torch.argsort(weights, stable=True)
    order = order[torch.argsort(values[order], stable=True)]
    count = weights.sum()  # of integers, so exact
    if count < 2:
        return values
    some = values[weights > 0]
    if some.max() <= some.min():
        return torch.zeros_like(values)
    centred = values - _in_order(weights * values, order) / count
    return centred / torch.sqrt(_in_order(weights * centred**2, order) / (count - 1) + 1e-8)


def _in_order(values: Tensor, order: Tensor) -> Tensor:
    """Return the sum of all values [n], added one after another."""
    whole = torch.full((1,), len(order), dtype=torch.int64, device=order.device)
    return segment_sum(values[order], whole)[0]


@dataclass(frozen=True)
class Groups:
    """Statistics of rows within their group, over rows with a reward. All results are one value a row, [n].

    Sums run in the order (group, score, count), so they have the same bits whatever the order of rows or the names of
    groups.
    """

    index: Tensor
    order: Tensor
    scores: Tensor
    valid: Tensor

    @classmethod
    def of(cls, ids: Tensor, scores: Tensor, valid: Tensor, counts: Tensor | None = None) -> "Groups":
        """ids: any integers [n]; scores: float64 [n]; valid: bool [n], False where the reward is missing.

        counts: [n], a second number of each row that sums may contain.
        """
        _, index = torch.unique(ids.to(scores.device), return_inverse=True)
        order = (
            torch.arange(len(scores), device=scores.device) if counts is None else torch.argsort(counts, stable=True)
        )
        order = order[torch.argsort(scores[order], stable=True)]
        return cls(index, order[torch.argsort(index[order], stable=True)], scores, valid)

    @cached_property
    def _rows(self) -> Tensor:
        return torch.bincount(self.index)

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum of a row value [n] over the valid rows of each row's group."""
        values = torch.where(self.valid, values, values.new_zeros(()))
        return segment_sum(values[self.order], self._rows)[self.index]

    @cached_property
    def size(self) -> Tensor:
        """Rows with a reward in each row's group, float64, at least 1 (so that it can divide)."""
        return self.sum(torch.ones_like(self.scores)).clamp(min=1)

    @cached_property
    def centred(self) -> Tensor:
        """Score minus the group's mean; exactly 0 where all scores of the group are equal."""
        return torch.where(self.flat, 0.0, self.scores - self.sum(self.scores) / self.size)

    def deviation(self, biased: bool) -> Tensor:
        """Standard deviation of the group, over its size or (unbiased) over one less; 0 for a group of one."""
        return torch.sqrt(self.sum(self.centred**2) / (self.size if biased else (self.size - 1).clamp(min=1)))

    @cached_property
    def flat(self) -> Tensor:
        """bool: all scores of the group are equal, by greatest == least (rounding can make std of equal scores > 0)."""
        return self.greatest(self.scores) <= -self.greatest(-self.scores)

    def greatest(self, values: Tensor) -> Tensor:
        """Return the greatest value [n] of the valid rows of each row's group; -inf if there is none."""
        values = torch.where(self.valid, values, -torch.inf)
        groups = torch.full_like(self._rows, 0, dtype=values.dtype) - torch.inf
        return groups.scatter_reduce(0, self.index, values, "amax")[self.index]
