"""Policy losses that look at one token at a time: its log-prob, its ratio to the old policy and its advantage."""

from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from tilth.rl.loss_base import ClippedLoss, LossInputs, PolicyLoss, TokenLosses, at_least_one
from tilth.rl.registry import register


@register("losses", "ppo_clip")
class PpoClip(ClippedLoss):
    """PPO's clipped surrogate: max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)); where A < 0 at most -A dual_clip.

    PPO 1707.06347, dual clip 1912.09729 (verl and slime: 3, here off), asymmetric clip (clip-higher) DAPO 2503.14476.
    """

    dual_clip: float | None = Field(None, ge=0, description="bound on the ratio where A < 0, at least 1; 0: none")

    def model_post_init(self, context: Any) -> None:
        """dual_clip is 0 or at least 1."""
        super().model_post_init(context)
        at_least_one("ppo_clip", "dual_clip", self.dual_clip)

    def tokens(self, step: LossInputs) -> TokenLosses:
        """Loss of each token; shares of tokens whose gradient the clips take away."""
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

    cap: float | None = Field(None, ge=0, description="bound on the importance weight, at least 1; 0: no weight")

    def model_post_init(self, context: Any) -> None:
        """The cap is 0 or at least 1."""
        super().model_post_init(context)
        at_least_one("reinforce", "cap", self.cap)

    @property
    def takes_ratio(self) -> bool:
        """With ``cap``, as a weight."""
        return bool(self.cap)

    def tokens(self, step: LossInputs) -> TokenLosses:
        """Loss of each token; share of tokens whose weight is held at the cap."""
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
        """Loss of each token."""
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
    cap: float | None = Field(None, ge=0, description="greatest weight, in place of both clips; 0: none")

    def model_post_init(self, context: Any) -> None:
        """The cap is 0 or at least 1."""
        super().model_post_init(context)
        at_least_one("cispo", "cap", self.cap)

    def tokens(self, step: LossInputs) -> TokenLosses:
        """Loss of each token; shares of tokens whose weight is held at a bound, whatever the advantage."""
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
        """Loss of each token."""
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
        """Loss of each token."""
        return -step.advantages * step.logprobs + 0.5 * self.beta * step.log_ratio.square(), {}


class _Dppo(PolicyLoss):
    """Divergence PPO (2602.04879): -w A log pi, w = min(r, cap) constant, without tokens that went too far already.

    Too far: the probability of the token moved in the direction of its advantage by more than the divergence allows.
    """

    cap: float | None = Field(20.0, ge=0, description="bound on the weight, at least 1 (3 in verl's recipes); 0: none")

    def model_post_init(self, context: Any) -> None:
        """The cap is 0 or at least 1."""
        super().model_post_init(context)
        at_least_one("dppo", "cap", self.cap)

    def outside(self, now: Tensor, old: Tensor, step: LossInputs) -> tuple[Tensor, Tensor]:
        """bool [total] each: probability is too far below, and too far above that of the old policy."""
        raise NotImplementedError

    def tokens(self, step: LossInputs) -> TokenLosses:
        """Loss of each token; shares of tokens left out where A <= 0 and A > 0, and at the cap."""
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
        """By the difference of probabilities."""
        return now - old < -self.tv_low, now - old > self.tv_high


@register("losses", "dppo_kl")
class DppoKl(_Dppo):
    """DPPO with KL(old || pi) of (token, any other token) (2602.04879, eq. 14); 1e-8 keeps its logarithms finite."""

    kl_low: float = Field(0.05, ge=0, description="KL (nats) up to which a probability may fall where A <= 0")
    kl_high: float = Field(0.05, ge=0, description="KL (nats) up to which a probability may rise where A > 0")

    def outside(self, now: Tensor, old: Tensor, step: LossInputs) -> tuple[Tensor, Tensor]:
        """By the binary KL and the direction."""
        others = torch.log(((1 - old).clamp(min=0) + 1e-8) / ((1 - now).clamp(min=0) + 1e-8))
        kl = -old * step.log_ratio.detach() + (1 - old) * others
        return (kl > self.kl_low) & (now < old), (kl > self.kl_high) & (now > old)
