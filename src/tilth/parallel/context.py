"""Division of tokens: several ranks have parts of each sequence, and only attention sees all of its tokens.

Along "cp" every sequence is on all ranks; along "hdp" a plan says for each micro-batch which ranks have it, one or more
(hybrid data parallelism of ByteScale, arXiv 2502.21231). These form a unit: messages in the one group of the axis carry
its ring, so any subset works and no group is made.

Residual stream, norms, MLP and output head of a rank have its own tokens. ``RingContext`` and ``UlyssesContext`` are
attention contexts like ``PackedContext``, so the one-device model does not change. Log-probs, entropies and values (one
number a token) are gathered, and every rank evaluates the loss of whole sequences, of a unit its first rank alone; the
gradient of a rank's own tokens flows on, and gradients of parameters are summed like those of other copies.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from tilth.core.device import to_device
from tilth.core.errors import ModelError
from tilth.models.attention import AttentionContext, DropoutContext, PackedContext, as_wide
from tilth.models.moe import ExpertContext
from tilth.models.rows import pad_rows
from tilth.parallel.collectives import exchange_rows, gather_copies
from tilth.parallel.comm import Exchange, Group, Members
from tilth.parallel.dims import ParallelDims
from tilth.parallel.division import Division
from tilth.parallel.ring import RingPlan, ring_attention
from tilth.plan.context import ZigZag
from tilth.plan.layout import ulysses_misfit
from tilth.plan.shape import DecoderShape

Style = Literal["ring", "ulysses"]


@dataclass(frozen=True)
class ContextParallel:
    """Group of ranks that divide tokens, and how their attention meets."""

    group: Group
    style: Style
    units: bool = False
    """True: the plan of a micro-batch says which ranks divide its tokens; one alone has all of them."""

    @classmethod
    def of(cls, grid: ParallelDims, style: Style, shape: DecoderShape) -> "ContextParallel | None":
        """Return None where one rank has all tokens. ModelError if Ulysses cannot divide the heads."""
        group = grid.group("cp")
        if group is None:
            return None
        wrong = ulysses_misfit(shape, group.size(), grid.size("tp")) if style == "ulysses" else ""
        if wrong:
            fits = [str(n) for n in range(1, shape.num_heads + 1) if not ulysses_misfit(shape, n, grid.size("tp"))]
            message = f"layout.cp={group.size()} with cp_style=ulysses does not divide {wrong}"
            raise ModelError(f"{message}; use cp_style=ring, or cp {', '.join(fits)}", key="layout.cp")
        return cls(group, style)

    def share(
        self,
        lengths: np.ndarray | Tensor | Sequence[int],
        device: torch.device | str = "cpu",
        unit: Members | None = None,
    ) -> "TokenShare":
        """Divide packed sequences of these lengths. unit: ranks that have them; None: all."""
        table = np.asarray(lengths.cpu() if isinstance(lengths, Tensor) else lengths, np.int64)
        made, members = (UnitShare, unit) if unit else (TokenShare, Members.of(self.group))
        return made(members, self.style, ZigZag.of(table, len(members.ranks)), torch.device(device))


def divide_tokens(division: Division) -> None:
    """Divide the tokens of each sequence along "cp"."""
    division.context = ContextParallel.of(division.grid, division.cp_style, division.model.config)


def divide_units(division: Division) -> None:
    """Divide the tokens of each micro-batch along "hdp" over the ranks that its plan names."""
    group = division.grid.group("hdp")
    assert group is not None  # several ranks
    division.context = ContextParallel(group, "ring", units=True)


class TokenShare:
    """This rank's tokens of packed sequences. N: packed tokens; n: this rank's, in packed order."""

    def __init__(self, members: Members, style: Style, division: ZigZag, device: torch.device) -> None:
        self.members, self.style, self.division, self.device = members, style, division, device
        self.group, self.rank = members.group, members.place
        self.tokens = self.tensor(division.tokens(self.rank))
        """Packed index of each own token, int64 [n]."""

    @property
    def has_rows(self) -> bool:
        """True if this rank has the rows, evaluates their loss and reports of them."""
        return True

    def tensor(self, values: np.ndarray) -> Tensor:
        """Return int64 values on the device."""
        return to_device([values.astype(np.int64, copy=False)], self.device)[0]

    @cached_property
    def _every(self) -> list[np.ndarray]:
        return [self.division.tokens(rank) for rank in range(self.division.ranks)]

    @cached_property
    def counts(self) -> list[int]:
        """Tokens of each rank."""
        return [len(tokens) for tokens in self._every]

    @cached_property
    def order(self) -> Tensor:
        """Packed index of each token of rank 0, then of rank 1 and so on, int64 [N]."""
        return self.tensor(np.concatenate(self._every))

    @cached_property
    def place(self) -> Tensor:
        """Place of each packed token in ``order``, int64 [N]."""
        return torch.argsort(self.order)

    @cached_property
    def _local(self) -> Tensor:
        found = torch.full((sum(self.counts),), -1, device=self.device)
        return found.index_copy_(0, self.tokens, torch.arange(len(self.tokens), device=self.device))

    def here(self, index: Tensor) -> Tensor:
        """Return bool: True for packed tokens (int64 [k]) that are this rank's."""
        return self._local[index] >= 0

    def local(self, index: Tensor) -> Tensor:
        """Return the own token [k] of packed tokens of this rank."""
        return self._local[index]

    def whole(self, values: Tensor) -> Tensor:
        """Gather some numbers for each token of all ranks: [n, k] to [N, k], in packed order.

        For a loss that every rank evaluates: the gradient of a rank's numbers is its part of the loss's gradient.
        """
        most = max(self.counts)
        every = gather_copies(F.pad(values, (0, 0, 0, most - len(values))), self.group)
        starts = np.repeat(np.arange(len(self.counts)) * most, self.counts)
        inside = np.concatenate([np.arange(count) for count in self.counts])
        return every.index_select(0, self.tensor(starts + inside)[self.place])

    def context(self, dropout: DropoutContext | None = None) -> AttentionContext:
        """Return the attention context of this rank's tokens. dropout: of all N tokens."""
        own = None if dropout is None else replace(dropout, tokens=dropout.tokens[self.tokens])
        return (RingContext if self.style == "ring" else UlyssesContext)(self, own)  # type: ignore[return-value]


