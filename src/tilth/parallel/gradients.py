"""Gradients that only one rank holds: seen to be those that the backward pass left, when the optimizer takes them."""

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor, nn

_WHOLE = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of an element -> integers of that size."""


class GradientDigests:
    """Digests of gradients as backward passes leave them, one integer for each: any bit that flips changes it.

    What the program changes afterwards is left out, as a sum over ranks: torch counts such changes, not those of a
    memory that flips bits.
    """

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]], every: int = 1) -> None:
        """every: number of steps of which one is looked at."""
        self.every, self._looks = every, True
        self._left = dict[str, tuple[Tensor, int, Tensor]]()
        """Gradient, its version, and its digest."""
        for name, p in parameters:
            p.register_post_accumulate_grad_hook(partial(self._take, name))

    def begin(self, step: int) -> None:
        """Begin a step: forget all gradients."""
        self._looks = step % self.every == 0
        self._left.clear()

    def _take(self, name: str, p: Tensor) -> None:
        if self._looks and p.grad is not None and p.grad.numel():
            self._left[name] = p.grad, p.grad._version, digest(p.grad)

    def changed(self) -> str:
        """Return the name of a gradient that has other bits than when it was left, "" if none has; forget all."""
        left = [(name, now, then) for name, (now, version, then) in self._left.items() if now._version == version]
        self._left.clear()
        if not left:
            return ""
        differ = torch.stack([digest(now) - then for _, now, then in left]).tolist()
        return next((name for (name, _, _), other in zip(left, differ) if other), "")


def digest(x: Tensor) -> Tensor:
    """Return the sum of the bits of x as integers, without their carry: int64 []."""
    whole = _WHOLE[x.element_size()]
    return x.detach().view(whole).sum(dtype=whole).to(torch.int64)
