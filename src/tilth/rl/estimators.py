"""Advantage estimators: what an estimator sees, and those over rows, over rewards to come and over log-probs.

``rl.optimal`` adds the optimal token baselines. Statistics run in float64.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from tilth.core.errors import RecipeError
from tilth.rl.packing import Gather, Groups, Packing, Reduce, discounted_sums, rows_alone, whiten, whiten_rows
from tilth.rl.registry import Entry, Scope, register

OF_TOKENS = (
    "values",
    "logprobs",
    "old_logprobs",
    "ref_logprobs",
    "rollout_logprobs",
    "sum_pi_squared",
    "versions",
    "weights",
    "uniforms",
)
"""Columns that have a value at each token; every other one has a value a row."""


@dataclass(frozen=True)
class Rows:
    """One row a sequence: scores float64 [n], 0 where missing; valid bool [n]; counts int64 [n], tokens that count."""

    scores: Tensor
    valid: Tensor
    counts: Tensor | None
    columns: Mapping[str, Tensor]

    @cached_property
    def groups(self) -> Groups:
        """Statistics of the scores within groups."""
        return self.grouped(self.scores)

    def grouped(self, scores: Tensor) -> Groups:
        """The same of other numbers, one a row."""
        return Groups.of(self.columns["groups"], scores, self.valid, self.counts)

    @cached_property
    def weights(self) -> Tensor:
        """Tokens that count in each row, float64 [n], 0 where the reward is missing; needs ``counts``."""
        assert self.counts is not None
        return torch.where(self.valid, self.counts.to(self.scores), 0.0)


@dataclass(frozen=True)
class Everyone:
    """Rows of all workers, in the order of the whole batch. own: int64 [n], which of them are this worker's."""

    rows: Rows
    own: Tensor
    worker: Tensor
    """int64 [N]: a number that each worker alone has."""


@dataclass(frozen=True)
class Tokens:
    """Packed tokens. packing: without rows whose reward is missing; rewards: float64 [total], 0 where masked."""

    rows: Rows
    packing: Packing
    rewards: Tensor
    reduce: Reduce
    gather: Gather = rows_alone
    everyone: Everyone | None = None
    """For scopes that depend on other rows, where this worker does not have all of them."""

    def chosen(self, column: str) -> Tensor:
        """A column at the tokens that count, in order, float64 [number of such tokens]."""
        return self.packing.column(column, self.rows.columns[column]).to(torch.float64)[self.packing.mask]

    def scatter(self, chosen: Tensor) -> Tensor:
        """The inverse: values of the tokens that count -> [total], 0 elsewhere."""
        return chosen.new_zeros(len(self.packing.mask)).masked_scatter(self.packing.mask, chosen)


class Advantage(Entry):
    """An estimator over tokens: advantages and returns, float64 [total], 0 at masked positions."""

    @property
    def finite(self) -> tuple[str, ...]:
        """Row columns without which a row teaches nothing: where one is not finite, the reward counts as missing."""
        return ()

    @property
    def flat_teaches(self) -> bool:
        """Whether a group of samples whose rewards are all equal may have advantages that are not 0.

        False: they are exactly 0 at every token (a group of one apart: option ``singleton``), so a flow may leave such
        groups out and draw others in their place. Where this is True, leaving them out would change what is learned.
        """
        return True

    @property
    def reads_reward(self) -> bool:
        """Whether advantages depend on the reward. Where not, what a flow adds to the reward (a KL penalty, one for
        length, a judge's) never reaches the policy; a row without a reward is left out all the same.
        """
        return True

    @property
    def relative_to_spread(self) -> bool:
        """Whether a difference between rewards counts in full however small it is.

        True where advantages are divided by the spread of rewards in the group, or by the number of rows that have one:
        in a group of equal rewards a KL penalty of 1e-3 in the reward is then as large as right and wrong elsewhere, or
        makes every row count as one that teaches.
        """
        return False

    def tokens(self, tokens: Tokens) -> tuple[Tensor, Tensor | None]:
        """Advantages and, where there are any, returns."""
        raise NotImplementedError


