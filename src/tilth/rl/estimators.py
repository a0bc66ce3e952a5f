"""Advantage estimators: what an estimator sees, and those over rows, over rewards to come and over log-probs.

``rl.optimal`` adds the optimal token baselines. Statistics run in float64.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor

from tilth.core.errors import RecipeError
from tilth.rl.packing import Gather, Groups, Packing, Reduce, discounted_sums, rows_alone, whiten, whiten_rows
from tilth.rl.registry import Entry, Scope, register

OF_TOKENS = (
    "values", "logprobs", "old_logprobs", "ref_logprobs", "rollout_logprobs", "sum_pi_squared", "versions", "weights",
    "uniforms", "chunk_tokens",
)  # fmt: skip
"""Columns with one value for each token; all others have one for each row."""


@dataclass(frozen=True)
class Rows:
    """One row for each sequence: scores float64 [n], 0 where missing; valid bool [n]; counts int64 [n] of tokens."""

    scores: Tensor
    valid: Tensor
    counts: Tensor | None
    columns: Mapping[str, Tensor]

    @cached_property
    def groups(self) -> Groups:
        """Statistics of the scores within groups."""
        return self.grouped(self.scores)

    def grouped(self, scores: Tensor) -> Groups:
        """Return statistics of other numbers within the groups, one for each row."""
        return Groups.of(self.columns["groups"], scores, self.valid, self.counts)

    @cached_property
    def weights(self) -> Tensor:
        """Tokens that count in each row, float64 [n], 0 where the reward is missing; needs ``counts``."""
        assert self.counts is not None
        return torch.where(self.valid, self.counts.to(self.scores), 0.0)


@dataclass(frozen=True)
class GlobalRows:
    """Rows of all workers, in the order of the whole batch. own: int64 [n], which of them are this worker's."""

    rows: Rows
    own: Tensor
    worker: Tensor
    """int64 [N]: a number that each worker alone has."""

    @property
    def apart(self) -> Tensor:
        """Groups that lie on several workers, int64."""
        groups = self.rows.columns["groups"].to(self.worker.device, torch.int64)
        pairs = torch.unique(torch.stack([groups, self.worker]), dim=1)[0]
        names, holders = torch.unique(pairs, return_counts=True)
        return names[holders > 1]

    @property
    def me(self) -> int:
        """The number of this worker; -1 if it has no rows."""
        return int(self.worker[self.own].max()) if len(self.own) else -1


@dataclass(frozen=True)
class Tokens:
    """Packed tokens. packing: without rows whose reward is missing; rewards: float64 [total], 0 where masked."""

    rows: Rows
    packing: Packing
    rewards: Tensor
    reduce: Reduce
    gather: Gather = rows_alone
    everyone: GlobalRows | None = None
    """Rows of all workers, for scopes that depend on them, if there are several workers."""

    def chosen(self, column: str) -> Tensor:
        """Return a column at the tokens that count, in order, float64 [number of such tokens]."""
        return self.packing.column(column, self.rows.columns[column]).to(torch.float64)[self.packing.mask]

    def scatter(self, chosen: Tensor) -> Tensor:
        """Scatter values of the tokens that count to [total], 0 elsewhere; the inverse of ``chosen``."""
        return chosen.new_zeros(len(self.packing.mask)).masked_scatter(self.packing.mask, chosen)


class Advantage(Entry):
    """An estimator over tokens: advantages and returns, float64 [total], 0 at masked positions."""

    @property
    def finite(self) -> tuple[str, ...]:
        """Row columns that must be finite: where one is not, the row's reward counts as missing."""
        return ()

    @property
    def flat_teaches(self) -> bool:
        """True if a group of samples whose rewards are all equal may have advantages other than 0.

        False: its advantages are exactly 0 (a group of one: option ``singleton``), so a training loop may drop such
        groups and draw others.
        """
        return True

    @property
    def reads_reward(self) -> bool:
        """True if advantages depend on the reward. If not, what a training loop adds to the reward (a KL penalty, a
        length penalty) never reaches the policy; a row without a reward is left out all the same."""
        return True

    @property
    def relative_to_spread(self) -> bool:
        """True if a difference between rewards counts in full, however small it is.

        This is the case if advantages are divided by the spread of rewards in the group, or by the number of rows that
        have any: a KL penalty of 1e-3 in the reward is then as large as right and wrong elsewhere.
        """
        return False

    @property
    def whitens(self) -> bool:
        """True if advantages are shifted and scaled by moments of the whole batch."""
        return self.scope == "global moments"

    def tokens(self, tokens: Tokens) -> tuple[Tensor, Tensor | None]:
        """Return advantages and, if the estimator has them, returns."""
        raise NotImplementedError


