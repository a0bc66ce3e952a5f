"""Gradients of matrices apart from those of their inputs, so that a pipeline can compute them where it would wait.

The backward pass of a linear layer is two products: the gradient of its input, which the stage before waits for, and
that of its weight, which nothing waits for (zero-bubble, 2401.10241). ``DeferredGradients`` keeps the second one's
factors until ``compute``. Both have the bits of the undivided backward pass.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tilth.models.decoder import Linear, linear
from tilth.parallel.tensor import RowLinear


class _Product(NamedTuple):
    """Factors of the gradient of a linear layer's weight and bias."""

    x: Tensor
    grad: Tensor
    weight: nn.Parameter
    bias: nn.Parameter | None


class DeferredGradients:
    """Gradients of weights that backward passes since the last ``take`` left to be computed."""

    def __init__(self) -> None:
        self._products = list[_Product]()

    def apply(self, model: nn.Module) -> None:
        """Let the linear layers of a model leave the gradients of their weights here."""
        for module in model.modules():
            if isinstance(module, (Linear, RowLinear)):
                module.product = self._linear

    def _linear(self, x: Tensor, weight: nn.Parameter, bias: nn.Parameter | None) -> Tensor:
        if not (torch.is_grad_enabled() and weight.requires_grad):
            return linear(x, weight, bias)
        return _Deferred.apply(x, weight, bias, self._products)

    def take(self) -> list[_Product]:
        """Return what was left, and forget it."""
        found = self._products[:]
        self._products.clear()
        return found

    @staticmethod
    @torch.no_grad()
    def compute(products: list[_Product]) -> None:
        """Add gradients to those of the weights."""
        for x, grad, weight, bias in products:
            _add(weight, grad.t() @ x)
            if bias is not None:
                _add(bias, grad.sum(0))


def _add(p: nn.Parameter, grad: Tensor) -> None:
    grad = grad.to(p.dtype)
    p.grad = grad if p.grad is None else p.grad.add_(grad)


class _Deferred(torch.autograd.Function):
    """A linear layer whose backward pass computes the gradient of its input only."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: nn.Parameter, bias: nn.Parameter | None, products: list[_Product]
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.bias, ctx.products = weight, bias, products
        return linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        ctx.products.append(_Product(x, grad, ctx.weight, ctx.bias))
        return grad @ ctx.weight.to(grad.dtype) if ctx.needs_input_grad[0] else None, None, None, None
