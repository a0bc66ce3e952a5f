"""Prefix trees: the tokens of a shared prompt are computed once, each sample is a branch after them.

Forward and backward of G samples have P + G C tokens instead of G (P + C). A token attends to the prompt and its own
branch; positions continue after the prompt in every branch. Values equal those of separate sequences up to the order of
additions.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tilth.core.batch import Jagged
from tilth.core.device import to_device
from tilth.models.attention import (
    DropoutContext,
    bucket_lengths,
    matmul_attention,
    matmul_pays,
    sdpa_attention,
    varlen_attention,
    varlen_serves,
)
from tilth.models.moe import ExpertContext
from tilth.models.rows import pad_rows, spread_rows, take_rows


class PrefixTrees(NamedTuple):
    """Layout of packed sequences in trees. N: packed tokens; M <= N: tokens of the trees, tree after tree."""

    source: np.ndarray
    """int64 [M]: packed token of each tree token."""
    slot: np.ndarray
    """int64 [N]: tree token of each packed token."""
    lengths: np.ndarray
    """int64 [trees]: tokens of each tree."""
    branch: np.ndarray
    """int64 [M]: 0 on a prompt, else number of the branch in its tree, from 1."""
    position: np.ndarray
    """int64 [M]: position of the token in its sequence."""


def plant(tokens: Jagged, prompts: np.ndarray, groups: Sequence[np.ndarray]) -> PrefixTrees:
    """Lay out each group of rows, which share their first ``prompts[row]`` tokens, as one tree.

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
    return PrefixTrees(join(sources), slot, np.array(lengths), join(branches), join(positions))


class _Segments(NamedTuple):
    """Segments of trees that are queried together: each prompt, and each branch after its prompt. All [n]."""

    start: np.ndarray
    """First token of the segment."""
    own: np.ndarray
    """Number of tokens of the segment."""
    trunk: np.ndarray
    """First token of its prompt."""
    before: np.ndarray
    """Number of tokens of that prompt; 0 for a prompt itself."""


def _segments(trees: PrefixTrees) -> _Segments:
    tree = np.repeat(np.arange(len(trees.lengths)), trees.lengths)
    start = np.flatnonzero(np.diff(tree, prepend=-1) | np.diff(trees.branch, prepend=-1))
    own = np.diff(np.append(start, len(tree)))
    root = np.cumsum(trees.lengths) - trees.lengths
    prompt = np.bincount(tree[trees.branch == 0], minlength=len(trees.lengths))
    return _Segments(start, own, root[tree[start]], np.where(trees.branch[start] == 0, 0, prompt[tree[start]]))


@dataclass(frozen=True)
class _Group:
    """Segments padded to one size: ``count`` x ``queries`` slots from ``query_start``, and keys likewise."""

    query_start: int
    key_start: int
    count: int
    queries: int
    keys: int
    before: np.ndarray
    own: np.ndarray


class _Unpadded(NamedTuple):
    """Segments one after the other without padding; their queries are the tokens as they are."""

    seen: Tensor
    """int64 [M]: token of each key."""
    images: Tensor
    """int64 [M]: keys of each token."""
    first: Tensor
    """int64 [tokens]: first of a token's keys in ``images``."""
    ends: tuple[Tensor, Tensor]
    """Cumulative numbers of queries and keys, int32 [segments + 1]."""
    longest: tuple[int, int]


