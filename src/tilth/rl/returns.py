"""Advantages from rewards to come, token by token: REINFORCE's, and with a critic those of GAE and VAPO."""

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from tilth.rl.advantage_base import Advantage, Tokens
from tilth.rl.packing import Reduce, discounted_sums, whiten
from tilth.rl.registry import Scope, register

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
