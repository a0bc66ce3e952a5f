"""Policy losses: what a loss sees, its common options, and every loss that comes with Tilth.

A loss gives one number for each token (``PolicyLoss.tokens``); ``tilth.rl.policy_loss`` aggregates them. A row is never
split over micro-batches, so sums over its tokens (``gspo``, ``geo_mean``) are whole in each of them.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from tilth.core.errors import RecipeError
from tilth.rl.packing import Gather, Packing, Reduce
from tilth.rl.registry import Entry, Scope, lookup, register

LOG_RATIO_BOUND = 20.0
ROUNDING = 1e-5  # above log-ratios that fp32 gives to a policy that has not moved

TokenLosses = tuple[Tensor, dict[str, Tensor]]
"""Loss of each token [total], and columns [total] whose mean over the tokens that count is a metric."""


@dataclass(frozen=True)
class LossInputs:
    """Input of a loss: packed columns [total], 0 at masked positions. Only ``logprobs`` has a gradient."""

    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    packing: Packing
    columns: Mapping[str, Tensor]
    thresholds: Mapping[str, float] = field(default_factory=dict)
    """Results of the first pass over the whole batch, for losses that have one."""

    @cached_property
    def log_ratio(self) -> Tensor:
        """log(policy / old policy), clamped to +-20."""
        return (self.logprobs - self.old_logprobs).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)

    @cached_property
    def ratio(self) -> Tensor:
        """policy / old policy."""
        return self.log_ratio.exp()

    def row_mean(self, values: Tensor) -> Tensor:
        """Return the mean of a column [total] over the tokens of each row that count, [n]; 0 of a row without any."""
        return self.packing.sum(values) / self.packing.counts.clamp(min=1).to(values.dtype)


class PolicyLoss(Entry):
    """A loss. Common options: a KL penalty towards the reference, with the same aggregation, added to the loss."""

    ratio_bounds: ClassVar[tuple[str, ...]] = ()
    """Options that bound the ratio: at least 1, or 0 for none."""

    kl: str = Field("k3", description="form of the KL penalty, one of names()['kl']")
    kl_coef: float = Field(0.0, ge=0, description="weight of the KL penalty; 0: none")

    @property
    def needs(self) -> tuple[str, ...]:
        """Columns that every loss needs, and ``ref_logprobs`` for a KL penalty."""
        needed = ("logprobs", "old_logprobs", "advantages")
        return (*needed, "ref_logprobs") if self.kl_coef else needed

    @property
    def scope(self) -> Scope:
        """Global moments for a loss with a first pass, else tokens alone."""
        return "global moments" if self.first_pass else "token-local"

    @property
    def aggregation(self) -> str:
        """Aggregation that the loss was published with; the default."""
        return "token-mean"

    @property
    def takes_ratio(self) -> bool:
        """True if the loss contains the ratio to the old policy. If that is the policy that sampled, importance weights
        towards it would correct twice."""
        return True

    @property
    def first_pass(self) -> bool:
        """True if the loss needs ``tilth.rl.thresholds`` over the whole batch before the split into micro-batches."""
        return False

    def model_post_init(self, context: Any) -> None:
        """Raise RecipeError for an unknown form of the KL penalty, and for a bound on the ratio between 0 and 1."""
        lookup("kl", self.kl)
        for option in self.ratio_bounds:
            value = getattr(self, option)
            if value and value < 1:
                raise RecipeError(
                    f"{self.entry_name}: {option} = {value}: it must be at least 1, or 0 for none",
                    key=f"{self.entry_name}.{option}",
                )

    def tokens(self, step: LossInputs) -> TokenLosses:
        """Return the loss of each token, and columns [total] whose mean over the tokens that count is a metric."""
        raise NotImplementedError

    def thresholds(self, step: LossInputs, reduce: Reduce, gather: Gather) -> dict[str, float]:
        """Run the first pass: return numbers that are equal on all workers, whatever the split. Without gradients."""
        return {}


class ClippedLoss(PolicyLoss):
    """A loss that clips the ratio to [1 - clip_low, 1 + clip_high], as PPO does."""

    clip_low: float = Field(0.2, ge=0, description="lower clip range of the ratio; 1 or more: no lower bound")
    clip_high: float = Field(0.2, ge=0, description="upper clip range of the ratio")

    def clipped(self, ratio: Tensor, advantages: Tensor) -> TokenLosses:
        """Return PPO's surrogate max(-A r, -A clip(r)), and masks of the tokens whose gradient the clips remove."""
        low, high = 1 - self.clip_low, 1 + self.clip_high
        loss = (-advantages * ratio).maximum(-advantages * ratio.clamp(low, high))
        return loss, {"clip_low": (advantages < 0) & (ratio < low), "clip_high": (advantages > 0) & (ratio > high)}


