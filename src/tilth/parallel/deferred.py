"""Gradients of matrices apart from those of their inputs, so that a pipeline can compute them where it would wait.

The backward pass of a linear layer is two products: the gradient of its input, which the stage before waits for, and
that of its weight, which nothing waits for (zero-bubble, 2401.10241). ``DeferredGradients`` keeps the second one's
factors until ``finish``. Both have the bits of the undivided backward pass.

FSDP2 sums shards in a hook of the backward pass, of what then has a gradient: norms and biases, not these weights.
Their whole gradients need no gathered weight; ``finish`` sums them over the ranks and adds this rank's shard.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tilth.models.decoder import Decoder, Linear, linear
from tilth.models.moe import StackedLinear, grouped_linear
from tilth.parallel.comm import is_dtensor
from tilth.parallel.reducer import BUCKET, EXACT, GradientReducer
from tilth.parallel.tensor import RowLinear
from tilth.plan.packing import portions


class GradientFactors(NamedTuple):
    """Factors of the gradient of a weight [out, in], or of those of some experts [experts, out, in]."""

    name: str
    x: Tensor
    """[N, in]."""
    grad: Tensor
    """[N, out]."""
    expert: int | Tensor | None = None
    """Of stacked weights: the expert, or int32 [experts], where the rows of each end."""


class DeferredGradients:
    """Gradients of weights of the layers that backward passes leave to be computed."""

    def __init__(
        self,
        parts: Sequence[Decoder],
        own: Mapping[str, nn.Parameter],
        local: Mapping[str, nn.Parameter],
        reducer: GradientReducer = EXACT,
        *,
        at_once: bool,
    ) -> None:
        """Let the linear layers of the parts leave the gradients of their weights here.

        own: parameters of the parts; local: this rank's part of each; reducer: sums shards. at_once: in each
        ``finish``, as no rank may hold whole gradients for longer; else in the last one of a step.
        """
        self._own, self._local, self._reducer, self._at_once = own, local, reducer, at_once
        self._products = list[GradientFactors]()
        self._whole = dict[str, Tensor]()
        self.names = set[str]()
        """Weights whose gradients arise here."""
        for part in parts:
            for path, module in part.model.layers.named_modules(prefix="model.layers"):
                self._apply(f"{path}.weight", module)

    def _apply(self, name: str, module: nn.Module) -> None:
        if not isinstance(module, (Linear, RowLinear, StackedLinear)) or not module.weight.requires_grad:
            return
        self.names.add(name)
        if isinstance(module, StackedLinear):
            module.product, module.grouped_product = partial(self._of_expert, name), partial(self._of_all, name)
        else:
            module.product = partial(self._linear, name)

    def _linear(self, name: str, x: Tensor, weight: nn.Parameter, bias: Tensor | None) -> Tensor:
        if not torch.is_grad_enabled():
            return linear(x, weight, bias)
        return _Deferred.apply(x, weight, bias, weight, name, None, self._products)

    def _of_expert(self, name: str, x: Tensor, stack: nn.Parameter, expert: int, weight: Tensor, bias: Any) -> Tensor:
        if not torch.is_grad_enabled():
            return linear(x, weight, bias)
        return _Deferred.apply(x, weight.detach(), bias, stack, name, expert, self._products)

    def _of_all(self, name: str, x: Tensor, stack: nn.Parameter, ends: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return grouped_linear(x, stack, ends)
        return _DeferredStack.apply(x, stack, ends, name, self._products)

    def take(self) -> list[GradientFactors]:
        """Return what backward passes have left since the last call, and forget it."""
        found = self._products[:]
        self._products.clear()
        return found

    @torch.no_grad()
    def finish(self, products: list[GradientFactors], *, last: bool) -> None:
        """Add gradients to those of this rank's parts of parameters, and empty ``products``.

        last: no other call follows in this step for the same part of the model. Ranks that divide a parameter call it
        alike.
        """
        for name, grad in self._gradients(products):
            if not is_dtensor(self._own[name]):
                _add(self._local[name], grad)
                continue
            before = self._whole.get(name)
            self._whole[name] = grad if before is None else before.add_(grad)
            if self._at_once and sum(whole.nbytes for whole in self._whole.values()) >= BUCKET:
                self._scatter(list(self._whole))
        if self._at_once or last:
            for names in [*portions(self._whole, lambda name: self._whole[name].nbytes, BUCKET)]:
                self._scatter(names)

    def _gradients(self, products: list[GradientFactors]) -> Iterator[tuple[str, Tensor]]:
        """Yield the gradient of each whole weight, in one order on all ranks, and free its factors."""
        by_name = dict[str, list[GradientFactors]]()
        for one in products:
            by_name.setdefault(one.name, []).append(one)
        products.clear()
        for name in [name for name in self._own if name in by_name]:
            yield name, _gradient(by_name.pop(name), self._own[name])

    def _scatter(self, names: Sequence[str]) -> None:
        """Sum whole gradients over the ranks that divide their parameters, and add this rank's shards."""
        alike = dict[Any, list[str]]()
        for name in names:
            p = self._own[name]
            assert is_dtensor(p)
            alike.setdefault((p.device_mesh.get_group("shards"), p.dtype), []).append(name)
        for (group, _), some in alike.items():
            slots = [_slots(self._whole.pop(name), group.size()) for name in some]
            blob = torch.cat(slots, 1)
            shard = blob.new_empty(blob.shape[1])
            self._reducer.reduce_scatter(shard, blob.flatten(), group, f"deferred.{some[0]}")()
            for name, own in zip(some, shard.split([slot.shape[1] for slot in slots])):
                local = self._local[name]
                _add(local, own[: local.numel()].view_as(local))