class RowAdvantage(Advantage):
    """Base of estimators over rows: one advantage for all tokens of a row."""

    @property
    def scope(self) -> Scope:
        return "rows"

    @property
    def weighs(self) -> bool:
        """True if rows are weighted by their tokens (``Rows.counts``)."""
        return False

    def rows(self, rows: Rows) -> Tensor:
        """Return the advantage of each row, float64 [n]; any value where the reward is missing."""
        raise NotImplementedError

    def tokens(self, tokens: Tokens) -> tuple[Tensor, None]:
        """Return each row's advantage at every token of it that counts; statistics are over the rows of all workers."""
        all_of_them = tokens.everyone
        rows = self.rows(tokens.rows) if all_of_them is None else self.rows(all_of_them.rows)[all_of_them.own]
        return tokens.packing.masked(tokens.packing.spread(rows)), None


Std = Literal["unbiased", "biased"]
"""Standard deviation over n - 1 (verl, slime, TRL) or over n rewards; they differ by sqrt(n / (n - 1))."""
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
        return ("rewards", "groups")

    def rows(self, rows: Rows) -> Tensor:
        return self.grouped(rows.groups)

    def grouped(self, groups: Groups) -> Tensor:
        """Return the advantage of each row from grouped scores."""
        single = self.single(groups.scores) if self.singleton == "reward" else torch.zeros_like(groups.scores)
        return torch.where(groups.size > 1, self.relative(groups), single)

    def relative(self, groups: Groups) -> Tensor:
        """Advantage in a group of two or more; score - mean by default."""
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
        return torch.where(groups.flat, 0.0, groups.centred / (groups.deviation(self.std == "biased") + self.eps))

    def single(self, scores: Tensor) -> Tensor:
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
        return groups.centred * groups.size / (groups.size - 1).clamp(min=1)


@register("advantages", "reinforce_pp_baseline")
class ReinforcePPBaseline(_Grouped):
    """REINFORCE++ with a group baseline (arXiv 2501.03262): score - mean of the group, then whitened over the batch.

    Mean and unbiased variance are over all tokens that count in the global batch, so a row weighs by its tokens. If all
    rows are equal, advantages are exactly 0. Published with a k2 penalty in the loss.
    """

    weighs: ClassVar[bool] = True
    whitens: ClassVar[bool] = True
    flat_teaches: ClassVar[bool] = True  # whitening moves its zeros by the mean over the batch's tokens

    def rows(self, rows: Rows) -> Tensor:
        return whiten_rows(super().rows(rows), rows.weights)


@register("advantages", "opo")
class Opo(_Grouped):
    """On-policy with the optimal baseline (arXiv 2505.23585): score - sum(l * score) / sum(l) in the group.

    l: tokens of each row that count. Exactly 0 where all scores are equal. A group of one keeps its score (verl).
    """

    weighs: ClassVar[bool] = True

    def rows(self, rows: Rows) -> Tensor:
        groups, weights = rows.groups, rows.weights
        baseline = groups.sum(weights * rows.scores) / groups.sum(weights).clamp(min=1)
        single = rows.scores if self.singleton == "reward" else torch.zeros_like(rows.scores)
        return torch.where(groups.size > 1, torch.where(groups.flat, 0.0, rows.scores - baseline), single)


