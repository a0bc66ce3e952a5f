"""Copy rows between layouts. The gradient is a gather if a row has at most one copy, else a sum of few."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


class _GatherRows(torch.autograd.Function):
    """``x[index]``; ``inverse[i]`` is the slot of the result whose gradient belongs to row i."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x.index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.index_select(0, ctx.saved_tensors[0]), None, None


class _Take(torch.autograd.Function):
    """``x[index]`` for distinct indices; the gradient is written into zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.rows = x.shape[0]
        return x.index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        out = grad.new_zeros(ctx.rows, *grad.shape[1:])
        return out.index_copy_(0, ctx.saved_tensors[0], grad.contiguous()), None


class _Spread(torch.autograd.Function):
    """``x[index]`` with copies of a row in several slots, whose gradients add up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, images: Tensor, first: Tensor) -> Tensor:
        ctx.save_for_backward(images, first)
        return x.index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        images, first = ctx.saved_tensors
        summed = F.embedding_bag(images, grad.flatten(1), first, mode="sum")
        return summed.view(-1, *grad.shape[1:]), None, None, None


def pad_rows(x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
    """Return ``x[index]`` [P, ...] of x [N, ...]; slot ``inverse[i]`` holds row i, every other slot is padding.

    The gradient of padding is dropped: nothing may depend on it.
    """
    return _GatherRows.apply(x, index, inverse)


def take_rows(x: Tensor, index: Tensor) -> Tensor:
    """Return ``x[index]`` of x [N, ...] for distinct int64 indices [M]; the backward pass writes instead of adding."""
    return _Take.apply(x, index)


def spread_rows(x: Tensor, index: Tensor, images: Tensor, first: Tensor) -> Tensor:
    """Return ``x[index]`` [P, ...] of x [N, ...], with any number of copies of a row.

    images: int64, slots of row 0, then those of row 1 and so on; first: int64 [N], begin of each row's slots in images.
    Slots that are not in images are padding: their gradient is dropped.
    """
    return _Spread.apply(x, index, images, first)