class RowAdvantage(Advantage):
    """An estimator that needs rows only, so that the controller can run it: one advantage for all tokens of a row."""

    @property
    def scope(self) -> Scope:
        """Rows."""
        return "rows"

    @property
    def weighs(self) -> bool:
        """Whether it needs ``Rows.counts``: rows count by their tokens."""
        return False

    def rows(self, rows: Rows) -> Tensor:
        """Advantage of each row, float64 [n]; any value where the reward is missing."""
        raise NotImplementedError

    def tokens(self, tokens: Tokens) -> tuple[Tensor, None]:
        """The same at every token of the row that counts; statistics are over the rows of all workers."""
        all_of_them = tokens.everyone
        rows = self.rows(tokens.rows) if all_of_them is None else self.rows(all_of_them.rows)[all_of_them.own]
        return tokens.packing.masked(tokens.packing.spread(rows)), None


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


_WHITEN = "shift and scale to mean 0, variance 1 over the global batch"
_EQUAL = 1e-9
"""Relative distance up to which rewards are the same: above the rounding of a float64 mean, below that of a float32."""


class _Whitened(Advantage):
    """Of rewards to come, whitened over all tokens that count in the global batch, by unbiased variance.

    Masked positions stay 0 (verl leaves the whitened running sum in them). Where the reward to come, discounted, is the
    same at every token of the global batch (with gamma 1: where all samples have the same reward), whitened advantages
    are 0, also unlike verl: nothing that happened tells one token from another then; what is left is the noise of the
    critic, and whitening would scale it to variance 1.
    """

    gamma: float = Field(1.0, ge=0, le=1, description="discount")
    whiten: bool = Field(True, description=_WHITEN)

    @property
    def scope(self) -> Scope:
        """Whitening needs the moments of the global batch."""
        return "global moments" if self.whiten else "token-local"

    def finish(self, tokens: Tokens, advantages: Tensor, returns: Tensor) -> tuple[Tensor, Tensor]:
        """Values of the tokens that count -> [total]; whitens the advantages, never the returns."""
        if self.whiten:
            flat = _flat(ahead(tokens, self.gamma), tokens.reduce)
            advantages = whiten(advantages, tokens.reduce)
            advantages = torch.zeros_like(advantages) if flat else advantages
        return tokens.scatter(advantages), tokens.scatter(returns)