class UnitShare(TokenShare):
    """Tokens of a unit, which has its loss on the first rank."""

    @property
    def has_rows(self) -> bool:
        """True on the first rank."""
        return self.rank == 0

    def whole(self, values: Tensor) -> Tensor:
        """Gather as ``TokenShare.whole`` does, on the first rank; on the others all is 0, and the backward pass brings
        the gradient of their own numbers from there."""
        found: Tensor = _OnFirst.apply(values, self)
        return found.index_select(0, self.place)


class _OnFirst(torch.autograd.Function):
    """Numbers of tokens [n, k] of each member, one after another [N, k] on the first, which returns their gradients."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, share: UnitShare) -> Tensor:
        ctx.share = share
        every = values.new_zeros(len(share.order), *values.shape[1:])
        if share.rank:
            Exchange(share.members, [(0, values.contiguous())], []).wait()
            return every
        own, *others = every.split(share.counts)
        own.copy_(values)
        Exchange(share.members, [], list(enumerate(others, 1))).wait()
        return every

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        share: UnitShare = ctx.share
        if share.rank:
            own = grad.new_empty(len(share.tokens), *grad.shape[1:])
            Exchange(share.members, [], [(0, own)]).wait()
            return own, None
        own, *others = grad.contiguous().split(share.counts)
        Exchange(share.members, list(enumerate(others, 1)), []).wait()
        return own, None


class _OwnTokens:
    """Positions of a rank's tokens, and lengths of their sequences."""

    def __init__(self, share: TokenShare, dropout: DropoutContext | None) -> None:
        self.share, self.dropout = share, dropout
        self.experts: ExpertContext | None = None
        division = share.division
        self.positions = share.tensor(division.positions(share.rank))
        self.extents = share.tensor(np.repeat(division.edges[:, -1], division.chunks(share.rank).counts))


class RingContext(_OwnTokens):
    """Keys and values go around the ranks; see ``parallel.ring``."""

    def __init__(self, share: TokenShare, dropout: DropoutContext | None = None) -> None:
        super().__init__(share, dropout)
        self._plans: dict[tuple[int | None, int], RingPlan] = {}

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None, sinks: Tensor | None = None
    ) -> Tensor:
        share, key = self.share, (window, q.shape[1])
        if key not in self._plans:
            self._plans[key] = RingPlan(share.division, share.rank, window, q.shape[1], share.device)
        wide = as_wide(v, q)
        return ring_attention(q, k, wide, self._plans[key], window, share.members, sinks)[..., : v.shape[2]]


class UlyssesContext(_OwnTokens):
    """Exchange tokens for heads, attend to whole sequences, exchange back (DeepSpeed-Ulysses, arXiv 2309.14509).

    One all-to-all for queries, keys and values, one for the result. Where there are fewer key heads than ranks, each
    goes to several, and their gradients are summed.
    """

    def __init__(self, share: TokenShare, dropout: DropoutContext | None = None) -> None:
        super().__init__(share, dropout)
        self._whole = PackedContext(share.division.edges[:, -1], share.device)

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None, sinks: Tensor | None = None
    ) -> Tensor:
        share, ranks = self.share, self.share.division.ranks
        (n, heads, hd), width = q.shape, v.shape[2]
        v, own = as_wide(v, q), () if sinks is None else (sinks.view(ranks, -1)[share.rank],)
        k, v = (x if x.shape[1] >= ranks else x.repeat_interleave(ranks // x.shape[1], 1) for x in (k, v))
        sizes = [x.shape[1] // ranks for x in (q, k, v)]
        sent = (
            torch.cat([x.view(n, ranks, size, hd) for x, size in zip((q, k, v), sizes)], 2)
            .transpose(0, 1)
            .flatten(0, 1)
        )
        every = exchange_rows(sent, share.counts, [n] * ranks, share.group)
        q, k, v = pad_rows(every, share.place, share.order).split(sizes, 1)
        mixed = self._whole.attend(layer, q, k, v[..., :width], window, *own)
        back = exchange_rows(pad_rows(mixed, share.order, share.place), [n] * ranks, share.counts, share.group)
        return back.view(ranks, n, heads // ranks, width).transpose(0, 1).reshape(n, heads, width)
