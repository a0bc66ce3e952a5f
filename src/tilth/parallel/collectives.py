"""Collectives that gradients pass through: each pairs what a rank does in the forward pass with what it owes backwards.

``copy_in`` and ``reduce_out`` are f and g of Megatron-LM (Shoeybi et al., arXiv 1909.08053); ``gather_tokens`` and
``scatter_tokens`` are their counterparts of sequence parallelism (Korthikanti et al., arXiv 2205.05198). All ranks of
the group call them in the same order with the same number of rows; without elements nothing is sent.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from tilth.parallel.comm import Group, all_gather_into, all_reduce, reduce_scatter


def add_up_(x: Tensor, group: Group) -> Tensor:
    """Contiguous x becomes the sum over the group, the same bits on every rank."""
    if x.numel():
        all_reduce(x, group)
    return x


def _gather(x: Tensor, group: Group) -> Tensor:
    """[n, ...] of each rank, one behind another: [n * ranks, ...]."""
    out = x.new_empty(x.shape[0] * group.size(), *x.shape[1:])
    if out.numel():
        all_gather_into(out, x.contiguous(), group)
    return out


def _scatter(x: Tensor, group: Group) -> Tensor:
    """The rank's share of the rows of the sum over the group: [n * ranks, ...] to [n, ...]."""
    out = x.new_empty(x.shape[0] // group.size(), *x.shape[1:])
    if x.numel():
        reduce_scatter(out, x.contiguous(), group)
    return out


class _CopyIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return add_up_(grad.clone(memory_format=torch.contiguous_format), ctx.group), None


class _ReduceOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.mark_dirty(x)
        return add_up_(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _gather(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _scatter(grad, ctx.group), None


class _ScatterTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _scatter(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _gather(grad, ctx.group), None


class _GatherCopies(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.own = slice(group.rank() * x.shape[0], (group.rank() + 1) * x.shape[0])
        return _gather(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad[ctx.own], None


def copy_in(x: Tensor, group: Group) -> Tensor:
    """x, the same on every rank, goes into what each rank computes its part of: gradients are summed (Megatron's f)."""
    return _CopyIn.apply(x, group)


def reduce_out(x: Tensor, group: Group) -> Tensor:
    """The sum of every rank's x, which is overwritten; its gradient is the same on every rank (Megatron's g)."""
    return _ReduceOut.apply(x, group)


def gather_tokens(x: Tensor, group: Group) -> Tensor:
    """Each rank's rows [n, ...] go into what each rank computes its part of: [n * ranks, ...]; gradients are summed."""
    return _GatherTokens.apply(x, group)


def scatter_tokens(x: Tensor, group: Group) -> Tensor:
    """The rank's share [ceil(N / ranks), ...] of the rows of the sum of every rank's x [N, ...].

    The rows are filled up with zeros to a multiple of the ranks: the last ranks may hold fillers.
    """
    spare = -x.shape[0] % group.size()
    return _ScatterTokens.apply(F.pad(x, (0, 0) * (x.ndim - 1) + (0, spare)) if spare else x, group)


def gather_copies(x: Tensor, group: Group) -> Tensor:
    """Each rank's rows [n, ...] go into what every rank computes wholly and alike: [n * ranks, ...].

    So every rank has the whole gradient already, and keeps its own rows of it.
    """
    return _GatherCopies.apply(x, group)