class _Critic(_Whitened):
    needs: ClassVar[tuple[str, ...]] = ("rewards", "values")

    def delta(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """One-step errors r + gamma * V' - V of the tokens that count, and V; the value after the last one is 0.

        Masked tokens are taken out first: in what is left, each token's successor is the next entry of its row.
        """
        values, rewards = tokens.chosen("values"), tokens.rewards[tokens.packing.mask]
        row = tokens.packing.spread(torch.arange(len(tokens.packing.counts), device=values.device))[tokens.packing.mask]
        same = torch.nn.functional.pad(row[1:] == row[:-1], (0, 1))[: len(row)]
        following = torch.where(same, torch.roll(values, -1), 0.0)
        return rewards + self.gamma * following - values, values


@register("advantages", "gae")
class Gae(_Critic):
    """Generalised advantage estimation (Schulman 2015): sum of (gamma * lam)^k * delta, with a value at each token.

    Tokens that the policy did not choose are skipped: value and running sum pass through them, as in verl. Returns are
    advantage + value before whitening. Whitening: over all tokens that count in the global batch, by unbiased variance;
    masked positions are 0, and so is everything where the reward to come is the same at every token (all samples have
    one reward), which verl would whiten to the critic's noise at variance 1.
    """

    lam: float = Field(1.0, ge=0, le=1, description="lambda: 1 is reward-to-go minus value, 0 is one-step")

    def tokens(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """Advantages and targets of the critic, by one lambda."""
        delta, values = self.delta(tokens)
        advantages = discounted_sums(delta, tokens.packing.counts, self.gamma * self.lam)
        return self.finish(tokens, advantages, advantages + values)


@register("advantages", "vapo")
class Vapo(_Critic):
    """GAE with a lambda of its own for each row, and another for the critic (VAPO, arXiv 2504.05118).

    Policy: lambda = clamp(1 - 1 / max(alpha * l, 1), 0, 1), l the row's tokens that count, so that the coefficients add
    up to alpha * l; rows of at most 1 / alpha tokens are one-step (20 for the paper's 0.05: short tasks want a larger
    alpha). Critic: ``value_lam``; with 1 its targets are the discounted rewards to come, whatever the values are.
    The paper does not speak of whitening; it is common practice, and here as in ``gae``.
    """

    alpha: float = Field(0.05, gt=0, description="lambda is 1 - 1 / (alpha * length of the answer in tokens)")
    adaptive: bool = Field(True, description="whether lambda goes by the length; otherwise it is lam")
    lam: float = Field(0.95, ge=0, le=1, description="lambda of the policy where it is not adaptive")
    value_lam: float = Field(1.0, ge=0, le=1, description="lambda of the critic's targets")

    def tokens(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """Two sums over the same one-step errors."""
        delta, values = self.delta(tokens)
        counts = tokens.packing.counts
        advantages = discounted_sums(delta, counts, self.gamma * self._policy_lam(tokens))
        if self.value_lam == 1:
            return self.finish(tokens, advantages, ahead(tokens, self.gamma))
        return self.finish(tokens, advantages, discounted_sums(delta, counts, self.gamma * self.value_lam) + values)

    def _policy_lam(self, tokens: Tokens) -> Tensor:
        """Lambda at each token that counts, float64."""
        length = tokens.packing.spread(tokens.packing.counts)[tokens.packing.mask].to(torch.float64)
        if not self.adaptive:
            return torch.full_like(length, self.lam)
        return (1 - 1 / (self.alpha * length).clamp(min=1)).clamp(0, 1)


@register("advantages", "reinforce_pp")
class ReinforcePP(_Whitened):
    """REINFORCE++ (arXiv 2501.03262): the discounted reward to come, whitened over the tokens of the global batch.

    Rewards may be one a token, so that a KL penalty in the reward works as published (``penalise``). Tokens that the
    policy did not choose are skipped: nothing is discounted over them, as in verl. Returns are those rewards to come.
    A single token in the batch has no variance and stays as it is.
    """

    needs: ClassVar[tuple[str, ...]] = ("rewards",)

    def tokens(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """No critic."""
        returns = ahead(tokens, self.gamma)
        return self.finish(tokens, returns, returns)


@register("advantages", "remax")
class ReMax(Advantage):
    """ReMax (arXiv 2310.10505): the reward to come minus the reward of the greedy answer to the same prompt.

    ``baselines``: one a row. A row without a finite one is missing: it is in no statistic and no loss. Neither
    discounted nor whitened, as published. Returns are the rewards to come.
    """

    needs: ClassVar[tuple[str, ...]] = ("rewards", "baselines")
    finite: ClassVar[tuple[str, ...]] = ("baselines",)

    def tokens(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """Each row on its own."""
        baselines = tokens.rows.columns["baselines"].to(tokens.rewards)
        returns = ahead(tokens, 1.0)
        advantages = returns - tokens.packing.spread(baselines)[tokens.packing.mask]
        return tokens.scatter(advantages), tokens.scatter(returns)


def ahead(tokens: Tokens, gamma: float) -> Tensor:
    """Rewards to come, discounted, at each token that counts: float64."""
    return discounted_sums(tokens.rewards[tokens.packing.mask], tokens.packing.counts, gamma)


def _flat(values: Tensor, reduce: Reduce) -> bool:
    """Whether all workers' values [k] are equal, and at least two: decided by sums, so by every worker alike."""
    count, total = reduce(torch.stack([values.new_tensor(float(len(values))), values.sum()]))
    mean = total / count.clamp(min=1)
    (apart,) = reduce(((values - mean).abs() > _EQUAL * mean.abs()).sum().to(values.dtype).reshape(1))
    return bool(count > 1) and not bool(apart)


@register("advantages", "distill")
class Distill(Advantage):
    """On-policy distillation: log teacher - log student at each token that the student chose, and with ``horizon``
    above 0 the same of the tokens behind it, discounted.

    The policy gradient with the sum of all that is to come (horizon 1) is the gradient of KL(student || teacher) over
    whole answers; with 0, the default and the common practice, each token answers for itself alone, which has less
    variance (GKD 2306.13649 with reverse KL; MiniLLM 2306.08543). Rewards do not matter, but a row without one is left
    out.
    """

    horizon: float = Field(0.0, ge=0, le=1, description="discount of the tokens behind: 0 none of them, 1 all")

    needs: ClassVar[tuple[str, ...]] = ("logprobs", "ref_logprobs")
    reads_reward: ClassVar[bool] = False
    scope: ClassVar[Scope] = "token-local"

    def tokens(self, tokens: Tokens) -> tuple[Tensor, None]:
        """Teacher minus student."""
        gap = tokens.chosen("ref_logprobs") - tokens.chosen("logprobs")
        return tokens.scatter(discounted_sums(gap, tokens.packing.counts, self.horizon)), None
