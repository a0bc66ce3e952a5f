"""Corrections for samples of another policy than the one that learns: importance weights and rejection.

mu is the rollout engine's policy, which sampled; old the trainer's at the start of the update; theta the policy under
update. Decoupled (three policies): the loss takes its ratio theta / old and each token has the weight old / mu. Bypass
(two): the loss takes its ratio to mu. Everything is computed once for a batch, in float64, and is constant.

Presets are those of verl's rollout correction (Liu et al. 2025, "When Speed Kills Stability"), over one set of options.
Weights: truncated (TIS), zero outside of an interval (IcePop), tokens or sequences left out (masked, MIS). Rejection by
statistics of k1, k2, k3, of sequences with a negative advantage, after the mask of DeepSeek-V3.2 (2512.02556), and of
tokens until the second moment of log rho over the global batch is small enough (M2PO, 2510.01161).

These two masks compare mu with theta at each optimizer step; ours compare mu with old, once, because the denominators
must be known before the first micro-batch. They agree at the first step on a batch. M2PO's objective is the published
one: 1 / tokens * sum(M r A) over all tokens, r without a bound. M is 0 at the farthest tokens, as in AReaL, but tokens
that the update brings back to mu stay, as in its authors' code.
"""

import math
from copy import copy
from dataclasses import dataclass
from typing import Any, Literal

import torch
from pydantic import Field, create_model
from torch import Tensor

from tilth.core.errors import RecipeError
from tilth.rl.metrics import STATISTICS, EffectiveShare, Gap, Metric
from tilth.rl.packing import Packing, Reduce, alone
from tilth.rl.policy_losses import PolicyLoss
from tilth.rl.registry import Entry, Scope, build, nearest, register, require

Threshold = float | tuple[float, float]


@dataclass(frozen=True)
class Correction:
    """Result of ``correct``; nothing in it has a gradient."""

    weights: Tensor | None
    """[total], factors of each token's loss, 0 where the given mask is; None: 1 everywhere."""
    mask: Tensor
    """bool [total]: the given mask without rejected tokens; the loss's denominators count it."""
    bypass: bool
    """The loss takes its ratio to ``rollout_logprobs`` instead of ``old_logprobs``."""
    metrics: dict[str, Metric]
    """``mismatch/...`` and ``correction/...``; parts that add up over workers and micro-batches."""


@dataclass(frozen=True)
class Sampled:
    """Input of a correction. gap: None without the trainer's log-probs; advantages: float64 [total]; versions: integers
    [total], of the policy that chose each token."""

    packing: Packing
    gap: Gap | None
    advantages: Tensor | None
    dtype: torch.dtype
    reduce: Reduce
    versions: Tensor | None = None


class CorrectionRule(Entry):
    """A correction: weights, tokens to leave out, and the policy that the ratio is taken to."""

    def apply(self, sampled: Sampled) -> Correction:
        """Return the correction of one worker's rows."""
        raise NotImplementedError

    def fits(self, loss: PolicyLoss) -> None:
        """Raise RecipeError unless this correction can be used with this policy loss."""


@register("corrections", "none")
class Uncorrected(CorrectionRule):
    """No correction; the gap is measured."""

    def apply(self, sampled: Sampled) -> Correction:
        return Correction(None, sampled.packing.mask, False, sampled.gap.metrics() if sampled.gap else {})


