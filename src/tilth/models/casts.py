"""Weights in the compute dtype: cast at use, or once for all micro-batches between two optimizer steps."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_kept: dict[nn.Parameter, Tensor | None] = {}
"""Copies of the parameters of open blocks. Of all threads: a device's backward passes run in threads of their own."""
_storages: set[int] = set()
"""Storages of these copies."""


@contextmanager
def keep_casts(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Keep what ``cast`` makes of these until the block ends. In it none of them may change, or lie elsewhere."""
    own = [*parameters]
    _kept.update(dict.fromkeys(own))
    try:
        yield
    finally:
        for one in own:
            _forget(_kept.pop(one, None))


def cast(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a weight in this dtype. Its gradient is that of ``weight.to(dtype)``, in the weight's own dtype."""
    if weight.dtype == dtype or not isinstance(weight, nn.Parameter) or weight not in _kept:
        return weight.to(dtype)
    copy = _kept[weight]
    if copy is None or copy.dtype != dtype:
        _forget(copy)
        copy = _kept[weight] = weight.detach().to(dtype)
        _storages.add(copy.untyped_storage()._cdata)
    found: Tensor = _Cast.apply(weight, copy) if weight.requires_grad and torch.is_grad_enabled() else copy
    return found


def is_kept(tensor: Tensor) -> bool:
    """Return True if a tensor lies in a copy that is kept."""
    return tensor.untyped_storage()._cdata in _storages


def _forget(copy: Tensor | None) -> None:
    if copy is not None:
        _storages.discard(copy.untyped_storage()._cdata)


class _Cast(torch.autograd.Function):
    """A copy in another dtype that is there already."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, copy: Tensor) -> Tensor:
        ctx.dtype = weight.dtype
        return copy.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.to(ctx.dtype), None
