"""What a policy loss is made of: the columns it sees, its common options, and its first pass over the whole batch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from pydantic import Field
from torch import Tensor

from tilth.core.errors import RecipeError
from tilth.rl.packing import Gather, Packing, Reduce
from tilth.rl.registry import Entry, Scope, lookup

LOG_RATIO_BOUND = 20.0

TokenLosses = tuple[Tensor, dict[str, Tensor]]
"""Loss of each token [total], and columns [total] whose mean over the tokens that count is a metric."""


@dataclass(frozen=True)
class LossInputs:
    """What a loss sees: packed columns [total], 0 at masked positions. Only ``logprobs`` has a gradient."""

    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    packing: Packing
    columns: Mapping[str, Tensor]
    thresholds: Mapping[str, float] = field(default_factory=dict)
    """What the first pass over the whole batch found, for losses that have one."""

    @cached_property
    def log_ratio(self) -> Tensor:
        """log(policy / old policy), clamped to +-20."""
        return (self.logprobs - self.old_logprobs).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)

    @cached_property
    def ratio(self) -> Tensor:
        """policy / old policy."""
        return self.log_ratio.exp()

    def row_mean(self, values: Tensor) -> Tensor:
        """Mean of a column [total] over the tokens of each row that count, [n]; 0 where there is none."""
        return self.packing.sum(values) / self.packing.counts.clamp(min=1).to(values.dtype)


class PolicyLoss(Entry):
    """A loss. Common options: a KL penalty towards the reference, with the same aggregation, added to the loss."""

    kl: str = Field("k3", description="form of the KL penalty, one of names()['kl']")
    kl_coef: float = Field(0.0, ge=0, description="weight of the KL penalty; 0: none")

    @property
    def needs(self) -> tuple[str, ...]:
        """Log-probs of now and of the policy that the ratio is taken to, and advantages."""
        needed = ("logprobs", "old_logprobs", "advantages")
        return (*needed, "ref_logprobs") if self.kl_coef else needed

    @property
    def scope(self) -> Scope:
        """A first pass needs the moments of the global batch."""
        return "global moments" if self.first_pass else "token-local"

    @property
    def aggregation(self) -> str:
        """The aggregation it was published with: what it gets where none is asked for."""
        return "token-mean"

    @property
    def takes_ratio(self) -> bool:
        """Whether the ratio to the old policy is in the loss: where that is the policy that sampled, importance weights
        towards it would correct twice."""
        return True

    @property
    def first_pass(self) -> bool:
        """Whether it needs ``tilth.rl.thresholds`` over the whole batch before the split into micro-batches."""
        return False

    def model_post_init(self, context: Any) -> None:
        """An unknown KL form is named before the run starts."""
        lookup("kl", self.kl)

    def tokens(self, step: LossInputs) -> TokenLosses:
        """Loss of each token, and columns [total] whose mean over the tokens that count is a metric."""
        raise NotImplementedError

    def thresholds(self, step: LossInputs, reduce: Reduce, gather: Gather) -> dict[str, float]:
        """The first pass: numbers that are the same on all workers, whatever the split. Without gradients."""
        return {}


class ClippedLoss(PolicyLoss):
    """A loss that clips the ratio to [1 - clip_low, 1 + clip_high], as PPO does."""

    clip_low: float = Field(0.2, ge=0, description="lower clip range of the ratio; 1 or more: no lower bound")
    clip_high: float = Field(0.2, ge=0, description="upper clip range of the ratio")

    def clipped(self, ratio: Tensor, advantages: Tensor) -> TokenLosses:
        """PPO's surrogate max(-A r, -A clip(r)), and the tokens whose gradient the clips take away."""
        low, high = 1 - self.clip_low, 1 + self.clip_high
        loss = (-advantages * ratio).maximum(-advantages * ratio.clamp(low, high))
        return loss, {"clip_low": (advantages < 0) & (ratio < low), "clip_high": (advantages > 0) & (ratio > high)}


def at_least_one(name: str, option: str, value: float | None) -> None:
    """RecipeError unless a bound on the ratio is none (None or 0) or at least 1."""
    if value and value < 1:
        raise RecipeError(f"{name}: {option} = {value}: it must be at least 1, or 0 for none", key=f"{name}.{option}")
