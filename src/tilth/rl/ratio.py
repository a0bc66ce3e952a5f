"""Policy losses that look at one token at a time: its log-prob, its ratio to the old policy and its advantage."""

from typing import Any

import torch
from pydantic import Field

from tilth.rl.objectives import ClippedLoss, PolicyLoss, Step, TokenLosses, at_least_one
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

    def tokens(self, step: Step) -> TokenLosses:
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

    def tokens(self, step: Step) -> TokenLosses:
        """Loss of each token; share of tokens whose weight is held at the cap."""
        loss = -step.advantages * step.logprobs
        if not self.cap:
            return loss, {}
        return loss * step.ratio.detach().clamp(max=self.cap), {"truncated": step.ratio > self.cap}