@register("losses", "ppo_clip")
class PpoClip(ClippedLoss):
    """PPO's clipped surrogate: max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)); where A < 0 at most -A dual_clip.

    PPO 1707.06347, dual clip 1912.09729 (verl and slime: 3, here off), asymmetric clip (clip-higher) DAPO 2503.14476.
    """

    ratio_bounds: ClassVar[tuple[str, ...]] = ("dual_clip",)
    dual_clip: float | None = Field(None, ge=0, description="bound on the ratio where A < 0, at least 1; 0: none")

    def tokens(self, step: LossInputs) -> TokenLosses:
        ratio, advantages = step.ratio, step.advantages
        loss, clipped = self.clipped(ratio, advantages)
        if self.dual_clip:
            clipped["clip_dual"] = (advantages < 0) & (ratio > self.dual_clip)
            loss = torch.where(advantages < 0, torch.minimum(loss, -advantages * self.dual_clip), loss)
        return loss, clipped


@register("losses", "reinforce")
class Reinforce(PolicyLoss):
    """-A log pi (Williams 1992): the gradient of the expected reward on the policy's own samples.

    With ``cap``, -w A log pi with the constant w = min(pi / old, cap): truncated importance weights, for samples of
    another policy (verl's bypass_mode with loss_type reinforce, where old is the rollout engine's policy; cap 2).
    """

    ratio_bounds: ClassVar[tuple[str, ...]] = ("cap",)
    cap: float | None = Field(None, ge=0, description="bound on the importance weight, at least 1; 0: no weight")

    @property
    def takes_ratio(self) -> bool:
        return bool(self.cap)

    def tokens(self, step: LossInputs) -> TokenLosses:
        loss = -step.advantages * step.logprobs
        if not self.cap:
            return loss, {}
        return loss * step.ratio.detach().clamp(max=self.cap), {"truncated": step.ratio > self.cap}


@register("losses", "gpg")
class GpgLoss(PolicyLoss):
    """-A log pi, without a ratio or a clip (GPG 2504.02546): published with the advantage ``gpg``.

    The same function as ``reinforce`` without a cap, under the name by which verl has it.
    """

    takes_ratio: ClassVar[bool] = False

    def tokens(self, step: LossInputs) -> TokenLosses:
        return -step.advantages * step.logprobs, {}


@register("losses", "cispo")
class Cispo(PolicyLoss):
    """-w A log pi with the constant w = clip(r, 1 - clip_low, 1 + clip_high): no token loses its gradient.

    MiniMax-M1 2506.13585, which tunes the upper bound alone; the values are those of verl's recipe. verl, slime and
    NeMo-RL bound the ratio relative to 1, as here. TRL and ScaleRL (2510.13786, 4 to 8) give the greatest ratio itself
    and no lower bound: that is ``cap``, which takes the place of both clips.
    """

    clip_low: float = Field(1.0, ge=0, description="lower clip range of the weight; 1 or more: no lower bound")
    clip_high: float = Field(0.2, ge=0, description="upper clip range of the weight")
    ratio_bounds: ClassVar[tuple[str, ...]] = ("cap",)
    cap: float | None = Field(None, ge=0, description="greatest weight, in place of both clips; 0: none")

    def tokens(self, step: LossInputs) -> TokenLosses:
        low, high = (0.0, self.cap) if self.cap else (1 - self.clip_low, 1 + self.clip_high)
        weight = step.ratio.detach().clamp(low, high)
        held = {"clip_low": step.ratio < low, "clip_high": step.ratio > high}
        return -weight * step.advantages * step.logprobs, held


@register("losses", "sapo")
class Sapo(PolicyLoss):
    """-A sigmoid(tau (r - 1)) 4 / tau: a smooth gate in place of the clip, of slope 1 at r = 1 (SAPO 2511.20347)."""

    tau_pos: float = Field(1.0, gt=0, description="how fast the gate closes where A > 0")
    tau_neg: float = Field(1.05, gt=0, description="how fast the gate closes elsewhere")

    aggregation: ClassVar[str] = "seq-mean-token-mean"

    def tokens(self, step: LossInputs) -> TokenLosses:
        tau = torch.full_like(step.advantages, self.tau_neg).masked_fill(step.advantages > 0, self.tau_pos)
        return -step.advantages * torch.sigmoid(tau * (step.ratio - 1)) * 4 / tau, {}