@register("advantages", "gpg")
class GpgAdvantage(_Grouped):
    """Group policy gradient (arXiv 2504.02546): alpha * (score - mean) / norm.

    alpha = rows of the batch / rows that count: those of groups whose rewards differ (``count = "spread"``, the paper),
    or with a reward other than 0 (``"nonzero"``, verl). Both are of the global batch, over rows with a reward.
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
    """Pass@k (arXiv 2503.19595): only the best of a group gets an advantage, (best - second best) / (std + eps).

    Two best rows, or a group of one (an error in verl), get 0: rows can go missing, so groups need not be of equal
    size.
    """

    eps: float = Field(1e-6, ge=0, description=_EPS)
    std: Literal["unbiased", "biased", "none"] = Field("unbiased", description=f"{_STD}; none: not divided")

    needs: ClassVar[tuple[str, ...]] = ("rewards", "groups")
    flat_teaches: ClassVar[bool] = False

    @property
    def relative_to_spread(self) -> bool:
        return self.std != "none"

    def rows(self, rows: Rows) -> Tensor:
        """Return best - second best at the best row of each group, 0 elsewhere."""
        groups = rows.groups
        is_best = rows.scores == groups.greatest(rows.scores)
        ahead = rows.scores - groups.greatest(torch.where(is_best, -torch.inf, rows.scores))
        alone = is_best & (groups.sum(is_best.to(rows.scores)) == 1) & (groups.size > 1)
        if self.std != "none":
            ahead = ahead / (groups.deviation(self.std == "biased") + self.eps)
        return torch.where(alone, ahead, 0.0)


@register("advantages", "grpo_process")
class GrpoProcess(Advantage):
    """GRPO with rewards of turns (DeepSeekMath 2402.03300, section 4.1.3): the normalised rewards to come in the group.

    A turn is a run of tokens that the policy chose, its reward the sum of theirs. (reward - mean) / (std + eps) is over
    the turns of all rows of the group; a token gets the sum of its own turn and those behind it. With one turn a row it
    is ``grpo``. A single turn in a group counts as mean 0 and std 1; exactly 0 where all turns earn the same.
    """

    eps: float = Field(1e-6, ge=0, description=_EPS)
    std: Std = Field("unbiased", description=f"{_STD}, of turns in place of rows")

    needs: ClassVar[tuple[str, ...]] = ("rewards", "groups")
    scope: ClassVar[Scope] = "group tokens"
    relative_to_spread: ClassVar[bool] = True

    def tokens(self, tokens: Tokens) -> tuple[Tensor, None]:
        packing, n = tokens.packing, len(tokens.packing.counts)
        at = torch.nonzero(packing.mask)[:, 0]
        row = packing.spread(torch.arange(n, device=at.device))[at]
        begins = torch.ones_like(row, dtype=torch.bool)
        begins[1:] = (at[1:] != at[:-1] + 1) | (row[1:] != row[:-1])
        turn, turn_row = torch.cumsum(begins, 0) - 1, row[begins]
        earned = tokens.rewards.new_zeros(len(turn_row)).index_add(0, turn, tokens.rewards[at])
        group = tokens.rows.columns["groups"].to(row.device, torch.int64)[turn_row]
        relative = self.relative(*_with_others(group, earned, tokens))[: len(group)]
        to_come = discounted_sums(relative, torch.bincount(turn_row, minlength=n), 1.0)
        return tokens.scatter(to_come[turn]), None

    def relative(self, group: Tensor, earned: Tensor) -> Tensor:
        """Return the normalised reward of each turn. group: int64 [turns]; earned: float64 [turns]."""
        groups = Groups.of(group, earned, torch.ones_like(group, dtype=torch.bool))
        spread = groups.deviation(self.std == "biased") + self.eps
        relative = torch.where(groups.flat, 0.0, groups.centred / spread)
        return torch.where(groups.size > 1, relative, earned / (1 + self.eps))


def _with_others(group: Tensor, earned: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor]:
    """Return groups and rewards of turns, behind them those of other workers in groups that lie on several."""
    if tokens.everyone is None or not len(apart := tokens.everyone.apart.to(group.device)):
        return group, earned
    me, shared = tokens.everyone.me, torch.isin(group, apart)
    sent = {"group": group[shared].cpu().numpy(), "earned": earned[shared].cpu().numpy()}
    found = tokens.gather({**sent, "worker": np.full(int(shared.sum()), me)})
    theirs = found["worker"] != me
    more = (torch.from_numpy(found[name][theirs]).to(earned.device) for name in ("group", "earned"))
    return torch.cat([group, next(more)]), torch.cat([earned, next(more)])


@register("advantages", "gdpo")
class Gdpo(Grpo):
    """Decoupled normalisation of several rewards (arXiv 2601.05242): GRPO of each part, weighted sum, then whitened.

    A row without a part, or without the reward, is missing. Without ``keys`` the reward is the only part (verl's
    fallback).
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
        return ("rewards", "groups", *self.finite)

    @property
    def finite(self) -> tuple[str, ...]:
        return tuple(f"part/{key}" for key in self.keys)

    weighs: ClassVar[bool] = True
    whitens: ClassVar[bool] = True
    flat_teaches: ClassVar[bool] = True  # parts may differ where their sum does not

    @property
    def reads_reward(self) -> bool:
        return not self.keys

    def rows(self, rows: Rows) -> Tensor:
        parts = [torch.where(rows.valid, rows.columns[c].to(rows.scores), 0.0) for c in self.finite] or [rows.scores]
        total = torch.zeros_like(rows.scores)
        for part, weight in zip(parts, self.weights or (1.0,) * len(parts)):
            total = total + weight * self.grouped(rows.grouped(part))
        return whiten_rows(total, rows.weights)


