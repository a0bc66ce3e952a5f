"""Low-rank adapters of linear layers (LoRA, arXiv 2106.09685): applied, merged into weights, read and written."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class LinearChange(nn.Module):
    """Change of what a linear layer computes (``Linear.lora``)."""

    @abstractmethod
    def changed(self, product: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return x [N, in] through the changed layer: [N, out]. product: (x, weight, bias) -> the plain layer's."""

    @abstractmethod
    def add_(self, found: Tensor, x: Tensor) -> None:
        """Add the change to the plain layer's result ``found`` [N, out] of x [N, in]; for inference."""


class Adapter(LinearChange):
    """Change of a layer's weight by scale B A: A [rank, in], B [out, rank], of stacked experts [experts, ...] each.

    merges: compute with the sum W + scale B A, as a generation engine holds it (``train.parity``), instead of adding
    two small products. dropout: of the input of A. name, width: of the layer in the whole model, and of its input.
    """

    A: nn.Parameter
    B: nn.Parameter

    def __init__(
        self, scale: float, *, merges: bool = False, dropout: float = 0.0, name: str = "", width: int = 0
    ) -> None:
        super().__init__()
        self.register_parameter("A", None)
        self.register_parameter("B", None)
        self.scale, self.merges = scale, merges
        self.dropout, self.name, self.width = dropout, name, width
        self.part = 0
        """Number of this rank's part of the input's columns."""
        self.drop: Callable[..., Tensor] | None = None
        """``DropoutContext.apply_columns`` of the pass that runs; None: it has no dropout."""

    def changed(self, product: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self.merges:
            return product(x, self.merged(weight), bias)
        return product(x, weight, bias) + self._small(x, self.A, self.B)

    def add_(self, found: Tensor, x: Tensor) -> None:
        assert not self.merges  # the plain result would be that of another weight
        found += self._small(x, self.A, self.B)

    def merged(self, weight: Tensor) -> Tensor:
        """Return the changed weight, or the changed stack of weights."""
        return _Merged.apply(weight, self.A, self.B, self.scale)

    def of_experts(self, layers: Sequence[Callable[[Tensor], Tensor]]) -> list[Callable[[Tensor], Tensor]]:
        """Return the changed layers of all experts, given the plain ones, which are changed already if it merges."""
        if self.merges:
            return list(layers)

        def changed(layer: Callable[[Tensor], Tensor], a: Tensor, b: Tensor) -> Callable[[Tensor], Tensor]:
            return lambda x: layer(x) + self._small(x, a, b)

        return [changed(*own) for own in zip(layers, self.A.unbind(), self.B.unbind())]

    def grouped(self, found: Tensor, x: Tensor, ends: Tensor) -> Tensor:
        """Return the changed layers' result [M, out] for rows x [M, in] sorted by expert, given ``found`` of the plain
        ones, or of the changed ones if it merges. ends: int32 [experts], cumulative counts."""
        if self.merges:
            return found
        inner = F.grouped_mm(x, self.A.to(x.dtype).transpose(1, 2), offs=ends)
        return found + F.grouped_mm(inner, self.B.to(x.dtype).transpose(1, 2), offs=ends) * self.scale

    def _small(self, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        if self.dropout and self.drop is not None:
            first = self.part * x.shape[1] if x.shape[1] < self.width else 0
            x = self.drop(x, self.dropout, self.name, first, self.width)
        return F.linear(F.linear(x, a.to(x.dtype)), b.to(x.dtype)) * self.scale


@torch.no_grad()
def merge(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Return weight [..., out, in] + scale b [..., out, rank] a [..., rank, in].

    Rank by rank, so that the bits of an element do not depend on which block of the matrix is computed with it.
    """
    found = weight.clone()
    for i in range(a.shape[-2]):
        found += (b[..., :, i : i + 1] * scale) * a[..., i : i + 1, :]
    return found


class _Merged(torch.autograd.Function):
    """``merge`` with the gradients of a and b."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.scale = scale
        return merge(weight, a, b, scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, Tensor, None]:
        a, b = ctx.saved_tensors
        return None, (b.mT @ grad) * ctx.scale, (grad @ a.mT) * ctx.scale, None
