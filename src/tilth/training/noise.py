"""The gradient noise scale: the batch size, in sequences, at which a gradient is half noise.

McCandlish et al. 2018 (arXiv 1812.06162), appendix A.1: from the norms of gradients of a small and of a large batch.
Here the small ones are a step's micro-batches, which are there anyway, and they need not be of equal size.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

Gather = Callable[[Mapping[str, np.ndarray]], dict[str, np.ndarray]]
"""Concatenates arrays [n] of every rank (``parallel.ParallelDims.gather_rows``)."""
WEIGHT = "weight"
"""Metric with the share of a micro-batch in the loss, in any unit; without it, its tokens in the mask."""
DECAY = 0.98
"""Decay of the averages over steps; one step's estimate is too noisy to divide by."""


class NoiseEstimate(NamedTuple):
    """Estimate of one step or averaged over steps. Both numbers are unbiased, so ``signal`` may be negative."""

    trace: float
    """Trace of the covariance of one sequence's gradient."""
    signal: float
    """Squared norm of the true gradient."""


def estimate(squares: Sequence[float], weights: Sequence[float], whole: float, sequences: int) -> NoiseEstimate | None:
    """Estimate from squared norms of the gradients of a batch's parts, and of the ``whole`` batch's, which is their
    sum.

    weights: each part's share of the loss, in any unit. A batch of B sequences is the mean of B draws G + noise, so a
    part with share p is p (G + noise of covariance Sigma / (p B)), and

        sum over k parts of |g|^2 / p  -  |whole|^2   has the mean   (k - 1) tr(Sigma) / B

    (a sum of squares between parts, so never negative); |whole|^2 itself has the mean |G|^2 + tr(Sigma) / B. For equal
    parts these are the paper's estimates. None if fewer than two parts weigh anything.
    """
    parts = [(s, w) for s, w in zip(squares, weights) if w > 0]
    if len(parts) < 2:
        return None
    total = sum(w for _, w in parts)
    between = sum(s * total / w for s, w in parts) - whole
    trace = sequences * between / (len(parts) - 1)
    return NoiseEstimate(trace, whole - trace / sequences)


class NoiseScale:
    """Gradient noise scale: collects a step's parts, and averages trace and signal separately over steps."""

    def __init__(self, decay: float = DECAY) -> None:
        self.decay = decay
        self._squares: list[Tensor] = []
        self._weights: list[float] = []
        self.begin()

    def begin(self) -> None:
        """Drop all steps: a new phase."""
        self._seen = self._trace = self._signal = 0.0
        self.forget()

    def position(self) -> dict[str, float]:
        """Return the averages, for a checkpoint."""
        return {"noise_seen": self._seen, "noise_trace": self._trace, "noise_signal": self._signal}

    def restore(self, position: Mapping[str, float]) -> None:
        """Restore what ``position`` returned; start anew if the checkpoint has no averages."""
        self._seen, self._trace, self._signal = (position.get(name, 0.0) for name in self.position())

    @contextmanager
    def part(self, parameters: Sequence[Tensor], weight: float) -> Iterator[None]:
        """Measure the gradient of the backward pass in the block, then add it to the earlier ones.

        The addition is the one that autograd would make, so no bit of the whole gradient changes. Needs memory for the
        gradients a second time.
        """
        before = [p.grad for p in parameters]
        for p in parameters:
            p.grad = None
        yield
        fresh = [p.grad for p in parameters if p.grad is not None]
        if fresh:
            self._squares.append(torch.stack(torch._foreach_norm(fresh)).double().square().sum())
            self._weights.append(weight)
        both = [(old, p.grad) for old, p in zip(before, parameters) if old is not None and p.grad is not None]
        if both:
            torch._foreach_add_([old for old, _ in both], [new for _, new in both])
        for old, p in zip(before, parameters):
            p.grad = p.grad if old is None else old

    def take(self, norm: float, sequences: int, gather: Gather | None = None) -> NoiseEstimate | None:
        """Average in the step's parts, whose sum has this norm. None before the first estimate.

        gather: concatenates the parts of all data ranks.
        """
        squares = torch.stack(self._squares).tolist() if self._squares else []
        parts = {"squares": np.array(squares, np.float64), "weights": np.array(self._weights, np.float64)}
        parts = parts if gather is None else gather(parts)
        found = estimate(parts["squares"].tolist(), parts["weights"].tolist(), norm * norm, sequences)
        self.forget()
        if found is not None and all(map(math.isfinite, found)):
            self._seen = self.decay * self._seen + 1 - self.decay
            self._trace = self.decay * self._trace + (1 - self.decay) * found.trace
            self._signal = self.decay * self._signal + (1 - self.decay) * found.signal
        return NoiseEstimate(self._trace / self._seen, self._signal / self._seen) if self._seen else None

    def forget(self) -> None:
        """Drop the parts of the step under way."""
        self._squares, self._weights = [], []