@register("losses", "dro")
class Dro(PolicyLoss):
    """-(A log pi - beta / 2 log(pi / old)^2): off-policy, held to the old policy by a square (DRO 2405.19107).

    Every token has its own square, as in verl and Tinker; the paper's is over the whole answer. verl has no default of
    beta. Where the log-ratio is clamped (+-20) the square has no gradient.
    """

    beta: float = Field(0.05, gt=0, description="weight of the square of the log-ratio")

    def tokens(self, step: LossInputs) -> TokenLosses:
        return -step.advantages * step.logprobs + 0.5 * self.beta * step.log_ratio.square(), {}


class _Dppo(PolicyLoss):
    """Divergence PPO (2602.04879): -w A log pi, w = min(r, cap) constant, without tokens that went too far already. Too
    far: the probability of the token moved in the direction of its advantage by more than the divergence allows."""

    ratio_bounds: ClassVar[tuple[str, ...]] = ("cap",)
    cap: float | None = Field(20.0, ge=0, description="bound on the weight, at least 1 (3 in verl's recipes); 0: none")

    def outside(self, now: Tensor, old: Tensor, step: LossInputs) -> tuple[Tensor, Tensor]:
        """Return bool [total] twice: probability too far below, and too far above that of the old policy."""
        raise NotImplementedError

    def tokens(self, step: LossInputs) -> TokenLosses:
        now, old, positive = step.logprobs.detach().exp(), step.old_logprobs.exp(), step.advantages > 0
        below, above = self.outside(now, old, step)
        left_out = {"clip_low": ~positive & below, "clip_high": positive & above}
        weight = torch.where(left_out["clip_low"] | left_out["clip_high"], 0.0, step.ratio.detach())
        truncated = weight > (self.cap or torch.inf)
        weight = weight.clamp(max=self.cap or torch.inf)
        return -weight * step.advantages * step.logprobs, {**left_out, "truncated": truncated}


@register("losses", "dppo_tv")
class DppoTv(_Dppo):
    """DPPO with the total variation of (token, any other token): |pi - old| of the token (2602.04879, eq. 13)."""

    tv_low: float = Field(0.15, ge=0, description="how far the probability of a token may fall where A <= 0")
    tv_high: float = Field(0.15, ge=0, description="how far the probability of a token may rise where A > 0")

    def outside(self, now: Tensor, old: Tensor, step: LossInputs) -> tuple[Tensor, Tensor]:
        return now - old < -self.tv_low, now - old > self.tv_high


@register("losses", "dppo_kl")
class DppoKl(_Dppo):
    """DPPO with KL(old || pi) of (token, any other token) (2602.04879, eq. 14); 1e-8 keeps its logarithms finite."""

    kl_low: float = Field(0.05, ge=0, description="KL (nats) up to which a probability may fall where A <= 0")
    kl_high: float = Field(0.05, ge=0, description="KL (nats) up to which a probability may rise where A > 0")

    def outside(self, now: Tensor, old: Tensor, step: LossInputs) -> tuple[Tensor, Tensor]:
        others = torch.log(((1 - old).clamp(min=0) + 1e-8) / ((1 - now).clamp(min=0) + 1e-8))
        kl = -old * step.log_ratio.detach() + (1 - old) * others
        return (kl > self.kl_low) & (now < old), (kl > self.kl_high) & (now > old)


DEFAULT_SHARE = 2e-4


def covariance(step: LossInputs, means: dict[str, float]) -> Tensor:
    """Return the covariance of each token, float64 [total], detached.

    It is (A - mean A)(log pi - mean log pi) with means over all tokens of the global batch; where it is large, the
    update takes entropy away (Cui 2025, The Entropy Mechanism, 2505.22617). verl takes means and best tokens of each
    micro-batch; here a first pass finds means and a threshold, so the split has no effect.
    """
    moved = step.logprobs.detach().double() - means["mean_logprob"]
    return (step.advantages.double() - means["mean_advantage"]) * moved


def centres(step: LossInputs, tokens: int, gather: Gather) -> dict[str, float]:
    """Return means over the global batch. Sums of rows are gathered and rounded once: the same bits for every split."""
    packing = step.packing
    own = {"mean_advantage": packing.sum(step.advantages.double()), "mean_logprob": packing.sum(step.logprobs.double())}
    every = gather({name: column.detach().cpu().numpy() for name, column in own.items()})
    return {name: math.fsum(column) / max(tokens, 1) for name, column in every.items()}


