"""Baselines of least variance, one for each place in the answers to a prompt (optimal token baseline).

At each place t the group's samples share B_t = sum(G * W) / (sum(W) + eps), with G a sample's reward to come and W_t
its path variance up to there: the sum over its tokens so far of 1 - 2 pi + sum_v pi_v^2, which is the squared length of
the gradient of log pi by the logits. A = G - B_t.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from tilth.rl.estimators import Advantage, GlobalRows, Tokens, ahead
from tilth.rl.packing import Gather, Packing, discounted_sums, segment_sum
from tilth.rl.registry import Scope, register

_ROUNDING = 1e-3
"""A token's part of the path variance may be this far below 0 by rounding; it then counts as 0."""


@dataclass(frozen=True)
class _Cells:
    """Tokens that count, [k]: group and place (together: a cell), reward to come and path variance."""

    group: Tensor
    place: Tensor
    ahead: Tensor
    path: Tensor

    def add(self, others: "_Cells") -> "_Cells":
        """Return these tokens followed by the others."""
        return _Cells(*(torch.cat([getattr(self, k), getattr(others, k)]) for k in self.__dataclass_fields__))

    def advantages(self, eps: float, singleton: str) -> Tensor:
        """Return the reward to come minus the baseline of the cell, [k]: exactly 0 where all rewards to come of a cell
        are equal. Sums run in the order (cell, path, reward), so they have the same bits whatever the order of the
        tokens."""
        _, group = torch.unique(self.group, return_inverse=True)
        width = int(self.place.max()) + 1 if len(self.place) else 1
        _, cell, sizes = torch.unique(group * width + self.place, return_inverse=True, return_counts=True)
        order = torch.argsort(self.ahead, stable=True)
        order = order[torch.argsort(self.path[order], stable=True)]
        order = order[torch.argsort(cell[order], stable=True)]
        total = segment_sum((self.ahead * self.path)[order], sizes)
        baseline = total / (segment_sum(self.path[order], sizes) + eps)
        most, least = (sign * _greatest(sign * self.ahead, cell, sizes) for sign in (1, -1))
        found = torch.where((most <= least)[cell], 0.0, self.ahead - baseline[cell])
        lonely = self.ahead if singleton == "reward" else torch.zeros_like(self.ahead)
        return torch.where(sizes[cell] > 1, found, lonely)


def _greatest(values: Tensor, cell: Tensor, sizes: Tensor) -> Tensor:
    return torch.full_like(sizes, 0, dtype=values.dtype).sub(torch.inf).scatter_reduce(0, cell, values, "amax")


class _Optimal(Advantage):
    eps: float = Field(1e-8, ge=0, description="added to the sum of path variances that the baseline divides by")
    singleton: Literal["reward", "zero"] = Field(
        "reward",
        description="what a token gets that no other sample of its group has at its place: its reward to come, as if "
        "its baseline were 0 (verl), or zero",
    )

    needs: ClassVar[tuple[str, ...]] = ("rewards", "groups", "logprobs", "sum_pi_squared")
    takes: ClassVar[tuple[str, ...]] = ("weights",)  # a token's path variance counts by its square

    @property
    def flat_teaches(self) -> bool:
        """True if a token without a counterpart in its group keeps its reward to come."""
        return self.singleton == "reward"

    scope: ClassVar[Scope] = "group tokens"

    def place(self, packing: Packing) -> Tensor:
        """Return the place of each token that counts, int64; tokens of a group with the same place are compared."""
        raise NotImplementedError

    def tokens(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        packing = tokens.packing
        group = packing.spread(tokens.rows.columns["groups"].to(packing.mask.device, torch.int64))[packing.mask]
        own = _Cells(group, self.place(packing), ahead(tokens, 1.0), self._path(tokens))
        cells = own if tokens.everyone is None else own.add(_elsewhere(own, tokens.everyone, tokens.gather))
        found = cells.advantages(self.eps, self.singleton)[: len(group)]
        return tokens.scatter(found), tokens.scatter(own.ahead)

    def _path(self, tokens: Tokens) -> Tensor:
        """Path variance up to and with each token that counts."""
        step = 1 - 2 * tokens.chosen("logprobs").exp() + tokens.chosen("sum_pi_squared")
        step = torch.where((step < 0) & (step > -_ROUNDING), 0.0, step)
        if "weights" in tokens.rows.columns:
            step = step * tokens.chosen("weights") ** 2
        return discounted_sums(step.flip(0), tokens.packing.counts.flip(0), 1.0).flip(0)


@register("advantages", "optimal_token_baseline")
class OptimalTokenBaseline(_Optimal):
    """Optimal token baseline of one-turn answers: places are distances from the answer's first token.

    Where fewer than two samples of the group have a token that counts at a place, there is no baseline: option
    ``singleton``. verl has the same rule for the tail of the longest answer only, and counts tokens, not places, to
    find it; the two agree where no token inside an answer is masked.
    """

    def place(self, packing: Packing) -> Tensor:
        """Distance from the row's first token that counts."""
        index = torch.arange(len(packing.mask), device=packing.mask.device)
        return (index - packing.spread(packing.firsts))[packing.mask]


@register("advantages", "tir_optimal_token_baseline")
class MultiTurnOptimalTokenBaseline(_Optimal):
    """Optimal token baseline of answers in several turns (tools): places count the policy's own tokens only."""

    def place(self, packing: Packing) -> Tensor:
        """Number of earlier tokens that count in the row."""
        starts = packing.counts.cumsum(0) - packing.counts
        chosen = int(packing.counts.sum())
        return torch.arange(chosen, device=starts.device) - packing.spread(starts)[packing.mask]


def _elsewhere(own: _Cells, everyone: GlobalRows, gather: Gather) -> _Cells:
    """Gather other workers' tokens of groups that lie on several workers; without such groups nothing is sent."""
    apart, me = everyone.apart.to(own.group.device), everyone.me
    mine = torch.isin(own.group, apart)
    columns = {k: getattr(own, k)[mine] for k in own.__dataclass_fields__}
    if not len(apart):
        return _Cells(**{k: v[:0] for k, v in columns.items()})
    sent = {k: v.cpu().numpy() for k, v in columns.items()} | {"worker": np.full(int(mine.sum()), me)}
    found = gather(sent)
    theirs = found["worker"] != me
    return _Cells(*(torch.from_numpy(found[k][theirs]).to(own.group.device) for k in own.__dataclass_fields__))
