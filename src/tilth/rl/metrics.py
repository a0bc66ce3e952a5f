"""Metrics that add up over micro-batches and workers, and those of the mismatch between trainer and rollout engine.

The engine samples from mu; the trainer computes other log-probs for the same tokens: other kernels or precision, newer
weights. rho = pi / mu is the ratio of the two; its logarithm is clamped to +-20 at a token, and over a row.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, Self

import torch
from torch import Tensor

from tilth.core.errors import ArgumentError
from tilth.rl.kl import kl_penalty
from tilth.rl.packing import Packing

Reduction = Literal["mean", "sum", "max"]


@dataclass(frozen=True)
class Metric:
    """A sum over ``count`` items (mean, sum), or a maximum. ``float(metric)`` is the value; NaN where count is 0."""

    total: float | Tensor
    count: float | Tensor
    reduction: Reduction

    def merge(self, other: "Metric") -> "Metric":
        """Return the metric of both parts together."""
        if self.reduction != other.reduction:
            raise ArgumentError(f"cannot merge a {self.reduction} with a {other.reduction}", key="other")
        if self.reduction == "max":
            total: float | Tensor = torch.maximum(torch.as_tensor(self.total), torch.as_tensor(other.total))
        else:
            total = self.total + other.total
        return Metric(total, self.count + other.count, self.reduction)

    def __float__(self) -> float:
        count = float(self.count)
        if count == 0:
            return float("nan")
        return float(self.total) / (count if self.reduction == "mean" else 1.0)


def merge_metrics(parts: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Merge metrics of several micro-batches or workers; a name that only some have is merged over those."""
    merged: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
            merged[name] = merged[name].merge(metric) if name in merged else metric
    return merged


BOUND = 20.0
"""Bound of |log rho|: exp(20) is 4.9e8."""
BINARY = 1e-6
"""Probabilities are kept this far from 0 and 1 where a binary KL divides by them."""

OF_TOKEN: Mapping[str, Callable[[Tensor], Tensor]] = {
    "k1": torch.neg,
    "k2": lambda d: 0.5 * d * d,
    "k3": lambda d: d.exp() - 1 - d,
}
"""Distance at a token as a function of d = log rho; each is 0 where the policies agree. k1 is -log rho, as in verl."""


@dataclass(frozen=True)
class SumsMetric(Metric):
    """Base of a metric that is a function of sums, so that merging is exact."""

    sums: Tensor = field(compare=False)

    @classmethod
    def of(cls, sums: Tensor) -> Self:
        """Compute from the sums, float64."""
        raise NotImplementedError

    def merge(self, other: Metric) -> Self:
        if not isinstance(other, type(self)):
            raise ArgumentError(f"cannot merge {type(self).__name__} with a {other.reduction}", key="other")
        return self.of(self.sums + other.sums)


class EffectiveShare(SumsMetric):
    """Effective sample size over the number of samples, mean(w)^2 / mean(w^2): 1 where all weights are equal.

    sums: float64 [3]: samples, weights, squared weights. Where no weight is above 0 it has no value (NaN, ``count`` 0).
    """

    @classmethod
    def of(cls, sums: Tensor) -> Self:
        count, weights, squares = sums
        counted = torch.where(squares == 0, 0.0, count)
        share = weights**2 / torch.where(squares == 0, 1.0, squares * count)
        return cls(share * counted, counted, "mean", sums)

    @classmethod
    def of_weights(cls, weights: Tensor, mask: Tensor) -> "EffectiveShare":
        """Compute from weights, float64 [total], at the tokens of the mask, bool [total]."""
        weights = torch.where(mask, weights, 0.0)
        return cls.of(torch.stack([mask.sum().double(), weights.sum(), (weights * weights).sum()]))