_WHITEN = "shift and scale to mean 0, variance 1 over the global batch"
_EQUAL = 1e-9
"""Relative distance up to which rewards are the same: above the rounding of a float64 mean, below that of a float32."""


class _Whitened(Advantage):
    """Base of estimators from rewards to come, whitened over all tokens that count in the global batch (unbiased
    variance).

    Masked positions stay 0 (verl leaves the whitened running sum in them). If the discounted reward to come is the same
    at every token of the global batch, advantages are 0, also unlike verl: only the critic's noise is left then, and
    whitening would scale it to variance 1.
    """

    gamma: float = Field(1.0, ge=0, le=1, description="discount")
    whiten: bool = Field(True, description=_WHITEN)

    @property
    def scope(self) -> Scope:
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
        """One-step errors r + gamma * V' - V of the tokens that count, and V; the value after the last one is 0. Masked
        tokens are taken out first: in what is left, each token's successor is the next entry of its row."""
        values, rewards = tokens.chosen("values"), tokens.rewards[tokens.packing.mask]
        row = tokens.packing.spread(torch.arange(len(tokens.packing.counts), device=values.device))[tokens.packing.mask]
        same = torch.nn.functional.pad(row[1:] == row[:-1], (0, 1))[: len(row)]
        following = torch.where(same, torch.roll(values, -1), 0.0)
        return rewards + self.gamma * following - values, values


