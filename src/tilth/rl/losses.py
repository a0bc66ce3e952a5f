"""Policy losses: per-token objectives to minimise, aggregated over one global denominator, with metrics that add up."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from tilth.core.errors import RecipeError
from tilth.rl.aggregation import Aggregation, reduce_tokens
from tilth.rl.kl import kl_penalty
from tilth.rl.metrics import Metric
from tilth.rl.packing import Packing
from tilth.rl.registry import Entry, build, lookup, nearest, register, require

LOG_RATIO_BOUND = 20.0


@dataclass(frozen=True)
class LossResult:
    """What ``policy_loss`` returns. Also readable as ``result["loss"]``."""

    loss: Tensor
    """One number with a gradient in ``logprobs``; 0, with the graph, where no token counts."""
    metrics: dict[str, Metric]
    """Parts that add up over micro-batches (``merge_metrics``); ``float(metric)`` is the value of this call."""

    def __getitem__(self, name: str) -> Any:
        if name not in self.__dataclass_fields__:
            raise KeyError(name)
        return getattr(self, name)


@dataclass(frozen=True)
class Step:
    """What a loss sees: packed columns [total], 0 at masked positions. Only ``logprobs`` has a gradient."""

    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    packing: Packing
    columns: Mapping[str, Tensor]

    @cached_property
    def log_ratio(self) -> Tensor:
        """log(policy / old policy), clamped to +-20."""
        return (self.logprobs - self.old_logprobs).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)

    @cached_property
    def ratio(self) -> Tensor:
        """policy / old policy."""
        return self.log_ratio.exp()


class PolicyLoss(Entry):
    """A loss. Common options: a KL penalty towards the reference, with the same aggregation, added to the loss."""

    kl: str = Field("k3", description="form of the KL penalty, one of names()['kl']")
    kl_coef: float = Field(0.0, ge=0, description="weight of the KL penalty; 0: none")

    @property
    def needs(self) -> tuple[str, ...]:
        """Log-probs of now and of the policy that the ratio is taken to, and advantages."""
        needed = ("logprobs", "old_logprobs", "advantages")
        return (*needed, "ref_logprobs") if self.kl_coef else needed

    def model_post_init(self, context: Any) -> None:
        """An unknown KL form is named before the run starts."""
        lookup("kl", self.kl)

    def tokens(self, step: Step) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of each token, and columns [total] whose mean over the tokens that count is a metric."""
        raise NotImplementedError