def _slots(grad: Tensor, ranks: int) -> Tensor:
    """Return the rows of each rank, filled up to equal numbers: [ranks, elements]."""
    return F.pad(grad.flatten(1), (0, 0, 0, -len(grad) % ranks)).view(ranks, -1)


def _gradient(products: Sequence[GradientFactors], weight: Tensor) -> Tensor:
    """Return the gradient of a weight, of shape and dtype of the whole parameter."""
    first, *more = (_product(one).to(weight.dtype) for one in products)
    if not isinstance(products[0].expert, int):
        return sum(more, first)
    whole = torch.zeros(weight.shape, dtype=weight.dtype, device=first.device)
    for one, grad in zip(products, (first, *more)):
        whole[one.expert] += grad
    return whole


def _product(one: GradientFactors) -> Tensor:
    if isinstance(one.expert, Tensor):
        return F.grouped_mm(one.grad.t(), one.x, offs=one.expert)
    return one.grad.t() @ one.x


def _add(p: nn.Parameter, grad: Tensor) -> None:
    p.grad = grad if p.grad is None else p.grad.add_(grad)


class _Deferred(torch.autograd.Function):
    """A linear layer whose backward pass leaves the gradient of its weight, which is a parameter or a part of it."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        parameter: nn.Parameter,
        name: str,
        expert: int | None,
        products: list[GradientFactors],
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.kind, ctx.products = weight, None if bias is None else bias.dtype, products
        ctx.name, ctx.expert = name, expert
        return linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        ctx.products.append(GradientFactors(ctx.name, x, grad, ctx.expert))
        passed = grad @ ctx.weight.to(grad.dtype) if ctx.needs_input_grad[0] else None
        return passed, None, grad.sum(0).to(ctx.kind) if ctx.needs_input_grad[2] else None, None, None, None, None


class _DeferredStack(torch.autograd.Function):
    """Linear layers of all experts, whose backward pass leaves the gradient of their weights."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, stack: nn.Parameter, ends: Tensor, name: str, products: list[GradientFactors]
    ) -> Tensor:
        ctx.save_for_backward(x, ends)
        ctx.stack, ctx.name, ctx.products = stack, name, products
        return grouped_linear(x, stack, ends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, ends = ctx.saved_tensors
        ctx.products.append(GradientFactors(ctx.name, x, grad, ends))
        passed = F.grouped_mm(grad, ctx.stack.to(grad.dtype), offs=ends) if ctx.needs_input_grad[0] else None
        return passed, None, None, None, None