@dataclass(frozen=True)
class Gap:
    """Two policies at the same sampled tokens. ours, theirs: log-probs, float64 [total], 0 at masked positions."""

    packing: Packing
    ours: Tensor
    theirs: Tensor

    @classmethod
    def of(cls, packing: Packing, old_logprobs: Tensor, rollout_logprobs: Tensor) -> "Gap":
        """Build from two columns, whose masked values have no effect; TokenCountError names one of another size."""
        named = (("old_logprobs", old_logprobs), ("rollout_logprobs", rollout_logprobs))
        ours, theirs = (packing.masked(packing.column(k, v).detach().to(torch.float64)) for k, v in named)
        return cls(packing, ours, theirs)

    @cached_property
    def apart(self) -> Tensor:
        """log rho [total] before clamping; 0 where both policies give the token probability 0."""
        return torch.where(self.ours == self.theirs, 0.0, self.ours - self.theirs)

    @cached_property
    def log_ratio(self) -> Tensor:
        """log rho [total], clamped."""
        return self.apart.clamp(-BOUND, BOUND)

    @cached_property
    def rows(self) -> Tensor:
        """bool [n]: rows with a token that counts."""
        return self.packing.counts > 0

    def mean(self, values: Tensor) -> Tensor:
        """Return the mean of a column [total] over the tokens that count in each row [n]; 0 of a row without any."""
        return self.packing.sum(values) / self.packing.counts.clamp(min=1)

    def ratio(self, level: str) -> Tensor:
        """Return rho of each token [total], or of each row [n]: product (sequence) or geometric mean (geometric)."""
        if level == "token":
            return self.log_ratio.exp()
        rows = self.packing.sum(self.log_ratio) if level == "sequence" else self.mean(self.log_ratio)
        return rows.clamp(-BOUND, BOUND).exp()

    def statistic(self, name: str) -> Tensor:
        """Return one of ``STATISTICS`` at each token [total]; a statistic of a row is the same at all of its tokens."""
        if name == "token_binary":
            return torch.maximum(_binary_kl(self.ours, self.theirs), _binary_kl(self.theirs, self.ours))
        over, _, form = name.rpartition("_")
        values = OF_TOKEN[form](self.log_ratio)
        return values if over == "token" else self.packing.spread(self._over_rows(over, values))

    def _over_rows(self, over: str, values: Tensor) -> Tensor:
        if over == "seq_sum":
            return self.packing.sum(values)
        if over == "seq_mean":
            return self.mean(values)
        lengths, masked = self.packing.lengths, self.packing.masked(values)
        return torch.segment_reduce(masked, "max", lengths=lengths, axis=0, initial=0, unsafe=True)

    def metrics(self) -> dict[str, Metric]:
        """Return the metrics that ``mismatch`` documents."""
        packing, rho = self.packing, self.log_ratio.exp()
        tokens = {
            "kl": -self.log_ratio,
            "k3": kl_penalty("k3", -self.log_ratio, torch.zeros_like(rho)),
            "mean": self.apart.abs(),
            "chi2_token": rho * rho - 1,
        }
        further = -self.mean(self.log_ratio)
        rows = {
            "training_ppl": (-self.mean(self.ours)).exp(),
            "rollout_ppl": (-self.mean(self.theirs)).exp(),
            "log_ppl_diff": further,
            "ppl_ratio": further.exp(),
            "chi2_seq": self.ratio("sequence") ** 2 - 1,
        }
        found = {k: Metric(packing.masked(v).sum(), packing.mask.sum(), "mean") for k, v in tokens.items()}
        found |= {k: Metric(torch.where(self.rows, v, 0.0).sum(), self.rows.sum(), "mean") for k, v in rows.items()}
        greatest = torch.cat([packing.masked(self.apart.abs()), rho.new_zeros(1)]).max()
        found["max"] = Metric(greatest, packing.mask.sum(), "max")
        found["effective"] = EffectiveShare.of_weights(rho, packing.mask)
        return {f"mismatch/{name}": metric for name, metric in found.items()}


STATISTICS = (
    *(f"{over}_{form}" for over in ("token", "seq_sum", "seq_mean") for form in OF_TOKEN),
    *("seq_max_k2", "seq_max_k3", "token_binary"),
)
"""Statistics for rejection, with verl's names (its ``binary_kl`` is ``token_binary``)."""


def _binary_kl(of: Tensor, to: Tensor) -> Tensor:
    """Return the KL between the binary distributions (sampled token, any other token)."""
    p, q = (logprobs.exp().clamp(BINARY, 1 - BINARY) for logprobs in (of, to))
    return p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()


@torch.no_grad()
def mismatch(*, old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, lengths: Tensor) -> dict[str, Metric]:
    """Return diagnostics of the gap between trainer and rollout engine, exact over micro-batches and workers.

    old_logprobs, rollout_logprobs: [total], of the trainer's policy pi and of the engine's mu; mask: [total], not 0
    where the token counts; lengths: integers [n]. What columns hold at masked positions does not matter.

    Of tokens: mismatch/kl, mean of -log rho, which is KL(mu || pi) on samples of mu; mismatch/k3, the same estimated as
    k3 (clamped at 10); mismatch/mean and mismatch/max of |log rho|; mismatch/chi2_token, mean of rho^2 - 1;
    mismatch/effective, effective sample size of weights rho, over the number of tokens.

    Of rows with a token that counts: mismatch/training_ppl and mismatch/rollout_ppl, mean of a row's perplexity under
    pi and mu; mismatch/log_ppl_diff, mean of the logarithm of their ratio, and mismatch/ppl_ratio, mean of the ratio;
    mismatch/chi2_seq, mean of (product of rho)^2 - 1. Definitions are those of verl's rollout correction, but that rows
    without tokens stay out, and that log rho is clamped before anything but mean and max.

    Raises: TokenCountError (a column of another size).
    """
    return Gap.of(Packing.of(lengths, mask), old_logprobs, rollout_logprobs).metrics()
