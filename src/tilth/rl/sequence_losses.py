"""Policy losses with one ratio a sequence: the geometric mean of its tokens' ratios.

A row is never split over micro-batches, so sums over its tokens are whole in each; the mean over rows is by the global
denominator of the aggregation. So loss and gradient are those of the whole batch, whatever the split.
"""

from typing import ClassVar

import torch
from pydantic import Field

from tilth.rl.loss_base import ClippedLoss, LossInputs, PolicyLoss, TokenLosses
from tilth.rl.registry import register

LOG_SEQUENCE_RATIO_BOUND = 10.0


@register("losses", "gspo")
class Gspo(ClippedLoss):
    """PPO's clip of s = exp(mean over the row of log r), the same for all tokens of a row (GSPO 2507.18071).

    As in verl and TRL each token carries the row's value and its own gradient, s * r / constant(r) (GSPO-token); where
    A is the same at all tokens of a row and the aggregation its own, that is the gradient of the row's s. log s is held
    at most 10. Defaults are the paper's: clips are far narrower than PPO's, as s moves far less than r.

    Unlike verl, log-ratios of tokens are clamped to +-20 before their mean, and any aggregation can be asked for.
    """

    clip_low: float = Field(3e-4, ge=0, description="lower clip range of the sequence's ratio; 1 or more: none")
    clip_high: float = Field(4e-4, ge=0, description="upper clip range of the sequence's ratio")

    aggregation: ClassVar[str] = "seq-mean-token-mean"

    def tokens(self, step: LossInputs) -> TokenLosses:
        """Loss of each token; shares of tokens whose row the clips take away."""
        log_row = step.packing.spread(step.row_mean(step.log_ratio.detach()))
        log_row = log_row + step.log_ratio - step.log_ratio.detach()
        return self.clipped(log_row.clamp(max=LOG_SEQUENCE_RATIO_BOUND).exp(), step.advantages)


@register("losses", "geo_mean")
class GeoMean(PolicyLoss):
    """-A exp(mean over the row of clipped log r), A the row's mean advantage (GMPO 2507.20673).

    Log-ratios are clipped token by token to [-clip_low, clip_high] on the side that the sign of A bounds, so the
    bounds are exp(-0.4) and exp(0.4) by default, the paper's. Advantages of outcome rewards are meant, the same at all
    tokens of a row; the mean of others is taken, as in verl.

    Unlike verl: its mean over the rows of each micro-batch makes the loss depend on the split, and counts rows without
    tokens; here each token carries its row's value, and the aggregation (its own: seq-mean-token-mean, the mean over
    rows that have tokens) divides by the rows of the global batch. Weights of a correction multiply tokens, so a row
    has their mean, where verl has their geometric mean; weights that are the same in a row give the same in both.
    """

    clip_low: float = Field(0.4, ge=0, description="most that a log-ratio may fall where A < 0")
    clip_high: float = Field(0.4, ge=0, description="most that a log-ratio may rise where A > 0")

    aggregation: ClassVar[str] = "seq-mean-token-mean"

    def tokens(self, step: LossInputs) -> TokenLosses:
        """The row's loss at each of its tokens; shares of tokens whose log-ratio is held at a bound."""
        a, d = step.advantages, step.log_ratio
        held = torch.where(a > 0, d.clamp(max=self.clip_high), d.clamp(min=-self.clip_low))
        mean = step.row_mean(torch.where(a == 0, 0.0, held))  # a token without an advantage has no side
        loss = -step.row_mean(a) * mean.exp()
        return step.packing.spread(loss), {
            "clip_low": (a < 0) & (d < -self.clip_low),
            "clip_high": (a > 0) & (d > self.clip_high),
        }