class Corrector(CorrectionRule):
    """All options. A preset is this class with other defaults."""

    level: Literal["none", "token", "sequence", "geometric"] = Field(
        "none", description="weight: rho = old / mu of each token, product over the sequence, or its geometric mean"
    )
    max_weight: float = Field(2.0, ge=0, description="upper bound of weights; 0: none")
    min_weight: float = Field(0.0, ge=0, description="lower bound of weights; 0: none")
    beyond: Literal["clip", "zero", "reject"] = Field(
        "clip", description="weights out of bounds: moved to them (TIS), 0 (IcePop), or their tokens left out (MIS)"
    )
    normalise: bool = Field(
        False,
        description="divide weights by their mean over the global batch, without those that beyond=reject leaves out",
    )
    reject: dict[str, Threshold] = Field(
        {},
        description="statistics and their bounds, all of which a token has to meet: k1 [lowest, highest] of mu / old "
        "(one number x: [1/x, x]), k2, k3 and binary a highest distance",
    )
    reject_negative: float | None = Field(
        None,
        ge=0,
        description="leave out sequences of negative advantage whose mean log(mu / old) is above this "
        "(DeepSeek-V3.2's mask takes the policy that moves in place of old)",
    )
    second_moment: float | None = Field(
        None,
        gt=0,
        description="of the tokens that the update pushes further from mu (advantage * log(old / mu) > 0), leave out "
        "the farthest, until the mean of log(old / mu)^2 over the others is at most this, in the global batch (M2PO)",
    )
    denominators: Literal["kept", "all"] = Field(
        "kept", description="the loss divides by the tokens and rows that are kept, or by all (the others weigh 0)"
    )
    bypass: bool = Field(False, description="two policies: the loss takes its ratio to mu, not to old")
    made_for: str = Field("", description="the policy loss it is made for; empty: any")

    def model_post_init(self, context: Any) -> None:
        """Raise RecipeError for options that contradict each other, and for bounds that nothing can meet."""
        idle = self.model_fields_set & {"max_weight", "min_weight", "beyond", "normalise"}
        if self.level == "none" and idle:
            raise RecipeError(
                f"{self.entry_name}: {min(idle)} is for weights, but level is none; set level=token, or sequence",
                key=f"{self.entry_name}.{min(idle)}",
            )
        if self.max_weight and self.min_weight > self.max_weight:
            raise RecipeError(
                f"{self.entry_name}: min_weight = {self.min_weight}: it must be at most max_weight = {self.max_weight}",
                key=f"{self.entry_name}.min_weight",
            )
        for statistic, threshold in self.reject.items():
            _check_threshold(self.entry_name, statistic, threshold)

    @property
    def revised(self) -> str:
        """Default that an earlier version of Tilth had otherwise, so that runs which began with it are others: M2PO's
        denominators, unless the recipe has them; "" without one."""
        by_default = self.second_moment is not None and "denominators" not in self.model_fields_set
        return f"denominators={self.denominators}" if by_default and self.denominators == "all" else ""

    @property
    def weighted(self) -> bool:
        """True if there are importance weights."""
        return self.level != "none"

    @property
    def rejects(self) -> bool:
        """True if tokens may be left out."""
        return bool(self.reject) or self.by_advantage or (self.weighted and self.beyond == "reject")

    @property
    def by_advantage(self) -> bool:
        """True if advantages decide what is left out."""
        return self.reject_negative is not None or self.second_moment is not None

    @property
    def needs(self) -> tuple[str, ...]:
        """Log-probs of mu, and of old except for a bypass that neither weights nor rejects."""
        measured = self.weighted or self.rejects or not self.bypass
        needed = ("rollout_logprobs", "old_logprobs") if measured else ("rollout_logprobs",)
        return (*needed, "advantages") if self.by_advantage else needed

    @property
    def scope(self) -> Scope:
        """Global moments for the mean of the weights and the second moment, else tokens alone."""
        return "global moments" if self.normalise or self.second_moment is not None else "token-local"

    def fits(self, loss: PolicyLoss) -> None:
        """Raise RecipeError if made for another loss, or if ratio and weights would both correct for mu."""
        name = loss.entry_name
        if self.made_for and name != self.made_for:
            raise RecipeError(
                f"{self.entry_name} is made for algorithm.loss={self.made_for}, not {name}", key="algorithm.loss"
            )
        if self.bypass and self.weighted and loss.takes_ratio:
            raise RecipeError(
                f"{self.entry_name}: the ratio of algorithm.loss={name} is taken to the sampling policy already, and "
                "weights would correct twice; set level=none, bypass=false, or algorithm.loss=reinforce without cap",
                key="algorithm.correction",
            )

    def apply(self, sampled: Sampled) -> Correction:
        """Compute weights over all tokens of the given mask, then rejections, each statistic over all of them too."""
        given, gap = sampled.packing.mask, sampled.gap
        if gap is None:
            return Correction(None, given, self.bypass, {})
        metrics, kept, weights = gap.metrics(), given, None
        if self.weighted:
            weights, inside, found = self._weigh(gap, sampled.reduce)
            kept, metrics = kept & inside, metrics | found
        for name, passes in self._tests(gap, sampled.advantages, sampled.reduce).items():
            kept = kept & passes
            metrics[f"correction/rejected/{name}"] = _share(given & ~passes, given)
        metrics["correction/rejected"] = _share(given & ~kept, given)
        of_rows = gap.packing.sum((~kept).double()) > 0
        metrics["correction/rejected_rows"] = _share(of_rows[gap.rows], gap.rows)
        if self.denominators == "all" and self.rejects:
            weights = torch.ones_like(gap.ours) if weights is None else weights
            weights, kept = torch.where(kept, weights, 0.0), given
        if weights is not None:
            weights = gap.packing.masked(weights).to(sampled.dtype)
        return Correction(weights, kept, self.bypass, metrics)

    def _weigh(self, gap: Gap, reduce: Reduce) -> tuple[Tensor, Tensor, dict[str, Metric]]:
        """Return weights [total], tokens that ``beyond`` does not reject (bool [total]), and metrics."""
        rho = gap.ratio(self.level)
        above, below = rho > (self.max_weight or torch.inf), rho < self.min_weight
        if self.beyond == "clip":
            bounded = rho.clamp(self.min_weight, self.max_weight or None)
        else:
            bounded = torch.where(above | below, 0.0, rho)
        kept = ~(above | below) if self.beyond == "reject" else torch.ones_like(above)
        spread = (lambda c: c) if self.level == "token" else gap.packing.spread
        mask, weights = gap.packing.mask, spread(bounded)
        metrics = {
            "weight": Metric(gap.packing.masked(weights).sum(), mask.sum(), "mean"),
            "effective": EffectiveShare.of_weights(weights, mask),
            "above": _share(mask & spread(above), mask),
            "below": _share(mask & spread(below), mask),
        }
        if self.normalise:
            scale = _mean(bounded[kept & (mask if self.level == "token" else gap.rows)], reduce)
            weights = weights / scale
            metrics["scale"] = Metric(scale, 1, "mean")
        return weights, spread(kept), {f"correction/{name}": metric for name, metric in metrics.items()}

    def _tests(self, gap: Gap, advantages: Tensor | None, reduce: Reduce) -> dict[str, Tensor]:
        """Return the tokens that meet each condition, bool [total]. NaN passes, so that the loss reports it."""
        found = {}
        for name, threshold in self.reject.items():
            low, high = _bounds(name, threshold)
            values = gap.statistic(name)
            found[name] = ~((values < low) | (values > high))
        if self.reject_negative is not None and advantages is not None:
            far = gap.mean(-gap.log_ratio) > self.reject_negative
            found["negative"] = ~gap.packing.spread(far & (gap.mean(advantages) < 0))
        if self.second_moment is not None and advantages is not None:
            further = gap.packing.mask & (advantages * gap.log_ratio > 0)
            found["second_moment"] = torch.ones_like(further)
            found["second_moment"][further] = _smallest(gap.log_ratio[further] ** 2, self.second_moment, reduce)
        return found