def total(mask: Tensor, reduce: Reduce) -> int:
    """Count the true values of all workers."""
    (count,) = reduce(mask.sum(dtype=torch.float64).reshape(1))
    return int(count)


def greatest(own: Tensor, k: int, reduce: Reduce, gather: Gather) -> dict[str, float]:
    """Return the threshold ``at`` of the k greatest of all workers' values, and the ``share`` of the values equal to
    it.

    The threshold lies between the k-th and the next value, so that log-probs computed again with another rounding
    choose the same tokens. Where both are equal it is that value, and each token at it is chosen by the same share, so
    that exactly k are chosen.

    own: float64 [any number]; k: at most their number over all workers; 0: nothing is chosen.
    """
    best = torch.topk(own, min(k + 1, len(own))).values.cpu().numpy()
    every = np.append(np.sort(gather({"value": best})["value"])[::-1], -math.inf)
    middle, last = (every[k - 1] + every[k]) / 2, every[k - 1]
    at = float(middle if middle < last else last) if k else math.inf
    above, equal = reduce(torch.stack([(own > at).sum(dtype=torch.float64), (own == at).sum(dtype=torch.float64)]))
    return {"at": at, "share": float((k - above) / equal.clamp(min=1))}


def chosen(values: Tensor, found: dict[str, float]) -> Tensor:
    """Return how far each token is chosen, float64: 1 above the threshold, its share at it, 0 below."""
    return torch.where(values == found["at"], found["share"], (values > found["at"]).double())


@register("losses", "clip_cov")
class ClipCov(ClippedLoss):
    """PPO's clip; of the tokens whose covariance lies between two bounds, a few at random count nothing (Clip-Cov).

    Of all tokens, ``cov_share`` are chosen (at least one, at most all that are eligible: covariance inside the bounds,
    not clipped already), those with the greatest counted random numbers. Bounds and share are the authors' and verl's.
    """

    cov_share: float = Field(DEFAULT_SHARE, gt=0, le=1, description="share of all tokens that is chosen")
    cov_low: float = Field(1.0, description="lower bound of the covariance of tokens that may be chosen")
    cov_high: float = Field(5.0, description="upper bound of it")

    @property
    def needs(self) -> tuple[str, ...]:
        return (*super().needs, "uniforms")

    first_pass: ClassVar[bool] = True

    def thresholds(self, step: LossInputs, reduce: Reduce, gather: Gather) -> dict[str, float]:
        tokens = total(step.packing.mask, reduce)
        means = centres(step, tokens, gather)
        eligible = self._eligible(step, means)
        number = total(eligible, reduce)
        k = min(max(int(self.cov_share * tokens), 1), number)
        return means | greatest(step.columns["uniforms"].double()[eligible], k, reduce, gather)

    def tokens(self, step: LossInputs) -> TokenLosses:
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

    ``cov_share`` of all tokens, at least one, are chosen. The coefficient is the paper's and verl's; verl's recipe has
    0.1. A log r of rounding alone is not penalised: its sign would depend on how rows are packed.
    """

    cov_share: float = Field(DEFAULT_SHARE, gt=0, le=1, description="share of all tokens that is chosen")
    cov_coef: float = Field(1.0, ge=0, description="weight of the penalty of a token that is chosen")

    first_pass: ClassVar[bool] = True

    def thresholds(self, step: LossInputs, reduce: Reduce, gather: Gather) -> dict[str, float]:
        tokens = total(step.packing.mask, reduce)
        means = centres(step, tokens, gather)
        k = min(max(int(self.cov_share * tokens), 1), tokens)
        return means | greatest(covariance(step, means)[step.packing.mask], k, reduce, gather)

    def tokens(self, step: LossInputs) -> TokenLosses:
        found = dict(step.thresholds)
        few = chosen(covariance(step, found), found)
        moved = F.threshold(step.log_ratio.abs(), ROUNDING, 0.0)
        loss = -step.advantages * step.ratio + self.cov_coef * few.to(step.ratio.dtype) * moved
        return loss, {"selected": few}


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
        a, d = step.advantages, step.log_ratio
        held = torch.where(a > 0, d.clamp(max=self.clip_high), d.clamp(min=-self.clip_low))
        mean = step.row_mean(torch.where(a == 0, 0.0, held))  # a token without an advantage has no side
        loss = -step.row_mean(a) * mean.exp()
        return step.packing.spread(loss), {
            "clip_low": (a < 0) & (d < -self.clip_low),
            "clip_high": (a > 0) & (d > self.clip_high),
        }
