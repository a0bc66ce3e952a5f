"""Optimizers for large batches that take the length of a block's step from the norm of its weights: LARS
(arXiv 1708.03888), LAMB (1904.00962), LANS (2006.13484).

A block is a parameter; a stack of experts is one. Ranks may have parts of it: norms are those of the whole, from two
collectives a step at most. Tensors are computed with in slices that stay in a cache. Gradients are overwritten.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tilth.config.schema import OptimizerConfig as OptimizerSection
from tilth.parallel.sharded import squares_of
from tilth.plan.rules import Table
from tilth.training.optimizers import Squares, decay_groups

EPS = 1e-6
"""Of LANS and LAMB; for second moments and norms of gradients."""
TRUST = 1e-3
"""LARS coefficient, the trust in a layer's ratio (its eta)."""
ON_CPU, ON_GPU = 2**17, 2**23
"""Elements of a slice."""


class Block(NamedTuple):
    """A parameter in a step, with its gradient and state, and its constants."""

    name: str
    p: Tensor
    grad: Tensor
    state: dict[str, Tensor]
    decay: float
    trusted: bool
    """True if the norm of its weights decides the length of its step."""


class Blockwise(torch.optim.Optimizer):
    """Optimizer of blocks, with what its subclasses share: groups, slices, norms."""

    trusts_vectors = True
    """False: norms and biases, which do not decay, have steps of no certain length."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        section: OptimizerSection,
        *,
        named: Mapping[str, nn.Parameter],
        table: Table,
        squares: Squares,
    ) -> None:
        """named: the parameters by name. squares: norms of whole parameters, a collective call."""
        defaults: dict[str, Any] = {"lr": section.lr, "betas": section.betas, "eps": EPS}
        super().__init__(decay_groups(named, table, section.weight_decay), defaults)
        self._names = {p: name for name, p in named.items()}
        self._squares = squares

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Run one update; a collective call of the replica if ranks have parts of blocks."""
        blocks = self._blocks()
        torch._foreach_add_([block.state["step"] for block in blocks], 1)
        if self._squares is not squares_of:
            self._update(blocks)
            return
        some, size = list[Block](), 0
        for block in blocks:  # each while it is in a cache
            some, size = [*some, block], size + block.p.numel()
            if size >= (ON_CPU if block.p.device.type == "cpu" else ON_GPU):
                self._update(some)
                some, size = [], 0
        if some:
            self._update(some)

    def _update(self, blocks: Sequence[Block]) -> None:
        """Change blocks and their state."""
        raise NotImplementedError

    def _blocks(self) -> list[Block]:
        """Return the blocks that have a gradient."""
        found = []
        for group in self.param_groups:
            trusted, decay = group.get("decays", False) or self.trusts_vectors, group["weight_decay"]
            for p in group["params"]:
                if p.grad is not None:
                    found.append(Block(self._names[p], p.detach(), p.grad, self.state[p], decay, trusted))
        return found

    def _norms(self, blocks: Sequence[Block], *kinds: Sequence[Tensor]) -> list[list[float]]:
        """Return the norms of the whole blocks, for each kind of tensors of theirs; a collective call."""
        own = [block.name for block in blocks]
        names, squares = self._squares(*(dict(zip(own, tensors)) for tensors in kinds))
        places = {name: i for i, name in enumerate(names)}
        every = squares.sqrt().tolist()
        return [[norms[places[name]] for name in own] for norms in every]


