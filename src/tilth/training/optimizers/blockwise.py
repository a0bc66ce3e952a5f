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
from tilth.training.optimizers import EagerOptimizer, Squares, decay_groups

EPS = 1e-6
"""Of LANS and LAMB; for second moments and norms of gradients."""
TRUST = 1e-3
"""LARS coefficient, the trust in a layer's ratio (its eta)."""
ON_CPU, ON_GPU = 2**17, 2**23
"""Elements of a slice."""
GROUP = 8
"""Slices of blocks that are updated together."""


class Block(NamedTuple):
    """A parameter in a step, with its gradient and state, and its constants."""

    name: str
    p: Tensor
    grad: Tensor
    state: dict[str, Tensor]
    decay: float
    trusted: bool
    """True if the norm of its weights decides the length of its step."""
    steps: float = 0.0
    """Its steps, this one included."""


class Blockwise(EagerOptimizer):
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
        if steps := [block.state["step"] for block in blocks]:
            torch._foreach_add_(steps, 1)
            blocks = [block._replace(steps=t) for block, t in zip(blocks, torch.stack(steps).tolist())]
        if self._squares is not squares_of:
            self._update(blocks)
            return
        some, size = list[Block](), 0
        for block in blocks:  # each while it is in a cache
            some, size = [*some, block], size + block.p.numel()
            if size >= GROUP * (ON_CPU if block.p.device.type == "cpu" else ON_GPU):
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

    def _norms(self, blocks: Sequence[Block], *kinds: Sequence[float]) -> Sequence[Sequence[float]]:
        """Return the norms of the whole blocks, for each kind of norms [blocks] of this rank's parts; a collective
        call."""
        if self._squares is squares_of:
            return kinds
        own, device = [block.name for block in blocks], blocks[0].p.device if blocks else None
        given = (torch.tensor(norms, dtype=torch.float64, device=device) for norms in kinds)
        names, squares = self._squares(*(dict(zip(own, norms)) for norms in given))
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
        (of_grads,) = self._norms(blocks, _lengths(grads).tolist()) if self.normalises else ((),)
        unit = [1 / (norm + eps) if norm else 1.0 for norm in of_grads]
        decay, root = [block.decay for block in blocks], [math.sqrt(1 - b2**block.steps) for block in blocks]
        first, second = self.moments
        rows = [(b.p, b.grad, torch.empty_like(b.p), b.state[first], b.state[second]) for b in blocks]

        dots, parts = list[Tensor](), list[tuple[list[int], list[list[Tensor]]]]()
        numbers = list[int]()
        for at, (p, g, r, m, v) in slices(rows):
            numbers += at
            parts.append(([*at], [p, r, g]))
            if self.normalises:
                torch._foreach_mul_(g, _of(unit, at))
            torch._foreach_zero_(r)
            torch._fused_adamw_(  # moments, and r += their quotient
                r, g, m, v, [], [steps[i] for i in at], lr=-1.0, beta1=b1, beta2=b2, weight_decay=0.0, eps=eps,
                amsgrad=False, maximize=False,
            )  # fmt: skip
            if self.looks_ahead:  # g / (sqrt(v) + root eps), c without its factor root
                under = torch._foreach_sqrt(v)
                torch._foreach_add_(under, [eps * one for one in _of(root, at)])
                torch._foreach_div_(g, under)
            for x, *directions in zip(p, r, g) if self.looks_ahead else zip(p, r):
                flat = x.reshape(-1)
                dots.append(torch.dot(flat, flat))
                for d in directions:
                    own = d.reshape(-1)
                    dots += [torch.dot(own, flat), torch.dot(own, own)]
        factors = ([1.0] * len(blocks), root) if self.looks_ahead else ([1.0] * len(blocks),)
        phi, *norms = self._norms(blocks, *_sums(len(blocks), numbers, dots, factors, decay))
        ratios = [
            [_ratio(x, r) if one.trusted else 1.0 for one, x, r in zip(blocks, phi, of_direction)]
            for of_direction in norms
        ]
        share = b1 if self.looks_ahead else 1.0
        old, new = [lr * share * a for a in ratios[0]], [lr * (1 - share) * a for a in ratios[-1]]

        kept = [1 - own * (a + b) for own, a, b in zip(decay, old, new)]
        for at, (p, r, g) in parts:
            torch._foreach_mul_(p, _of(kept, at))
            _subtract(p, r, _of(old, at))
            if self.looks_ahead:
                _subtract(p, g, [new[i] * root[i] for i in at])


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
        own = _lengths([block.p for block in blocks]).tolist(), _lengths([block.grad for block in blocks]).tolist()
        phi, norms = self._norms(blocks, *own)
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


def _ratio(weights: float, step: float) -> float:
    """Return what makes a step as long as the weights; 1 if one of them is 0."""
    return weights / step if weights and step else 1.0


def _lengths(tensors: Sequence[Tensor]) -> Tensor:
    """Return the norms of tensors: [tensors]."""
    return torch.stack(list(torch._foreach_norm(list(tensors)))) if tensors else torch.zeros(0)


def _subtract(tensors: list[Tensor], directions: list[Tensor], factors: list[float]) -> None:
    """Subtract factors times directions, which may be overwritten: on a CPU in one pass, elsewhere in few kernels."""
    if tensors[0].device.type == "cpu":
        for x, d, factor in zip(tensors, directions, factors):
            x.sub_(d, alpha=factor)
    else:
        torch._foreach_mul_(directions, factors)
        torch._foreach_sub_(tensors, directions)


def _sums(
    count: int,
    numbers: Sequence[int],
    dots: Sequence[Tensor],
    factors: Sequence[Sequence[float]],
    decay: Sequence[float],
) -> list[list[float]]:
    """Return the norms of x and of factor d + decay x of blocks, a list for each direction d.

    dots: of each slice, of the blocks ``numbers``: x x, and of each direction d x and d d.
    """
    sums = [[0.0] * (1 + 2 * len(factors)) for _ in range(count)]
    width = 1 + 2 * len(factors)
    values = torch.stack([*dots]).tolist() if dots else []
    for place, number in enumerate(numbers):
        sums[number] = [a + b for a, b in zip(sums[number], values[place * width : (place + 1) * width])]
    found = [[math.sqrt(own[0]) for own in sums]]
    for i, factor in enumerate(factors):
        columns = [(own[0], own[2 * i + 1], own[2 * i + 2]) for own in sums]
        squares = [t * t * dd + 2 * t * w * dx + w * w * xx for (xx, dx, dd), t, w in zip(columns, factor, decay)]
        found.append([0.0 if square <= 0 else math.sqrt(square) for square in squares])
    return found
