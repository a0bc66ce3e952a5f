"""Advantages of whole answers, relative to the other answers to the same prompt: one number a row, scope "rows"."""

from typing import ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from tilth.core.errors import RecipeError
from tilth.rl.advantage_base import RowAdvantage, Rows
from tilth.rl.packing import Groups, whiten_rows
from tilth.rl.registry import register

Std = Literal["unbiased", "biased"]
"""Which standard deviation: over n - 1 (verl, slime, TRL) or over n rewards; they differ by sqrt(n / (n - 1))."""
_STD = "standard deviation of a group: over n - 1 rewards (unbiased) or over n (biased)"
_EPS = "added to the standard deviation"


class _Grouped(RowAdvantage):
    singleton: Literal["reward", "zero"] = Field(
        "reward",
        description="what a group with a single reward gets: the reward, as if its baseline were 0 (verl), or zero",
    )

    flat_teaches: ClassVar[bool] = False

    @property
    def needs(self) -> tuple[str, ...]:
        """Rewards and groups."""
        return ("rewards", "groups")

    def rows(self, rows: Rows) -> Tensor:
        """Advantage of each row; groups of one apart."""
        return self.grouped(rows.groups)

    def grouped(self, groups: Groups) -> Tensor:
        """The same of numbers of which each row has one."""
        single = self.single(groups.scores) if self.singleton == "reward" else torch.zeros_like(groups.scores)
        return torch.where(groups.size > 1, self.relative(groups), single)

    def relative(self, groups: Groups) -> Tensor:
        """Advantage in a group of at least two: score - mean, unless an estimator says otherwise."""
        return groups.centred

    def single(self, scores: Tensor) -> Tensor:
        """Advantage in a group of one."""
        return scores


@register("advantages", "grpo")
class Grpo(_Grouped):
    """Group-relative (DeepSeekMath): (score - mean) / (std + eps) in the group, the row itself included.

    Exactly 0 where all scores are equal. A group of one counts as mean 0 and std 1: score / (1 + eps), as in verl.
    """

    eps: float = Field(1e-6, ge=0, description=_EPS)
    std: Std = Field("unbiased", description=_STD)

    relative_to_spread: ClassVar[bool] = True

    def relative(self, groups: Groups) -> Tensor:
        """Standardised score."""
        return torch.where(groups.flat, 0.0, groups.centred / (groups.deviation(self.std == "biased") + self.eps))

    def single(self, scores: Tensor) -> Tensor:
        """Mean 0, std 1."""
        return scores / (1 + self.eps)


@register("advantages", "grpo_no_std")
class GrpoNoStd(_Grouped):
    """Dr.GRPO's advantage: score - mean of the group. Published with the aggregation seq-mean-token-sum-norm."""


@register("advantages", "rloo")
class Rloo(_Grouped):
    """Leave-one-out (Ahmadian 2024): score - mean of the others in the group = n / (n - 1) * (score - mean).

    verl's ``rloo`` keeps the score of a group of one, its ``rloo_vectorized`` makes it 0: option ``singleton``.
    """

    def relative(self, groups: Groups) -> Tensor:
        """Score minus the mean of the others."""
        return groups.centred * groups.size / (groups.size - 1).clamp(min=1)


@register("advantages", "reinforce_pp_baseline")
class ReinforcePPBaseline(_Grouped):
    """REINFORCE++ with a group baseline (arXiv 2501.03262): score - mean of the group, then whitened over the batch.

    Mean and unbiased variance are over all tokens that count in the global batch, so a row weighs by its tokens. Where
    whitening has nothing to tell apart (all rows equal), advantages are exactly 0. Published with a k2 penalty in the
    loss.
    """

    weighs: ClassVar[bool] = True
    flat_teaches: ClassVar[bool] = True  # whitening moves its zeros by the mean over the batch's tokens

    def rows(self, rows: Rows) -> Tensor:
        """Whitened."""
        return whiten_rows(super().rows(rows), rows.weights)


@register("advantages", "opo")
class Opo(_Grouped):
    """On-policy with the optimal baseline (arXiv 2505.23585): score - sum(l * score) / sum(l) in the group.

    l: tokens of each row that count. Exactly 0 where all scores are equal. A group of one keeps its score (verl).
    """

    weighs: ClassVar[bool] = True

    def rows(self, rows: Rows) -> Tensor:
        """Score minus the length-weighted mean of its group."""
        groups, weights = rows.groups, rows.weights
        baseline = groups.sum(weights * rows.scores) / groups.sum(weights).clamp(min=1)
        single = rows.scores if self.singleton == "reward" else torch.zeros_like(rows.scores)
        return torch.where(groups.size > 1, torch.where(groups.flat, 0.0, rows.scores - baseline), single)


