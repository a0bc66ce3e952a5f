"""Policy losses: per-token objectives to minimise, aggregated over one global denominator, with metrics that add up."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tilth.core.errors import RecipeError
from tilth.rl.aggregation import Aggregation, reduce_tokens
from tilth.rl.kl import kl_penalty
from tilth.rl.metrics import Gap, Metric
from tilth.rl.packing import Gather, Packing, Reduce, alone, rows_alone
from tilth.rl.policy_losses import LossInputs, PolicyLoss
from tilth.rl.registry import build, lookup, nearest, require


@dataclass(frozen=True)
class LossResult:
    """Result of ``policy_loss``; ``result["loss"]`` works too."""

    loss: Tensor
    """Scalar with a gradient in ``logprobs``; 0, with the graph, if no token counts."""
    metrics: dict[str, Metric]
    """Parts that add up over micro-batches (``merge_metrics``); ``float(metric)`` is the value of this call."""

    def __getitem__(self, name: str) -> Any:
        if name not in self.__dataclass_fields__:
            raise KeyError(name)
        return getattr(self, name)


def policy_loss(
    name: str | PolicyLoss,
    *,
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    lengths: Tensor,
    aggregation: str | Aggregation = "",
    denominator: float | None = None,
    ref_logprobs: Tensor | None = None,
    rollout_logprobs: Tensor | None = None,
    weights: Tensor | None = None,
    uniforms: Tensor | None = None,
    versions: Tensor | None = None,
    thresholds: Mapping[str, float] | None = None,
    **options: Any,
) -> LossResult:
    """Return the loss to minimise over packed sequences, and its metrics.

    Args:
        name: one of ``names()["losses"]``, or an entry.
        logprobs, old_logprobs, advantages: [total]; of the policy now, of the policy that the ratio is taken to, and
            from ``estimate``. Only ``logprobs`` gets a gradient. What they hold at masked positions does not matter.
        mask: [total], not 0 where the token counts (``Estimate.mask``). lengths: integers [n].
        aggregation: one of ``names()["aggregations"]``; "": the loss's own (``PolicyLoss.aggregation``).
        denominator: that of the global batch (``tilth.rl.denominator``), so that the losses of its micro-batches add up
            to its loss; None: this call sees the whole global batch.
        ref_logprobs: [total], for a KL penalty (options ``kl``, ``kl_coef``) and its metric.
        rollout_logprobs: [total], behaviour policy as the rollout engine computed it, for the metrics of the mismatch
            with old_logprobs; with logprobs where both are the same tensor, so that the ratio is taken to it (bypass).
        weights: [total], constants that multiply the loss of each token (importance weights of ``tilth.rl.correct``),
            not its KL penalty towards the reference.
        uniforms: [total], counted random numbers in [0, 1), for losses that choose tokens at random.
        versions: [total], of the policy that chose each token.
        thresholds: what ``tilth.rl.thresholds`` found in the whole batch, for losses with a first pass; a call that
            sees the whole global batch makes them itself.
        options: those of the loss and of the aggregation.

    Metrics (means over tokens that count, unless stated otherwise): ratio; approx_kl_k1, approx_kl_k3 (old || now);
    kl_ref; those of ``mismatch`` for old_logprobs and rollout_logprobs; those of the loss (shares of tokens): clip_low,
    clip_high, clip_dual, truncated, selected.

    Raises: RecipeError (unknown name or option, missing column or first pass), TokenCountError (a column of another
    size).
    """
    packing = Packing.of(lengths, mask)
    given = {"ref_logprobs": ref_logprobs, "rollout_logprobs": rollout_logprobs, "weights": weights}
    given |= {"logprobs": logprobs, "old_logprobs": old_logprobs, "advantages": advantages, "uniforms": uniforms}
    given["versions"] = versions
    entry, aggregate = _entries(name, aggregation, options)
    columns = {k: _column(packing, k, v) for k, v in given.items() if v is not None}
    require(entry, columns)
    step = _step(packing, columns)
    step = replace(step, thresholds=_found(entry, step, thresholds, denominator))
    losses, means = entry.tokens(step)
    losses = losses * columns["weights"] if "weights" in columns else losses
    if "ref_logprobs" in columns:
        means["kl_ref"] = kl_penalty(entry.kl, step.logprobs, columns["ref_logprobs"])
    if entry.kl_coef:
        losses = losses + entry.kl_coef * means["kl_ref"]
    metrics = _metrics(step, means)
    if rollout_logprobs is not None:
        ours = step.logprobs if old_logprobs is rollout_logprobs else step.old_logprobs
        metrics |= Gap.of(packing, ours, columns["rollout_logprobs"]).metrics()
    return LossResult(reduce_tokens(aggregate, losses, packing, denominator), metrics)


def thresholds(
    name: str | PolicyLoss,
    *,
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    lengths: Tensor,
    uniforms: Tensor | None = None,
    reduce: Reduce = alone,
    gather: Gather = rows_alone,
    **options: Any,
) -> dict[str, float]:
    """Run the first pass of a loss over a worker's rows of the whole (mini-)batch; {} for losses that need none.

    The numbers are the same on every worker. Whatever the split into workers, they are the same bits: sums over rows
    are rounded once, and the k-th best token is found among the best of every worker. Where a batch is spread over
    workers, every worker calls it, those without rows too. No gradient is kept.

    Args: as in ``policy_loss``; logprobs are those of the policy that the loss will see first.
        reduce: sums a float64 vector over workers (``ParallelDims.sum``).
        gather: row columns of all workers (``ParallelDims.gather_rows``).
        options: those of the loss.

    Raises: RecipeError (unknown name or option, missing column), TokenCountError (a column of another size).
    """
    entry = build("losses", name, options, PolicyLoss)
    if not entry.first_pass:
        return {}
    packing = Packing.of(lengths, mask)
    given = {"logprobs": logprobs, "old_logprobs": old_logprobs, "advantages": advantages, "uniforms": uniforms}
    columns = {k: _column(packing, k, v).detach() for k, v in given.items() if v is not None}
    require(entry, [*columns, "ref_logprobs"])
    return entry.thresholds(_step(packing, columns), reduce, gather)


def loss_entry(name: str, **options: Any) -> PolicyLoss:
    """Return the loss with these options.

    Raises: RecipeError (unknown name or option, a value out of range).
    """
    return build("losses", name, options, PolicyLoss)


def _found(
    entry: PolicyLoss, step: LossInputs, found: Mapping[str, float] | None, denominator: float | None
) -> Mapping[str, float]:
    """Return the results of the first pass; compute them if this call sees the whole batch."""
    if found is not None or not entry.first_pass:
        return found or {}
    if denominator is not None:
        name = entry.entry_name
        raise RecipeError(
            f"{name} needs a first pass over the whole batch; pass thresholds=tilth.rl.thresholds({name!r}, ...)",
            key="thresholds",
        )
    constant = replace(step, logprobs=step.logprobs.detach())
    return entry.thresholds(constant, alone, rows_alone)


def _step(packing: Packing, columns: dict[str, Tensor]) -> LossInputs:
    return LossInputs(columns["logprobs"], columns["old_logprobs"], columns["advantages"], packing, columns)


def _entries(
    name: str | PolicyLoss, aggregation: str | Aggregation, options: dict[str, Any]
) -> tuple[PolicyLoss, Aggregation]:
    """Split the options between loss and aggregation; an option that neither has is an error."""
    if isinstance(name, PolicyLoss) or isinstance(aggregation, Aggregation):
        loss = build("losses", name, options, PolicyLoss)
        return loss, build("aggregations", aggregation or loss.aggregation, {}, Aggregation)
    of_loss = lookup("losses", name).model_fields
    loss = loss_entry(name, **{k: v for k, v in options.items() if k in of_loss})
    aggregation = aggregation or loss.aggregation
    of_aggregation = lookup("aggregations", aggregation).model_fields
    for option in options:
        if option not in of_loss and option not in of_aggregation:
            known = [*of_loss, *of_aggregation]
            raise RecipeError(
                f"{name} with {aggregation}: no option {option!r}{nearest(option, known)}", key=f"{name}.{option}"
            )
    parts = {k: v for k, v in options.items() if k in of_aggregation}
    return loss, build("aggregations", aggregation, parts, Aggregation)


def _column(packing: Packing, name: str, values: Tensor) -> Tensor:
    """Convert to at least float32, 0 where masked (no NaN may reach a gradient); detach all but logprobs."""
    values = packing.masked(packing.column(name, values))
    values = values.float() if values.dtype in (torch.bfloat16, torch.float16) else values
    return values if name == "logprobs" else values.detach()


@torch.no_grad()
def _metrics(step: LossInputs, means: Mapping[str, Tensor]) -> dict[str, Metric]:
    log_ratio = step.log_ratio
    columns = {"ratio": step.ratio, "approx_kl_k1": -log_ratio, "approx_kl_k3": step.ratio - 1 - log_ratio, **means}
    count = step.packing.mask.sum()
    stacked = torch.stack([step.packing.masked(c.to(step.ratio.dtype)) for c in columns.values()])
    sums = stacked.sum(1, dtype=torch.float64)
    return {k: Metric(total, count, "mean") for k, total in zip(columns, sums)}