def _interval(statistic: str, threshold: Threshold) -> tuple[float, float]:
    """Return lowest and highest value: of the ratio mu / old for k1, else of the statistic."""
    if isinstance(threshold, tuple):
        return threshold
    lowest = -torch.inf if not statistic.endswith("_k1") else 1 / threshold if threshold else torch.inf
    return lowest, threshold


def _check_threshold(title: str, statistic: str, threshold: Threshold) -> None:
    if statistic not in STATISTICS:
        raise RecipeError(
            f"{title}: reject: no statistic {statistic!r}{nearest(statistic, STATISTICS)}",
            key=f"{title}.reject.{statistic}",
        )
    low, high = _interval(statistic, threshold)
    if statistic.endswith("_k1"):
        right, what = 0 < low < high, "[lowest, highest] of mu / old, above 0, or one number above 1"
    else:
        right, what = not isinstance(threshold, tuple) and high > 0, "one number above 0, the highest distance"
    if not right:
        raise RecipeError(
            f"{title}: reject.{statistic} = {threshold}: it must be {what}", key=f"{title}.reject.{statistic}"
        )


def _bounds(statistic: str, threshold: Threshold) -> tuple[float, float]:
    """Return lowest and highest value of the statistic itself, which for k1 is the logarithm of the ratio."""
    low, high = _interval(statistic, threshold)
    return (math.log(low), math.log(high)) if statistic.endswith("_k1") else (low, high)


def _mean(values: Tensor, reduce: Reduce) -> Tensor:
    """Return the mean of all workers' weights; 1 if none is above 0, so that it can divide."""
    total, count = reduce(torch.stack([values.sum(), values.new_tensor(float(len(values)))]))
    mean = total / count.clamp(min=1)
    return torch.where(mean > 1e-8, mean, 1.0)