@register("advantages", "gpg")
class GpgAdvantage(_Grouped):
    """Group policy gradient (arXiv 2504.02546): alpha * (score - mean) / norm.

    alpha makes up for samples that teach nothing: rows of the batch / rows that count. The paper counts the rows of
    groups whose rewards differ (``count = "spread"``); verl, which the default follows, counts rewards that are not 0
    (``count = "nonzero"``). Both are of the global batch, over rows with a reward.
    """

    count: Literal["nonzero", "spread"] = Field(
        "nonzero",
        description="rows that alpha divides by: with a reward other than 0 (verl), or in groups with spread (paper)",
    )
    norm: float = Field(1.0, gt=0, description="constant that advantages are divided by (F_norm)")

    relative_to_spread: ClassVar[bool] = True  # alpha counts rows by whether rewards differ, not by how much

    def rows(self, rows: Rows) -> Tensor:
        """Scaled to the share of rows that teach."""
        counted = rows.valid & (rows.scores != 0 if self.count == "nonzero" else ~rows.groups.flat)
        alpha = rows.valid.sum().to(rows.scores) / counted.sum().clamp(min=1)
        return alpha * super().rows(rows) / self.norm


@register("advantages", "grpo_passk")
class GrpoPassk(RowAdvantage):
    """Pass@k (arXiv 2503.19595): only the best of a group gets anything, (best - second best) / (std + eps).

    Where two are best it is 0, so no order of rows matters. A group of one (verl raises an error) has no second best
    and gets 0: members can go missing in a run, and groups need not be of equal size.
    """

    eps: float = Field(1e-6, ge=0, description=_EPS)
    std: Literal["unbiased", "biased", "none"] = Field("unbiased", description=f"{_STD}; none: not divided")

    needs: ClassVar[tuple[str, ...]] = ("rewards", "groups")
    flat_teaches: ClassVar[bool] = False

    @property
    def relative_to_spread(self) -> bool:
        """Over the group's standard deviation, if over any."""
        return self.std != "none"

    def rows(self, rows: Rows) -> Tensor:
        """How far the best is above the rest of its group."""
        groups = rows.groups
        is_best = rows.scores == groups.greatest(rows.scores)
        ahead = rows.scores - groups.greatest(torch.where(is_best, -torch.inf, rows.scores))
        alone = is_best & (groups.sum(is_best.to(rows.scores)) == 1) & (groups.size > 1)
        if self.std != "none":
            ahead = ahead / (groups.deviation(self.std == "biased") + self.eps)
        return torch.where(alone, ahead, 0.0)


@register("advantages", "gdpo")
class Gdpo(Grpo):
    """Decoupled normalisation of several rewards (arXiv 2601.05242): GRPO of each part, weighted sum, then whitened.

    Whitening is that of ``reinforce_pp_baseline``. A row that lacks a part, or the reward, is missing. Without ``keys``
    the reward itself is the only part (verl's fallback).
    """

    keys: tuple[str, ...] = Field((), description="parts of the reward, such as correct and format; empty: the reward")
    weights: tuple[float, ...] = Field((), description="weight of each of them; empty: 1")

    @model_validator(mode="after")
    def _pairs(self) -> "Gdpo":
        twice = [key for i, key in enumerate(self.keys) if key in self.keys[:i]]
        if twice:
            raise RecipeError(f"gdpo: keys has {twice[0]!r} twice; each part once, with a weight", key="gdpo.keys")
        if self.weights and len(self.weights) != max(len(self.keys), 1):
            parts = ", ".join(self.keys) or "the reward itself"
            raise RecipeError(
                f"gdpo: weights = {list(self.weights)}: there must be one for each part ({parts}), or none",
                key="gdpo.weights",
            )
        return self

    @property
    def needs(self) -> tuple[str, ...]:
        """Rewards, groups and a column ``part/KEY`` for each key."""
        return ("rewards", "groups", *self.finite)

    @property
    def finite(self) -> tuple[str, ...]:
        """Every part."""
        return tuple(f"part/{key}" for key in self.keys)

    weighs: ClassVar[bool] = True
    flat_teaches: ClassVar[bool] = True  # parts may differ where their sum does not

    @property
    def reads_reward(self) -> bool:
        """The parts alone, where any are named."""
        return not self.keys

    def rows(self, rows: Rows) -> Tensor:
        """Each part relative to its group, then all of them together."""
        parts = [torch.where(rows.valid, rows.columns[c].to(rows.scores), 0.0) for c in self.finite] or [rows.scores]
        total = torch.zeros_like(rows.scores)
        for part, weight in zip(parts, self.weights or (1.0,) * len(parts)):
            total = total + weight * self.grouped(rows.grouped(part))
        return whiten_rows(total, rows.weights)
