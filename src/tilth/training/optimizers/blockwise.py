"""Optimizers for large batches that take the length of a block's step from the norm of its weights: LARS
(arXiv 1708.03888), LAMB (1904.00962), LANS (2006.13484).

A block is a parameter; a stack of experts is one. Ranks may have parts of it: norms are those of the whole, from two
collectives a step at most. Tensors are computed with in slices that stay in a cache, so that scratch is small.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tilth.config.schema import OptimizerConfig as OptimizerSection
from tilth.plan.rules import Table
from tilth.training.optimizers import Squares, decay_groups

EPS = 1e-6
"""Of LANS and LAMB; for second moments and norms of gradients."""
TRUST = 1e-3
"""LARS coefficient, the trust in a layer's ratio (its eta)."""
ON_CPU, ON_GPU = 2**18, 2**23
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
        length = max(1, most * len(alike[0]) // numel) if numel > most else 0
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

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Run one update; a collective call of the replica."""
        group, blocks = self.param_groups[0], self._blocks()
        lr, (b1, b2), eps = group["lr"], group["betas"], group["eps"]
        torch._foreach_add_([block.state["step"] for block in blocks], 1)
        steps = torch.stack([block.state["step"] for block in blocks]).tolist() if blocks else []
        weights, grads = [block.p for block in blocks], [block.grad for block in blocks]
        phi, *rest = self._norms(blocks, weights, *([grads] if self.normalises else []))
        unit = [1 / (norm + eps) if norm else 1.0 for norm in rest[0]] if rest else [1.0] * len(blocks)
        root = [math.sqrt(1 - b2**t) for t in steps]
        ahead = [own / (1 - b1**t) for own, t in zip(root, steps)]
        now = [own * scale for own, scale in zip(root, unit)]
        decay, least = [block.decay for block in blocks], [eps * own for own in root]
        rows = [(block.p, block.grad, *(block.state[name] for name in self.moments)) for block in blocks]

        found, of_m, of_g = list[int](), list[Tensor](), list[Tensor]()
        for at, (p, grad, m, v) in slices(rows):
            g = torch._foreach_mul(grad, _of(unit, at)) if self.normalises else grad
            torch._foreach_lerp_(m, g, 1 - b1)
            torch._foreach_mul_(v, b2)
            torch._foreach_addcmul_(v, g, g, 1 - b2)
            under = _denominators(v, _of(least, at))
            found += at
            of_m += _lengths(p, m, under, _of(decay, at), _of(ahead, at))
            of_g += _lengths(p, grad, under, _of(decay, at), _of(now, at)) if self.looks_ahead else ()
        sums = [_sums(found, norms, len(blocks)) for norms in ((of_m, of_g) if self.looks_ahead else (of_m,))]
        ratios = [
            [_ratio(x, r) if one.trusted else 1.0 for one, x, r in zip(blocks, phi, norms)]
            for norms in self._norms(blocks, *sums)
        ]
        share = b1 if self.looks_ahead else 1.0
        old, new = [share * a for a in ratios[0]], [(1 - share) * a for a in ratios[-1]]

        kept = [1 - lr * own * (a + b) for own, a, b in zip(decay, old, new)]
        for at, (p, grad, m, v) in slices(rows):
            under = _denominators(v, _of(least, at))
            torch._foreach_mul_(p, _of(kept, at))
            torch._foreach_addcdiv_(p, m, under, [-lr * old[i] * ahead[i] for i in at])
            if self.looks_ahead:
                torch._foreach_addcdiv_(p, grad, under, [-lr * new[i] * now[i] for i in at])


class LANS(LAMB):
    """LANS: x -= lr (b1 ||x|| / ||r|| r + (1 - b1) ||x|| / ||c|| c), with r as of LAMB, c = g / (sqrt(v) + eps) + decay x
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

    rate_inside = ("velocity",)
    """State with a factor of the learning rate."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Run one update; a collective call of the replica."""
        group, blocks = self.param_groups[0], self._blocks()
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


def _lengths(
    p: list[Tensor], direction: list[Tensor], under: list[Tensor], decay: list[float], scale: list[float]
) -> Sequence[Tensor]:
    """Return the norms of scale direction / under + decay p."""
    moved = torch._foreach_mul(p, decay)
    torch._foreach_addcdiv_(moved, direction, under, scale)
    return torch._foreach_norm(moved)


def _denominators(v: list[Tensor], least: list[float]) -> list[Tensor]:
    found = list(torch._foreach_sqrt(v))
    torch._foreach_add_(found, least)
    return found


def _ratio(weights: float, step: float) -> float:
    """Return what makes a step as long as the weights; 1 if one of them is 0."""
    return weights / step if weights and step else 1.0


def _sums(numbers: Sequence[int], norms: Sequence[Tensor], count: int) -> list[Tensor]:
    """Return the norms of blocks, float64 [] each, from those of their slices."""
    squares = torch.stack(list(norms)).double().square()
    whole = torch.zeros(count, dtype=torch.float64, device=squares.device)
    index = torch.tensor(numbers, dtype=torch.int64, device=squares.device)
    return list(whole.index_add_(0, index, squares).sqrt().unbind())