def _smallest(values: Tensor, mean: float, reduce: Reduce) -> Tensor:
    """Return bool: the smallest values whose mean, over all workers, is at most ``mean``; equal values stay together.
    values: float64 [k], at least 0. The first value too many is found byte by byte, as non-negative floats have the
    order of their bits: 8 sums of 512 numbers, and no worker holds another's values."""
    bits, first, before = values.view(torch.int64), 0, values.new_zeros(2)
    for shift in range(56, -8, -8):
        inside = (bits >> shift >> 8) == first
        bins = values.new_zeros(2, 256)
        of_each = torch.stack([torch.ones_like(values), values])[:, inside]
        bins.index_add_(1, (bits[inside] >> shift) & 255, of_each)
        count, total = before[:, None] + reduce(bins.flatten()).view(2, 256).cumsum(1)
        within = int((total <= mean * count).sum())
        if within == 256:
            return bits >> shift >> 8 <= first
        first = first * 256 + within
        before = torch.stack([count, total])[:, within - 1] if within else before
    return bits < first


def _share(chosen: Tensor, given: Tensor) -> Metric:
    return Metric(chosen.sum().double(), given.sum(), "mean")


_TOKEN, _SEQUENCE = {"level": "token"}, {"level": "sequence"}
_ICEPOP = {"level": "token", "min_weight": 0.5, "max_weight": 5.0, "beyond": "zero"}
_GEO, _K3 = {"reject": {"seq_mean_k1": (0.999, 1.001)}}, {"reject": {"seq_mean_k3": 0.01}}
_CLIP, _PG = {"bypass": True, "made_for": "ppo_clip"}, {"bypass": True, "made_for": "reinforce"}


def _preset(defaults: dict[str, Any], description: str) -> type[Corrector]:
    """Return a subclass of ``Corrector`` with these defaults; types of fields stay."""
    fields: dict[str, Any] = {}
    for field, value in defaults.items():
        info = copy(Corrector.model_fields[field])
        info.default = value
        fields[field] = info.annotation, info
    return create_model("Preset", __base__=Corrector, __module__=__name__, __doc__=description, **fields)


# All but four are verl's, with its names and thresholds.
register("corrections", "custom")(_preset({}, "Nothing but what its options say."))
register("corrections", "decoupled_token_is")(_preset(_TOKEN, "Truncated weights of tokens (TIS)."))
register("corrections", "decoupled_seq_is")(_preset(_SEQUENCE, "Truncated weights of sequences."))
register("corrections", "decoupled_token_icepop")(
    _preset(_ICEPOP, "Weights of tokens, 0 outside of an interval (IcePop).")
)
register("corrections", "decoupled_seq_is_rs")(
    _preset(
        _SEQUENCE | {"reject": {"seq_sum_k1": (0.5, 2.0)}},
        "Truncated weights of sequences; those whose product is outside of an interval are left out.",
    )
)
register("corrections", "decoupled_geo_rs")(
    _preset(_GEO, "Sequences whose geometric mean of mu / old is outside of an interval are left out.")
)
register("corrections", "decoupled_geo_rs_seq_tis")(
    _preset(_GEO | _SEQUENCE, "decoupled_geo_rs with truncated weights of sequences.")
)
register("corrections", "decoupled_geo_rs_token_tis")(
    _preset(_GEO | _TOKEN, "decoupled_geo_rs with truncated weights of tokens.")
)
register("corrections", "decoupled_k3_rs")(_preset(_K3, "Sequences whose mean k3 is above a bound are left out."))
register("corrections", "decoupled_k3_rs_seq_tis")(
    _preset(_K3 | _SEQUENCE, "decoupled_k3_rs with truncated weights of sequences.")
)
register("corrections", "decoupled_k3_rs_token_tis")(
    _preset(_K3 | _TOKEN, "decoupled_k3_rs with truncated weights of tokens.")
)
register("corrections", "decoupled_seq_mis")(
    _preset(
        _SEQUENCE | {"beyond": "reject"},
        "Weights of sequences; those above the bound are left out (masked importance sampling, MIS). Not in verl.",
    )
)
register("corrections", "decoupled_negative")(
    _preset(
        {"reject_negative": 0.5},
        "Sequences of negative advantage that mu finds far likelier than old are left out (after DeepSeek-V3.2, whose "
        "mask compares mu with the policy that moves; the same at the first step on a batch). Not in verl.",
    )
)
register("corrections", "decoupled_m2po")(
    _preset(
        _TOKEN | {"max_weight": 0.0, "second_moment": 0.04, "denominators": "all"},
        "Weights of tokens without a bound; of the tokens that the update pushes further from mu the farthest weigh 0, "
        "until the second moment of log rho is small enough; the loss divides by all tokens (M2PO). Not in verl.",
    )
)
register("corrections", "bypass_ppo_clip")(_preset(_CLIP, "Two policies: the clipped ratio is taken to mu."))
register("corrections", "bypass_ppo_clip_geo_rs")(
    _preset(_CLIP | _GEO, "bypass_ppo_clip without the sequences that decoupled_geo_rs leaves out.")
)
register("corrections", "bypass_ppo_clip_k3_rs")(
    _preset(_CLIP | _K3, "bypass_ppo_clip without the sequences that decoupled_k3_rs leaves out.")
)
register("corrections", "bypass_pg_is")(_preset(_PG | _SEQUENCE, "REINFORCE with truncated weights of sequences."))
register("corrections", "bypass_pg_token_icepop")(
    _preset(_PG | _ICEPOP, "REINFORCE with weights of tokens, 0 outside of an interval.")
)
register("corrections", "bypass_pg_geo_rs")(
    _preset(_PG | _GEO, "REINFORCE without the sequences that decoupled_geo_rs leaves out.")
)
register("corrections", "bypass_pg_geo_rs_seq_tis")(
    _preset(_PG | _GEO | _SEQUENCE, "bypass_pg_geo_rs with truncated weights of sequences.")
)
register("corrections", "bypass_pg_geo_rs_token_tis")(
    _preset(_PG | _GEO | _TOKEN, "bypass_pg_geo_rs with truncated weights of tokens.")
)