def slices(rows: Sequence[Sequence[Tensor]]) -> Iterator[tuple[list[int], list[list[Tensor]]]]:
    """Yield slices that are worked on together: numbers of their rows, and of each column of ``rows`` the slices.

    rows: tensors of one shape each.
    """
    numbers, group, size = list[int](), list[Sequence[Tensor]](), 0
    for number, alike in enumerate(rows):
        numel, most = alike[0].numel(), ON_CPU if alike[0].device.type == "cpu" else ON_GPU
        whole = numel <= most or not all(tensor.is_contiguous() for tensor in alike)
        length = 0 if whole else max(1, most * len(alike[0]) // numel)
        for parts in zip(*(tensor.split(length) for tensor in alike)) if length else (alike,):
            numbers.append(number)
            group.append(parts)
            size += parts[0].numel()
            if size >= most:
                yield numbers, [list(column) for column in zip(*group)]
                numbers, group, size = [], [], 0
    if group:
        yield numbers, [list(column) for column in zip(*group)]


class LAMB(Blockwise):
    """LAMB: x -= lr ||x|| / ||r|| r, with r = m / (sqrt(v) + eps) + decay x of moments without bias.

    As in the authors' code, norms and biases neither decay nor have a ratio.
    """

    trusts_vectors = False
    moments = "exp_avg", "exp_avg_sq"
    normalises = looks_ahead = False
    """Of LANS."""

    def _update(self, blocks: Sequence[Block]) -> None:
        group = self.param_groups[0]
        lr, (b1, b2), eps = group["lr"], group["betas"], group["eps"]
        steps, grads = [block.state["step"] for block in blocks], [block.grad for block in blocks]
        phi, *of_grads = self._norms(blocks, [b.p for b in blocks], *([grads] if self.normalises else []))
        unit = [1 / (norm + eps) if norm else 1.0 for norm in of_grads[0]] if of_grads else []
        root = [math.sqrt(1 - b2**t) for t in (torch.stack(steps).tolist() if steps else [])]
        decay = [block.decay for block in blocks]
        moved = [torch.empty_like(block.p) for block in blocks]
        rows = [(b.p, b.grad, r, *(b.state[name] for name in self.moments)) for b, r in zip(blocks, moved)]

        numbers, of_r, of_c = list[int](), list[Tensor](), list[Tensor]()
        for at, (p, g, r, m, v) in slices(rows):
            numbers += at
            if self.normalises:
                torch._foreach_mul_(g, _of(unit, at))
            torch._foreach_zero_(r)
            torch._fused_adamw_(  # moments, and r += their quotient
                r, g, m, v, [], [steps[i] for i in at], lr=-1.0, beta1=b1, beta2=b2, weight_decay=0.0, eps=eps,
                amsgrad=False, maximize=False,
            )  # fmt: skip
            of_r += _squares(r, p, _of(decay, at))
            if self.looks_ahead:
                under = torch._foreach_sqrt(v)
                torch._foreach_div_(under, _of(root, at))
                torch._foreach_add_(under, eps)
                torch._foreach_div_(g, under)
                of_c += _squares(g, p, _of(decay, at))
        sums = [_sums(numbers, squares, len(blocks)) for squares in ((of_r, of_c) if self.looks_ahead else (of_r,))]
        ratios = [
            [_ratio(x, r) if one.trusted else 1.0 for one, x, r in zip(blocks, phi, norms)]
            for norms in self._norms(blocks, *sums)
        ]
        share = b1 if self.looks_ahead else 1.0
        old, new = [lr * share * a for a in ratios[0]], [lr * (1 - share) * a for a in ratios[-1]]

        kept = [1 - own * (a + b) for own, a, b in zip(decay, old, new)]
        for at, (p, g, r, *_) in slices(rows):
            torch._foreach_mul_(p, _of(kept, at))
            torch._foreach_mul_(r, _of(old, at))
            torch._foreach_sub_(p, r)
            if self.looks_ahead:
                torch._foreach_mul_(g, _of(new, at))
                torch._foreach_sub_(p, g)


class LANS(LAMB):
    """LANS: x -= lr (b1 ||x|| / ||r|| r + (1 - b1) ||x|| / ||c|| c), with r of LAMB, c = g / (sqrt(v) + eps) + decay x,
    and g the gradient of the block over its norm.

    As in the authors' code, norms and biases do not decay, and have ratios. The scale of a gradient does not matter, so
    neither does clipping.
    """

    trusts_vectors = True
    moments = "unit_avg", "unit_avg_sq"
    normalises = looks_ahead = True


class LARS(Blockwise):
    """LARS: v = b1 v + lr TRUST ||x|| / (||g|| + decay ||x||) (g + decay x), x -= v.

    As in the paper, norms and biases have ratios too; without a norm it is 1.
    """

    linear = True
    """The learning rate of a batch n times as large is n times as high."""
    rate_inside = ("velocity",)
    """State with a factor of the learning rate."""

    def _update(self, blocks: Sequence[Block]) -> None:
        group = self.param_groups[0]
        lr, momentum, decay = group["lr"] * TRUST, group["betas"][0], [block.decay for block in blocks]
        phi, norms = self._norms(blocks, [block.p for block in blocks], [block.grad for block in blocks])
        rates = [lr * _ratio(x, g + own * x) for x, g, own in zip(phi, norms, decay)]
        for at, (p, grad, velocity) in slices([(b.p, b.grad, b.state["velocity"]) for b in blocks]):
            moved = torch._foreach_mul(p, _of(decay, at))
            torch._foreach_add_(moved, grad)
            torch._foreach_mul_(moved, _of(rates, at))
            torch._foreach_mul_(velocity, momentum)
            torch._foreach_add_(velocity, moved)
            torch._foreach_sub_(p, velocity)


def _of(values: Sequence[float], at: Sequence[int]) -> list[float]:
    return [values[i] for i in at]


def _squares(directions: list[Tensor], weights: list[Tensor], decay: list[float]) -> list[Tensor]:
    """Return the squared norms of directions + decay weights, float64 [] each."""
    found = []
    for moved, x, own in zip((d.reshape(-1) for d in directions), (w.reshape(-1) for w in weights), decay):
        square = torch.dot(moved, moved).double()
        if own:
            square += torch.dot(moved, x).double() * (2 * own) + torch.dot(x, x).double() * own**2
        found.append(square)
    return found


def _ratio(weights: float, step: float) -> float:
    """Return what makes a step as long as the weights; 1 if one of them is 0."""
    return weights / step if weights and step else 1.0


def _sums(numbers: Sequence[int], of_slices: Sequence[Tensor], count: int) -> list[Tensor]:
    """Return the norms of blocks, float64 [] each, from the squared norms of their slices."""
    if not count:  # a rank without blocks calls collectives, too
        return []
    squares = torch.stack(list(of_slices)).clamp(min=0)
    whole = torch.zeros(count, dtype=torch.float64, device=squares.device)
    index = torch.tensor(numbers, dtype=torch.int64, device=squares.device)
    return list(whole.index_add_(0, index, squares).sqrt().unbind())