class TreeContext:
    """Attention context of trees: a branch queries its prompt and itself.

    Prompts are copied as keys and values only; they are projected, normed and queried once. Supports neither parity,
    which needs other shapes, nor dropout.
    """

    dropout: DropoutContext | None = None

    def __init__(self, trees: PrefixTrees, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self.experts: ExpertContext | None = None
        ends = np.zeros(len(trees.lengths), np.int64)
        np.maximum.at(ends, np.repeat(np.arange(len(ends)), trees.lengths), trees.position + 1)
        self._masks: dict[tuple[int, int | None, torch.dtype], Tensor] = {}
        self._segments, self._tokens = _segments(trees), len(trees.source)
        self.positions, self.extents = to_device([trees.position, np.repeat(ends, trees.lengths)], self.device)
        self._groups: list[_Group] = []
        if self.device.type == "cpu":
            self._plan()

    def _plan(self) -> None:
        """Set groups, the token of each slot of padded queries, the slot of each token, the token of each slot of
        padded keys, and the slots of each token among these, with the first of each."""
        s, tokens = self._segments, self._tokens
        asked, seen, real = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], [np.zeros(0, bool)]
        slot, queries, keys = np.zeros(tokens, np.int64), 0, 0
        for members, q, k in _buckets(s.own, s.before + s.own):
            start, own, trunk, before = (x[members, None] for x in s)
            places, j = np.arange(q), np.arange(k)
            asked.append((start + np.minimum(places, own - 1)).ravel())
            inside = np.minimum(j, before + own - 1)
            seen.append(np.where(inside < before, trunk + inside, start + inside - before).ravel())
            real.append((j < before + own).ravel())
            mine = queries + np.arange(len(members))[:, None] * q + places
            slot[(start + places)[places < own]] = mine[places < own]
            self._groups.append(_Group(queries, keys, len(members), q, k, before[:, 0], own[:, 0]))
            queries, keys = queries + len(members) * q, keys + len(members) * k
        every = np.concatenate(seen)
        tables = [np.concatenate(asked), slot, every, *_images(every, np.concatenate(real), tokens)]
        self._asked, self._slot, self._seen, self._images, self._first = to_device(tables, self.device)

    @cached_property
    def _unpadded(self) -> _Unpadded:
        s, keys = self._segments, self._segments.before + self._segments.own
        ends = [np.append(0, np.cumsum(lengths)).astype(np.int32) for lengths in (s.own, keys)]
        start, trunk, before, begin = (np.repeat(x, keys) for x in (s.start, s.trunk, s.before, ends[1][:-1]))
        place = np.arange(len(begin)) - begin
        seen = np.where(place < before, trunk + place, start + place - before)
        tables = [seen, *_images(seen, np.ones(len(seen), bool), self._tokens), *ends]
        own, images, first, queries, others = to_device(tables, self.device)
        return _Unpadded(own, images, first, (queries, others), (int(s.own.max()), int(keys.max())))

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None, sinks: Tensor | None = None
    ) -> Tensor:
        if not self._tokens:
            return q.new_empty(*q.shape[:2], v.shape[2])
        if sinks is None and varlen_serves(q):
            seen, images, first, ends, longest = self._unpadded
            k, v = (spread_rows(x, seen, images, first) for x in (k, v))
            return varlen_attention(q, k, v, ends, longest, window)
        if not self._groups:
            self._plan()
        q = pad_rows(q, self._asked, self._slot)
        k, v = (spread_rows(x, self._seen, self._images, self._first) for x in (k, v))
        parts = [self._attend_group(i, q, k, v, window, sinks) for i in range(len(self._groups))]
        return take_rows(parts[0] if len(parts) == 1 else torch.cat(parts), self._slot)

    def _attend_group(
        self, number: int, q: Tensor, k: Tensor, v: Tensor, window: int | None, sinks: Tensor | None
    ) -> Tensor:
        g = self._groups[number]
        kv_heads, hd = k.shape[1:]
        q = q[g.query_start : g.query_start + g.count * g.queries]
        heads_first = q.view(g.count, g.queries, kv_heads, -1, hd).permute(0, 2, 3, 1, 4)
        some = slice(g.key_start, g.key_start + g.count * g.keys)
        k, v = (x[some].view(g.count, g.keys, kv_heads, -1).transpose(1, 2) for x in (k, v))
        attention = matmul_attention if matmul_pays(g.keys, q.dtype, self.device) else sdpa_attention
        out = attention(heads_first, k, v, self._mask(number, window, q.dtype), sinks)
        return out.permute(0, 3, 1, 2, 4).reshape(*q.shape[:2], -1)

    def _mask(self, number: int, window: int | None, dtype: torch.dtype) -> Tensor:
        """Return the additive mask [1 or segments of the group, 1, 1, queries, keys], cached for all layers."""
        key = number, window, dtype
        if key not in self._masks:
            (visible,) = to_device([_visible(self._groups[number], window)], self.device)
            mask = torch.zeros(visible.shape, dtype=dtype, device=self.device).masked_fill_(~visible, -torch.inf)
            self._masks[key] = mask[:, None, None]
        return self._masks[key]


def _images(seen: np.ndarray, real: np.ndarray, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the slots of token 0, then those of token 1 and so on, and the first of each token's: int64 [M], [tokens].

    seen: token of each slot; real: bool, False of padding.
    """
    images = np.flatnonzero(real)
    owner = seen[images]
    counts = np.bincount(owner, minlength=tokens)
    return images[np.argsort(owner, kind="stable")], np.cumsum(counts) - counts


def _buckets(own: np.ndarray, total: np.ndarray) -> Iterator[tuple[np.ndarray, int, int]]:
    """Yield (segments, queries, keys) of segments padded to equal numbers of queries and keys."""
    queries = bucket_lengths(own)
    for q in np.unique(queries):
        members = np.flatnonzero(queries == q)
        keys = bucket_lengths(total[members])
        for k in np.unique(keys):
            yield members[keys == k], int(q), int(k)


def _visible(g: _Group, window: int | None) -> np.ndarray:
    """Return bool [1 or segments, queries, keys]. Padding sees what the last real token sees, so no row is empty."""
    alike = bool((g.before == g.before[0]).all())
    before = g.before[:1] if alike else g.before
    last = np.full(1, g.keys - 1 - before[0]) if alike else g.own - 1
    at = (before[:, None] + np.minimum(np.arange(g.queries), last[:, None]))[:, :, None]
    keys = np.arange(g.keys)
    seen = keys <= at
    return seen if window is None else seen & (at - keys < window)
