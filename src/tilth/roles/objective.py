"""What an update minimises: the recipe's policy loss on one worker's rows of a batch, with the batch's denominators."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

import tilth.rl as rl
from tilth.core.batch import Jagged
from tilth.rl.algorithm import Algorithm
from tilth.roles.shares import Gather, GlobalDenominator, alone, global_denominator
from tilth.training.engine import Loss
from tilth.training.packed import MicroBatch

Metrics = dict[str, rl.Metric]
RIGHT = "right"
"""Column: 1 at the tokens of right answers, for the likelihood of those."""


@dataclass(frozen=True)
class Objective:
    """Makes the loss of one update. gather: numbers of the rows of all workers; found: of the loss's first pass."""

    how: Algorithm
    gather: Gather = alone
    found: Mapping[str, float] | None = None

    def of(self, mask: np.ndarray, tokens: Jagged, right: np.ndarray | None = None) -> tuple[Loss, float]:
        """The loss with the denominator of the whole batch, and the weight that all of its tokens have in it.

        mask: [N] of this worker's rows; right: [N], 1 at the tokens of right answers, where their likelihood counts.
        """
        how = self.how
        shared = global_denominator(how.aggregation, mask, tokens, self.gather)
        rights = 0.0 if right is None else max(float(self.gather(np.array([(right * mask).sum()])).sum()), 1.0)

        def loss(micro: MicroBatch) -> tuple[Tensor, Metrics]:
            found = self._policy(micro, shared)
            total, metrics = found.loss, found.metrics | shared.weight(micro)
            if how.keys.entropy_coef:
                total = total - how.keys.entropy_coef * shared.add_up(micro.entropy, micro)
            if rights:
                likelihood, nll = _likelihood(micro)
                total = total + how.keys.nll_coef * likelihood / rights
                metrics |= nll
            entropy = rl.Metric(float(micro.entropy.detach().sum()), float(micro.mask.sum()), "mean")
            return total, metrics | {"entropy": entropy}

        return loss, shared.whole

    def _policy(self, micro: MicroBatch, shared: GlobalDenominator) -> rl.LossResult:
        how, columns = self.how, micro.columns
        return rl.policy_loss(
            how.loss,
            logprobs=micro.logprobs,
            old_logprobs=columns.get(how.ratio_to, micro.logprobs.detach()),
            advantages=columns["advantages"],
            mask=micro.mask,
            lengths=micro.lengths,
            ref_logprobs=columns.get("ref_logprobs"),
            rollout_logprobs=columns.get("rollout_logprobs"),
            weights=columns.get("weights"),
            uniforms=columns.get("uniforms"),
            versions=columns.get("versions"),
            thresholds=self.found,
            aggregation=shared.aggregation,
            denominator=shared.denominator,
        )


def _likelihood(micro: MicroBatch) -> tuple[Tensor, Metrics]:
    """Sum of -log p over the tokens of right answers (VAPO 2504.05118, section 4.3), and their mean as a metric."""
    right = (micro.columns[RIGHT] != 0) & (micro.mask != 0)
    losses = torch.where(right, -micro.logprobs, 0.0)
    return losses.sum(), {"nll/right": rl.Metric(float(losses.detach().sum()), float(right.sum()), "mean")}
