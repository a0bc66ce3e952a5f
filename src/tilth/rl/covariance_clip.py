"""Policy losses that treat a few tokens otherwise: those whose log-prob and advantage move together most.

Covariance of a token is (A - mean A)(log pi - mean log pi), means over all tokens of the global batch: where it is
large, the update takes entropy away (Cui 2025, The Entropy Mechanism, 2505.22617). Which tokens are chosen depends on
the whole batch, so a first pass finds means and a threshold (``tilth.rl.thresholds``), and the split does not matter;
verl takes the means and the best tokens of each micro-batch.

Where several tokens lie at the threshold, each is chosen by the same share, so that exactly k are chosen all the same.
"""

import math
from typing import ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from tilth.rl.loss_base import ClippedLoss, LossInputs, PolicyLoss, TokenLosses
from tilth.rl.packing import Gather, Reduce
from tilth.rl.registry import register

DEFAULT_SHARE = 2e-4


def covariance(step: LossInputs, means: dict[str, float]) -> Tensor:
    """Of each token, float64 [total], constant. means: of ``advantages`` and ``logprobs`` over the global batch."""
    moved = step.logprobs.detach().double() - means["mean_logprob"]
    return (step.advantages.double() - means["mean_advantage"]) * moved


def centres(step: LossInputs, tokens: int, gather: Gather) -> dict[str, float]:
    """Means over the global batch. Sums of rows are gathered and rounded once: the same bits for every split."""
    packing = step.packing
    own = {"mean_advantage": packing.sum(step.advantages.double()), "mean_logprob": packing.sum(step.logprobs.double())}
    every = gather({name: column.detach().cpu().numpy() for name, column in own.items()})
    return {name: math.fsum(column) / max(tokens, 1) for name, column in every.items()}


def total(mask: Tensor, reduce: Reduce) -> int:
    """True values of all workers."""
    (count,) = reduce(mask.sum(dtype=torch.float64).reshape(1))
    return int(count)


def greatest(own: Tensor, k: int, reduce: Reduce, gather: Gather) -> dict[str, float]:
    """What tells the k greatest of all workers' values from the others: ``at``, and the ``share`` of those equal to it.

    It lies between the k-th and the next, so that log-probs that are computed again, a rounding apart, choose the same
    tokens; where both are equal, there, and a share of the equal ones belongs to the k.

    own: float64 [any number]; k: at most their number over all workers; 0: nothing is chosen.
    """
    best = torch.topk(own, min(k + 1, len(own))).values.cpu().numpy()
    every = np.append(np.sort(gather({"value": best})["value"])[::-1], -math.inf)
    middle, last = (every[k - 1] + every[k]) / 2, every[k - 1]
    at = float(middle if middle < last else last) if k else math.inf
    above, equal = reduce(torch.stack([(own > at).sum(dtype=torch.float64), (own == at).sum(dtype=torch.float64)]))
    return {"at": at, "share": float((k - above) / equal.clamp(min=1))}


def chosen(values: Tensor, found: dict[str, float]) -> Tensor:
    """How far each token is chosen, float64: 1 above the threshold, its share at it, 0 below."""
    return torch.where(values == found["at"], found["share"], (values > found["at"]).double())


@register("losses", "clip_cov")
class ClipCov(ClippedLoss):
    """PPO's clip; of the tokens whose covariance lies between two bounds, a few at random count nothing (Clip-Cov).

    Of all tokens, ``cov_share`` are chosen (at least one, at most all that are eligible: covariance inside the bounds,
    not clipped already), those with the greatest of the given counted random numbers. Bounds and share are those of the
    authors and of verl (2505.22617). verl chooses the share of each micro-batch, at least one in each.
    """

    cov_share: float = Field(DEFAULT_SHARE, gt=0, le=1, description="share of all tokens that is chosen")
    cov_low: float = Field(1.0, description="lower bound of the covariance of tokens that may be chosen")
    cov_high: float = Field(5.0, description="upper bound of it")

    @property
    def needs(self) -> tuple[str, ...]:
        """Random numbers of tokens too."""
        return (*super().needs, "uniforms")

    first_pass: ClassVar[bool] = True

    def thresholds(self, step: LossInputs, reduce: Reduce, gather: Gather) -> dict[str, float]:
        """Means and the k-th greatest random number of eligible tokens."""
        tokens = total(step.packing.mask, reduce)
        means = centres(step, tokens, gather)
        eligible = self._eligible(step, means)
        number = total(eligible, reduce)
        k = min(max(int(self.cov_share * tokens), 1), number)
        return means | greatest(step.columns["uniforms"].double()[eligible], k, reduce, gather)

    def tokens(self, step: LossInputs) -> TokenLosses:
        """Loss of each token; shares of tokens clipped and chosen."""
        loss, shares = self.clipped(step.ratio, step.advantages)
        found = dict(step.thresholds)
        few = torch.where(self._eligible(step, found), chosen(step.columns["uniforms"].double(), found), 0.0)
        return loss * (1 - few).to(loss.dtype), {**shares, "selected": few}

    def _eligible(self, step: LossInputs, means: dict[str, float]) -> Tensor:
        clipped = self.clipped(step.ratio.detach(), step.advantages)[1]
        cov = covariance(step, means)
        inside = step.packing.mask & (cov > self.cov_low) & (cov < self.cov_high)
        return inside & ~clipped["clip_low"] & ~clipped["clip_high"]


@register("losses", "kl_cov")
class KlCov(PolicyLoss):
    """-A r, plus cov_coef |log r| at the tokens of greatest covariance (KL-Cov, 2505.22617).

    ``cov_share`` of all tokens, at least one, are chosen. The coefficient is the paper's and that of verl's function,
    1; verl's recipe has 0.1.
    """

    cov_share: float = Field(DEFAULT_SHARE, gt=0, le=1, description="share of all tokens that is chosen")
    cov_coef: float = Field(1.0, ge=0, description="weight of the penalty of a token that is chosen")

    first_pass: ClassVar[bool] = True

    def thresholds(self, step: LossInputs, reduce: Reduce, gather: Gather) -> dict[str, float]:
        """Means and the k-th greatest covariance."""
        tokens = total(step.packing.mask, reduce)
        means = centres(step, tokens, gather)
        k = min(max(int(self.cov_share * tokens), 1), tokens)
        return means | greatest(covariance(step, means)[step.packing.mask], k, reduce, gather)

    def tokens(self, step: LossInputs) -> TokenLosses:
        """Loss of each token; share of tokens chosen."""
        found = dict(step.thresholds)
        few = chosen(covariance(step, found), found)
        loss = -step.advantages * step.ratio + self.cov_coef * few.to(step.ratio.dtype) * step.log_ratio.abs()
        return loss, {"selected": few}
