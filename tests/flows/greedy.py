"""A role that wants memory."""

import torch

from tilth.cluster.protocol import transfer
from tilth.cluster.worker.context import Context


class Greedy:
    """Takes as much as it is told to."""

    @transfer("all", "first")
    def take(self, nbytes: int) -> int:
        return len(torch.empty(nbytes, dtype=torch.uint8))


def greedy(context: Context) -> Greedy:
    return Greedy()
