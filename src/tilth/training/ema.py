"""An exponential moving average of the weights: smoother than the last step's (as in arXiv 1703.01780)."""

from collections.abc import Mapping

import torch
from torch import Tensor


class Average:
    """fp32 copies of parameters that follow them: after each step, ``decay`` of the average and the rest of the new.

    It begins as a copy of the weights, not as zeros, so there is no bias to correct. decay: 0 is no average at all, and
    holds no memory; 1 stays at the beginning.
    """

    def __init__(self, parameters: Mapping[str, Tensor], decay: float) -> None:
        self.decay = decay
        self._parameters = dict(parameters) if decay else {}
        self.tensors = {name: p.detach().float().clone() for name, p in self._parameters.items()}
        """The average by parameter name, live: for saving, and for restoring in place."""

    @torch.no_grad()
    def begin(self) -> None:
        """Start again from the weights of now."""
        for name, average in self.tensors.items():
            average.copy_(self._parameters[name])

    @torch.no_grad()
    def follow(self) -> None:
        """One step towards the weights of now: average += (1 - decay) (weights - average)."""
        if self.tensors:
            live = [p.float() for p in self._parameters.values()]
            torch._foreach_lerp_(list(self.tensors.values()), live, 1 - self.decay)