@register("advantages", "gae")
class Gae(_Critic):
    """Generalised advantage estimation (Schulman 2015): sum of (gamma * lam)^k * delta, with a value at each token.

    Tokens that the policy did not choose are skipped: value and running sum pass through them, as in verl. Returns are
    advantage + value before whitening.
    """

    lam: float = Field(1.0, ge=0, le=1, description="lambda: 1 is reward-to-go minus value, 0 is one-step")

    def tokens(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        delta, values = self.delta(tokens)
        advantages = discounted_sums(delta, tokens.packing.counts, self.gamma * self.lam)
        return self.finish(tokens, advantages, advantages + values)


@register("advantages", "vapo")
class Vapo(_Critic):
    """GAE with a lambda for each row, and another one for the critic (VAPO, arXiv 2504.05118).

    Policy: lambda = clamp(1 - 1 / max(alpha * l, 1), 0, 1), l the row's tokens that count, so that the coefficients sum
    to alpha * l; rows of at most 1 / alpha tokens are one-step (20 for the paper's 0.05: short tasks want a larger
    alpha). Critic: ``value_lam``; with 1 its targets are the discounted rewards to come. Whitening is not in the paper;
    it works as in ``gae``.
    """

    alpha: float = Field(0.05, gt=0, description="lambda is 1 - 1 / (alpha * length of the answer in tokens)")
    adaptive: bool = Field(True, description="whether lambda goes by the length; otherwise it is lam")
    lam: float = Field(0.95, ge=0, le=1, description="lambda of the policy where it is not adaptive")
    value_lam: float = Field(1.0, ge=0, le=1, description="lambda of the critic's targets")

    def tokens(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        delta, values = self.delta(tokens)
        counts = tokens.packing.counts
        advantages = discounted_sums(delta, counts, self.gamma * self._policy_lam(tokens))
        if self.value_lam == 1:
            return self.finish(tokens, advantages, ahead(tokens, self.gamma))
        return self.finish(tokens, advantages, discounted_sums(delta, counts, self.gamma * self.value_lam) + values)

    def _policy_lam(self, tokens: Tokens) -> Tensor:
        """Return lambda at each token that counts, float64."""
        length = tokens.packing.spread(tokens.packing.counts)[tokens.packing.mask].to(torch.float64)
        if not self.adaptive:
            return torch.full_like(length, self.lam)
        return (1 - 1 / (self.alpha * length).clamp(min=1)).clamp(0, 1)


@register("advantages", "reinforce_pp")
class ReinforcePP(_Whitened):
    """REINFORCE++ (arXiv 2501.03262): the discounted reward to come, whitened over the tokens of the global batch.

    Rewards may be one for each token, so a KL penalty can be in them (``penalise``). Tokens that the policy did not
    choose are skipped without a discount, as in verl. Returns are the rewards to come.
    """

    needs: ClassVar[tuple[str, ...]] = ("rewards",)

    def tokens(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
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
        baselines = tokens.rows.columns["baselines"].to(tokens.rewards)
        returns = ahead(tokens, 1.0)
        advantages = returns - tokens.packing.spread(baselines)[tokens.packing.mask]
        return tokens.scatter(advantages), tokens.scatter(returns)


def ahead(tokens: Tokens, gamma: float) -> Tensor:
    """Return the discounted reward to come at each token that counts, float64."""
    return discounted_sums(tokens.rewards[tokens.packing.mask], tokens.packing.counts, gamma)


def _flat(values: Tensor, reduce: Reduce) -> bool:
    """True if all workers' values [k] are equal and there are at least two; every worker comes to the same result."""
    count, total = reduce(torch.stack([values.new_tensor(float(len(values))), values.sum()]))
    mean = total / count.clamp(min=1)
    (apart,) = reduce(((values - mean).abs() > _EQUAL * mean.abs()).sum().to(values.dtype).reshape(1))
    return bool(count > 1) and not bool(apart)


@register("advantages", "distill")
class Distill(Advantage):
    """On-policy distillation: log teacher - log student at each token that the student chose.

    With ``horizon`` > 0 the differences of later tokens are added, discounted: the policy gradient with horizon 1 is
    the gradient of KL(student || teacher) over whole answers; with 0, the default and common practice, each token
    counts for itself, which has less variance (GKD 2306.13649 with reverse KL; MiniLLM 2306.08543). Rewards have no
    effect, but a row without one is left out. With ``align`` "characters" the two are compared over chunks of equal
    text, ``chunk_tokens`` of the student's tokens with an even share each: a token gets the difference of its chunk.
    """

    horizon: float = Field(0.0, ge=0, le=1, description="discount of the tokens behind: 0 none of them, 1 all")
    align: Literal["tokens", "characters"] = Field(
        "tokens", description="what is compared; characters: also with a teacher that has another tokenizer"
    )

    reads_reward: ClassVar[bool] = False
    scope: ClassVar[Scope] = "token-local"

    @property
    def needs(self) -> tuple[str, ...]:
        return "logprobs", "ref_logprobs", *(("chunk_tokens",) if self.align == "characters" else ())

    def tokens(self, tokens: Tokens) -> tuple[Tensor, None]:
        gap = tokens.chosen("ref_logprobs") - tokens.chosen("logprobs")
        if self.align == "characters":
            gap = gap * tokens.chosen("chunk_tokens")
        return tokens.scatter(discounted_sums(gap, tokens.packing.counts, self.horizon)), None
