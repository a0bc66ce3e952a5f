"""Collectives that gradients pass through: each pairs what a rank does in the forward pass with what it owes backwards.

``copy_in`` and ``reduce_out`` are f and g of Megatron-LM (Shoeybi et al., arXiv 1909.08053); ``gather_tokens`` and
``scatter_tokens`` are their counterparts of sequence parallelism (Korthikanti et al., arXiv 2205.05198). All ranks of
the group call them in the same order with the same number of rows; without elements nothing is sent.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from tilth.parallel.comm import Group, all_gather, all_reduce, reduce_scatter

_Collective = Callable[[Tensor, Group], Tensor]


def add_up_(x: Tensor, group: Group) -> Tensor:
    """Contiguous x becomes the sum over the group, the same bits on every rank."""
    if x.numel():
        all_reduce(x, group)
    return x


def _gather(x: Tensor, group: Group) -> Tensor:
    """[n, ...] of each rank, one behind another: [n * ranks, ...]."""
    out = x.new_empty(x.shape[0] * group.size(), *x.shape[1:])
    if out.numel():
        all_gather(out, x.contiguous(), group)
    return out


def _scatter(x: Tensor, group: Group) -> Tensor:
    """The rank's share of the rows of the sum over the group: [n * ranks, ...] to [n, ...]."""
    out = x.new_empty(x.shape[0] // group.size(), *x.shape[1:])
    if x.numel():
        reduce_scatter(out, x.contiguous(), group)
    return out


class _Paired(torch.autograd.Function):
    """One collective in the forward pass and what it owes in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, forth: _Collective, back: _Collective) -> Tensor:
        ctx.group, ctx.back = group, back
        out = forth(x, group)
        if out is x:
            ctx.mark_dirty(x)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.back(grad, ctx.group), None, None, None


def _same(x: Tensor, group: Group) -> Tensor:
    return x.view_as(x)


def _summed(x: Tensor, group: Group) -> Tensor:
    return add_up_(x.clone(memory_format=torch.contiguous_format), group)


def _own(x: Tensor, group: Group) -> Tensor:
    return x.chunk(group.size())[group.rank()] if len(x) else x


def copy_in(x: Tensor, group: Group) -> Tensor:
    """x, the same on every rank, goes into what each rank computes its part of: gradients are summed (Megatron's f)."""
    return _Paired.apply(x, group, _same, _summed)


def reduce_out(x: Tensor, group: Group) -> Tensor:
    """The sum of every rank's x, which is overwritten; its gradient is the same on every rank (Megatron's g)."""
    return _Paired.apply(x, group, add_up_, _same)


def gather_tokens(x: Tensor, group: Group) -> Tensor:
    """Each rank's rows [n, ...] go into what each rank computes its part of: [n * ranks, ...]; gradients are summed."""
    return _Paired.apply(x, group, _gather, _scatter)


def scatter_tokens(x: Tensor, group: Group) -> Tensor:
    """The rank's share [ceil(N / ranks), ...] of the rows of the sum of every rank's x [N, ...].

    The rows are filled up with zeros to a multiple of the ranks: the last ranks may hold fillers.
    """
    spare = -x.shape[0] % group.size()
    x = F.pad(x, (0, 0) * (x.ndim - 1) + (0, spare)) if spare else x
    return _Paired.apply(x, group, _scatter, _gather)


def gather_copies(x: Tensor, group: Group) -> Tensor:
    """Each rank's rows [n, ...] go into what every rank computes wholly and alike: [n * ranks, ...].

    So every rank has the whole gradient already, and keeps its own rows of it.
    """
    return _Paired.apply(x, group, _gather, _own)
