"""Losses that need no reinforcement learning."""

from torch import Tensor

from tilth.rl.metrics import Metric
from tilth.training.engine import Loss
from tilth.training.packed import MicroBatch


def negative_log_likelihood(denominator: float) -> Loss:
    """Sum of -log p over the tokens in the mask, over ``denominator``: the count of such tokens in the whole batch."""

    def loss(micro: MicroBatch) -> tuple[Tensor, dict[str, Metric]]:
        return -micro.logprobs.sum() / max(denominator, 1.0), {}

    return loss
