"""Metrics that add up: each carries its parts and states how it is reduced, over micro-batches and workers alike."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tilth.core.errors import ArgumentError

Reduction = Literal["mean", "sum", "max"]


@dataclass(frozen=True)
class Metric:
    """A sum over ``count`` items (mean, sum), or a maximum. ``float(metric)`` is the value; NaN where count is 0."""

    total: float | Tensor
    count: float | Tensor
    reduction: Reduction

    def merge(self, other: "Metric") -> "Metric":
        """The metric of both parts together."""
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
    """Metrics of several micro-batches or workers as one; a name that only some have is merged over those."""
    merged: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
            merged[name] = merged[name].merge(metric) if name in merged else metric
    return merged