@register("losses", "ppo_clip")
class PpoClip(PolicyLoss):
    """PPO's clipped surrogate: max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)); where A < 0 at most -A dual_clip.

    PPO 1707.06347, dual clip 1912.09729, asymmetric clip (clip-higher) DAPO 2503.14476.
    """

    clip_low: float = Field(0.2, ge=0, description="lower clip range of the ratio; 1 or more: no lower bound")
    clip_high: float = Field(0.2, ge=0, description="upper clip range of the ratio")
    dual_clip: float | None = Field(None, ge=0, description="bound on the ratio where A < 0, at least 1; 0: none")

    def model_post_init(self, context: Any) -> None:
        """dual_clip is 0 or at least 1."""
        super().model_post_init(context)
        if self.dual_clip and self.dual_clip < 1:
            raise RecipeError(f"ppo_clip: dual_clip = {self.dual_clip}: it must be at least 1, or 0 for none")

    def tokens(self, step: Step) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of each token; shares of tokens whose gradient the clips take away."""
        ratio, advantages = step.ratio, step.advantages
        low, high = 1 - self.clip_low, 1 + self.clip_high
        loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(low, high))
        clipped = {"clip_low": (advantages < 0) & (ratio < low), "clip_high": (advantages > 0) & (ratio > high)}
        if self.dual_clip:
            clipped["clip_dual"] = (advantages < 0) & (ratio > self.dual_clip)
            loss = torch.where(advantages < 0, torch.minimum(loss, -advantages * self.dual_clip), loss)
        return loss, clipped


def policy_loss(
    name: str,
    *,
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    lengths: Tensor,
    aggregation: str = "token-mean",
    denominator: float | None = None,
    ref_logprobs: Tensor | None = None,
    rollout_logprobs: Tensor | None = None,
    **options: Any,
) -> LossResult:
    """The loss to minimise over packed sequences, and its metrics.

    Args:
        name: one of ``names()["losses"]``.
        logprobs, old_logprobs, advantages: [total]; of the policy now, of the policy that the ratio is taken to, and
            from ``estimate``. Only ``logprobs`` gets a gradient. What they hold at masked positions does not matter.
        mask: [total], not 0 where the token counts (``Estimate.mask``). lengths: integers [n].
        aggregation: one of ``names()["aggregations"]``.
        denominator: that of the global batch (``tilth.rl.denominator``), so that the losses of its micro-batches add up
            to its loss; None: this call sees the whole global batch.
        ref_logprobs: [total], for a KL penalty (options ``kl``, ``kl_coef``) and its metric.
        rollout_logprobs: [total], behaviour policy as the rollout engine computed it, for the metrics of the mismatch.
        options: those of the loss and of the aggregation.

    Metrics (means over tokens that count, if not said otherwise): ratio; approx_kl_k1, approx_kl_k3 (old || now);
    kl_ref; mismatch/mean (absolute), mismatch/k3, mismatch/max (maximum) of old_logprobs and rollout_logprobs; those
    of the loss: ppo_clip's clip_low, clip_high, clip_dual (shares of tokens).

    Raises: RecipeError (unknown name or option, missing column), TokenCountError (a column of another size).
    """
    packing = Packing.of(lengths, mask)
    given = {"ref_logprobs": ref_logprobs, "rollout_logprobs": rollout_logprobs}
    given |= {"logprobs": logprobs, "old_logprobs": old_logprobs, "advantages": advantages}
    entry, aggregate = _entries(name, aggregation, options)
    columns = {k: _column(packing, k, v) for k, v in given.items() if v is not None}
    require(name, entry, columns)
    step = Step(columns["logprobs"], columns["old_logprobs"], columns["advantages"], packing, columns)
    losses, means = entry.tokens(step)
    if "ref_logprobs" in columns:
        means["kl_ref"] = kl_penalty(entry.kl, step.logprobs, columns["ref_logprobs"])
    if entry.kl_coef:
        losses = losses + entry.kl_coef * means["kl_ref"]
    return LossResult(reduce_tokens(aggregate, losses, packing, denominator), _metrics(step, means))


def _entries(name: str, aggregation: str, options: dict[str, Any]) -> tuple[PolicyLoss, Aggregation]:
    """Share the options out; one that neither the loss nor the aggregation has is an error."""
    of_loss, of_aggregation = lookup("losses", name).model_fields, lookup("aggregations", aggregation).model_fields
    for option in options:
        if option not in of_loss and option not in of_aggregation:
            known = [*of_loss, *of_aggregation]
            raise RecipeError(f"{name} with {aggregation}: no option {option!r}{nearest(option, known)}")
    loss = build("losses", name, {k: v for k, v in options.items() if k in of_loss}, PolicyLoss)
    parts = {k: v for k, v in options.items() if k in of_aggregation}
    return loss, build("aggregations", aggregation, parts, Aggregation)


def _column(packing: Packing, name: str, values: Tensor) -> Tensor:
    """At least float32, 0 where masked (no NaN there may reach a value or a gradient), constant but for logprobs."""
    values = packing.masked(packing.column(name, values))
    values = values.float() if values.dtype in (torch.bfloat16, torch.float16) else values
    return values if name == "logprobs" else values.detach()


@torch.no_grad()
def _metrics(step: Step, means: Mapping[str, Tensor]) -> dict[str, Metric]:
    log_ratio = step.log_ratio
    columns = {"ratio": step.ratio, "approx_kl_k1": -log_ratio, "approx_kl_k3": step.ratio - 1 - log_ratio, **means}
    greatest = {}
    if "rollout_logprobs" in step.columns:
        gap = step.old_logprobs - step.columns["rollout_logprobs"]
        columns |= {"mismatch/mean": gap.abs(), "mismatch/k3": kl_penalty("k3", -gap, torch.zeros_like(gap))}
        greatest["mismatch/max"] = gap.abs()
    count = step.packing.mask.sum()
    stacked = torch.stack([step.packing.masked(c.to(step.ratio.dtype)) for c in columns.values()])
    sums = stacked.sum(1, dtype=torch.float64)
    metrics = {k: Metric(total, count, "mean") for k, total in zip(columns, sums)}
    for k, column in greatest.items():
        metrics[k] = Metric(torch.cat([step.packing.masked(column), column.new_zeros(1)]).max(), count, "max")
    return metrics
