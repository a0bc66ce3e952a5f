"""Samples of one prompt as one tree: the prompt's tokens are computed once, each sample is a branch after them.

The forward and backward pass of a group of G samples then has P + G C tokens instead of G (P + C). A token sees the
prompt and its own branch; positions go on after the prompt in every branch. The values are those of separate sequences,
with another order of additions.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tilth.core.batch import Ragged
from tilth.models.attention import PackedContext, _Group

LONGEST = 256
"""Longest tree: its attention is quadratic in all of its branches together."""


class Trees(NamedTuple):
    """How packed sequences lie in trees. N: packed tokens, M <= N: tokens of the trees, which stand tree after tree."""

    source: np.ndarray
    """int64 [M]: index of the packed token that a tree's token is."""
    slot: np.ndarray
    """int64 [N]: index of the tree's token that a packed token is."""
    lengths: np.ndarray
    """int64 [trees]: tokens of each tree."""
    branch: np.ndarray
    """int64 [M]: 0 on a prompt, else the number of the branch in its tree, from 1."""
    position: np.ndarray
    """int64 [M]: place of the token in its own sequence."""


def plant(tokens: Ragged, prompts: np.ndarray, groups: Sequence[np.ndarray]) -> Trees:
    """Put each group of rows, which share their first ``prompts[row]`` tokens, into one tree.

    tokens: n sequences; prompts: int [n], tokens of each prompt; groups: row indices, every row in exactly one group.
    """
    sources, branches, positions, lengths = [], [], [], []
    slot, at = np.zeros(len(tokens.values), np.int64), 0
    for rows in groups:
        first = int(rows[0])
        shared = int(prompts[first]) if len(rows) > 1 else int(tokens.lengths[first])
        begin, trunk = at, tokens.offsets[first] + np.arange(shared)
        parts, marks, places = [trunk], [np.zeros(shared, np.int64)], [np.arange(shared)]
        at += shared
        for number, row in enumerate(rows, 1):
            start, length = int(tokens.offsets[row]), int(tokens.lengths[row])
            slot[start : start + shared] = begin + np.arange(shared)
            slot[start + shared : start + length] = at + np.arange(length - shared)
            parts.append(np.arange(start + shared, start + length))
            marks.append(np.full(length - shared, number))
            places.append(np.arange(shared, length))
            at += length - shared
        sources += parts
        branches += marks
        positions += places
        lengths.append(at - begin)
    join = np.concatenate
    return Trees(join(sources), slot, np.array(lengths), join(branches), join(positions))


class TreeContext(PackedContext):
    """The attention context of trees. See ``PackedContext``; without parity, whose shapes it cannot have."""

    def __init__(self, trees: Trees, device: torch.device | str = "cpu") -> None:
        super().__init__(trees.lengths, device)
        self.positions = self._tensor(trees.position)
        self.branch = self._tensor(trees.branch)
        self._starts = self._tensor(np.cumsum(trees.lengths) - trees.lengths)
        ends = np.zeros(len(trees.lengths), np.int64)
        np.maximum.at(ends, np.repeat(np.arange(len(ends)), trees.lengths), trees.position + 1)
        self.extents = self._tensor(np.repeat(ends, trees.lengths))

    def _causal(self, window: int | None) -> bool:
        return False

    def _make_mask(self, group: _Group, window: int | None, dtype: torch.dtype) -> Tensor:
        slots = torch.arange(group.start, group.start + group.count * group.length, device=self.device)
        tokens = slots if self._source is None else self._source[slots]
        position = self.positions[tokens].view(group.count, group.length)
        branch = self.branch[tokens].view(group.count, group.length)
        token = tokens.view(group.count, group.length)
        real = torch.ones_like(token, dtype=torch.bool)
        real[:, 1:] = token[:, 1:] != token[:, :-1]  # fillers repeat the last token
        q, k = position[:, :, None], position[:, None, :]
        visible = (k <= q) & real[:, None, :] & ((branch[:, None, :] == 0) | (branch[:, None, :] == branch[:, :, None]))
        if window is not None:
            visible &= q - k < window
        mask = torch.zeros(visible.shape, dtype=dtype, device=self.device).masked_fill_(~visible, -torch.inf)
        return mask[:, None, None]