def bypasses(name: str, **options: Any) -> bool:
    """True if the correction works without the trainer's log-probs of before the update."""
    return "old_logprobs" not in build("corrections", name, options, CorrectionRule).needs


@torch.no_grad()
def correct(
    name: str | CorrectionRule,
    *,
    rollout_logprobs: Tensor | None,
    old_logprobs: Tensor | None,
    mask: Tensor,
    lengths: Tensor,
    advantages: Tensor | None = None,
    versions: Tensor | None = None,
    reduce: Reduce = alone,
    **options: Any,
) -> Correction:
    """Return weights and mask for samples of one policy that another one learns from, and metrics of the gap.

    It is called once for a worker's rows of a batch, before they are split into micro-batches: the loss's denominators
    are made of ``Correction.mask`` (with ``denominators="all"`` that is the given mask, and what is rejected weighs 0).
    For a bypass, "old" is the trainer's policy at the start of the update too; verl takes the policy that moves, which
    is the same for the first optimizer step on a batch.

    Args:
        name: one of ``names()["corrections"]``.
        rollout_logprobs, old_logprobs: [total], of the sampling policy mu and of the trainer's at the start of the
            update. What they hold at masked positions does not matter. Without ``old_logprobs`` (``needs`` of the
            entry tells if that works) there are no metrics.
        mask: [total], not 0 where the token counts. lengths: integers [n].
        advantages: [total], for ``reject_negative``, where a sequence's is the mean over its tokens, and
            ``second_moment``.
        versions: [total], of the policy that chose each token, for rules that ask for them.
        reduce: sum over all workers, for ``normalise`` and ``second_moment``; all workers must call then, those without
            rows too.
        options: see ``options("corrections", name)``. Bounds of k1 are of mu / old, the inverse of the weight (verl).

    Where both log-probs are -inf, rho is 1; NaN at a token that counts passes through to weights and metrics, so that
    the loss reports it.

    Metrics, besides those of ``mismatch``: correction/weight, mean over tokens, and correction/effective, effective
    sample size over tokens, of bounded weights before ``normalise``; correction/above, correction/below, shares of
    tokens with a ratio out of bounds; correction/scale, what ``normalise`` divided by; correction/rejected, share of
    tokens left out; correction/rejected/STATISTIC, by each; correction/rejected_rows, share of rows that lost a token.

    Raises: RecipeError (unknown name or option, missing column), TokenCountError (a column of another size).
    """
    entry = build("corrections", name, options, CorrectionRule)
    given = {"rollout_logprobs": rollout_logprobs, "old_logprobs": old_logprobs, "advantages": advantages}
    given["versions"] = versions
    require(entry, [column for column, values in given.items() if values is not None])
    packing = Packing.of(lengths, mask)
    gap = None
    if old_logprobs is not None and rollout_logprobs is not None:
        gap = Gap.of(packing, old_logprobs, rollout_logprobs)
    if advantages is not None:
        advantages = packing.masked(packing.column("advantages", advantages)).to(torch.float64)
    dtype = torch.float64 if old_logprobs is not None and old_logprobs.dtype == torch.float64 else torch.float32
    return entry.apply(Sampled(packing, gap, advantages, dtype, reduce, versions))
