"""Attention of drafts that branch: each new token sees what its row has computed, and the new ones that it follows.

New tokens lie in the slots behind their row in the order of the draft, so a token of another branch than the first lies
behind its place. The mask hides what a token does not follow. In parity mode sums depend on the slots of their terms:
there such a token attends over a copy of its row's keys and values in which what it follows is in its place.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tilth.core.device import to_device
from tilth.models.attention import matmul_attention


class Branches(NamedTuple):
    """Order of the new tokens of each row in a pass."""

    depth: Tensor
    """int64 [B, width], tokens of the draft before a token."""
    follows: Tensor
    """bool [B, width, width], True where token j is token i or one before it."""
    aside: Tensor
    """int64 [2, M], (row, place) of tokens that are not as many places behind the first one as they follow tokens."""

    @classmethod
    def of(cls, parents: np.ndarray, there: np.ndarray, device: torch.device) -> "Branches | None":
        """Return the order of tokens behind the newest of each row; None if none branches.

        parents: int64 [B, width - 1], place in the pass that each follows, below its own; there: bool [B, width], False
        where there is no token.
        """
        rows, width = there.shape
        if (parents == np.arange(width - 1)).all():
            return None
        each = np.arange(rows)
        follows = np.broadcast_to(np.eye(width, dtype=bool), (rows, width, width)).copy()
        for place in range(1, width):
            follows[:, place] |= follows[each, parents[:, place - 1]]
        depth = follows.sum(2) - 1
        aside = np.stack(np.nonzero(there & (depth != np.arange(width))))
        return cls(*to_device([depth, follows, aside], device))

    def hidden(self, start: Tensor, length: int, window: int | None) -> Tensor:
        """Return bool [B, width, length], True where a token does not see a slot. start: int64 [B], slot of each row's
        first new token; window: of ``AttentionContext.attend``."""
        rows, width = self.depth.shape
        slot = torch.arange(length, device=start.device)
        behind = slot - start[:, None]
        place = behind.clamp(0, width - 1)
        seen = self.follows.gather(2, place[:, None].expand(rows, width, length)) & (behind < width)[:, None]
        hidden = ~(seen | (behind < 0)[:, None])
        if window is None:
            return hidden
        position = torch.where(behind < 0, slot, start[:, None] + self.depth.gather(1, place))
        return hidden | (position[:, None] <= (start[:, None] + self.depth)[:, :, None] - window)

    def in_place(
        self, out: Tensor, q: Tensor, k: Tensor, v: Tensor, start: Tensor, window: int | None, sinks: Tensor | None
    ) -> None:
        """Write over ``out`` what tokens out of their place mix in parity mode; arguments of ``matmul_attention``."""
        row, place = self.aside
        slot, first, depth = torch.arange(k.shape[2], device=start.device), start[row, None], self.depth[row, place]
        before = torch.argsort((~self.follows[row, place]).int(), dim=1, stable=True)
        behind = slot - first
        own = (behind >= 0) & (behind <= depth[:, None])
        slots = torch.where(own, first + before.gather(1, behind.clamp(0, before.shape[1] - 1)), slot)
        at = first + depth[:, None]
        hidden = slot > at if window is None else (slot > at) | (slot <= at - window)
        mask = torch.zeros(hidden.shape, dtype=q.dtype, device=q.device).masked_fill_(hidden, -torch.inf)
        keys, values = (some[row[:, None], :, slots].transpose(1, 2) for some in (k, v))
        found = matmul_attention(
            q[row, :, :, place][:, :, :, None], keys, values, mask[:, None, None, None], sinks, parity=True
        )
        out[row, :, :, place] = found[:, :, :, 0]
