"""Differentiable collectives: each pairs a forward collective with the one that its backward pass needs.

``copy_in`` and ``reduce_out`` are f and g of Megatron-LM (Shoeybi et al., arXiv 1909.08053); ``gather_tokens`` and
``scatter_tokens`` are their counterparts of sequence parallelism (Korthikanti et al., arXiv 2205.05198). All ranks of
the group call them in the same order with the same number of rows; empty tensors are not sent.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from tilth.parallel.comm import Group, all_gather, all_reduce, all_to_all, reduce_scatter

_Collective = Callable[[Tensor, Group], Tensor]


def add_up_(x: Tensor, group: Group) -> Tensor:
    """Sum contiguous x over the group in place; the same bits on every rank."""
    if x.numel():
        all_reduce(x, group).wait()
    return x


def _gather(x: Tensor, group: Group) -> Tensor:
    """Concatenate [n, ...] of each rank: [n * ranks, ...]."""
    out = x.new_empty(x.shape[0] * group.size(), *x.shape[1:])
    if out.numel():
        all_gather(out, x.contiguous(), group)
    return out


def _scatter(x: Tensor, group: Group) -> Tensor:
    """Return the rank's rows of the sum over the group: [n * ranks, ...] to [n, ...]."""
    out = x.new_empty(x.shape[0] // group.size(), *x.shape[1:])
    if x.numel():
        reduce_scatter(out, x.contiguous(), group).wait()
    return out


class _Paired(torch.autograd.Function):
    """A collective of the forward pass and one of the backward pass."""

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
    """Pass on x, equal on every rank; gradients are summed (Megatron's f)."""
    return _Paired.apply(x, group, _same, _summed)


def reduce_out(x: Tensor, group: Group) -> Tensor:
    """Sum x over ranks, in place; the gradient is equal on every rank (Megatron's g)."""
    return _Paired.apply(x, group, add_up_, _same)


def gather_tokens(x: Tensor, group: Group) -> Tensor:
    """Concatenate each rank's rows [n, ...] to [n * ranks, ...]; gradients are summed and scattered."""
    return _Paired.apply(x, group, _gather, _scatter)


def scatter_tokens(x: Tensor, group: Group) -> Tensor:
    """Return the rank's rows [ceil(N / ranks), ...] of the sum of every rank's x [N, ...].

    Zeros fill the rows up to a multiple of the ranks, so the last ranks may hold fillers.
    """
    spare = -x.shape[0] % group.size()
    x = F.pad(x, (0, 0) * (x.ndim - 1) + (0, spare)) if spare else x
    return _Paired.apply(x, group, _scatter, _gather)


def gather_copies(x: Tensor, group: Group) -> Tensor:
    """Concatenate each rank's rows [n, ...] to [n * ranks, ...], for work that every rank repeats.

    Every rank has the whole gradient already, and takes its rows of it.
    """
    return _Paired.apply(x, group, _gather, _own)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, received: Sequence[int], sent: Sequence[int], group: Group) -> Tensor:
        ctx.counts, ctx.group = (sent, received), group
        out = x.new_empty(sum(received), *x.shape[1:])
        all_to_all(out, x.contiguous(), received, sent, group).wait()
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        received, sent = ctx.counts
        out = grad.new_empty(sum(received), *grad.shape[1:])
        all_to_all(out, grad.contiguous(), received, sent, ctx.group).wait()
        return out, None, None, None


def exchange_rows(x: Tensor, received: Sequence[int], sent: Sequence[int], group: Group) -> Tensor:
    """Send the first ``sent[0]`` rows of x to rank 0 and so on; return ``received[r]`` rows of each rank, in order.

    Gradients go back to where their rows came from.
    """
    return _AllToAll.apply(x, received, sent, group)
