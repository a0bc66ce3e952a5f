"""Division of packed sequences over the ranks along "cp": who has which tokens, who attends to whose, who sends what.

Each sequence is cut into 2 R chunks, and rank r of R has chunks r and 2 R - 1 - r (zig-zag, as in Llama 3, arXiv
2407.21783, and for packed sequences in ByteScale, arXiv 2502.21231). Under causal attention every rank then has about
1/R of the tokens and of the work of every sequence.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

WHOLE = 1 << 40
"""Window of attention without one."""


RING_SHARE = 0.75
"""Part of the keys and values of other ranks that a rank needs under causal attention of zig-zag chunks."""


class Chunks(NamedTuple):
    """Positions of one rank's two chunks of each sequence: [early, early_stop) and [late, late_stop), int64 [n]."""

    early: np.ndarray
    early_stop: np.ndarray
    late: np.ndarray
    late_stop: np.ndarray

    @property
    def counts(self) -> np.ndarray:
        """Tokens of each sequence, int64 [n]."""
        return self.early_stop - self.early + self.late_stop - self.late

    @property
    def first(self) -> np.ndarray:
        """Position of the first token of each sequence (any number where there is none)."""
        return np.where(self.early_stop > self.early, self.early, self.late)

    @property
    def last(self) -> np.ndarray:
        """Position of the last token of each sequence (any number where there is none)."""
        return np.where(self.late_stop > self.late, self.late_stop, self.early_stop) - 1

    def before(self, position: np.ndarray) -> np.ndarray:
        """Count the tokens of each sequence before a position."""
        early = np.clip(position - self.early, 0, self.early_stop - self.early)
        return early + np.clip(position - self.late, 0, self.late_stop - self.late)


class AttentionTiles(NamedTuple):
    """Queries of one rank and the keys of another (or its own) that they attend to; at most one tile per sequence.

    All int64 [tiles]. Queries and keys are consecutive tokens of their rank, in the order of ``ZigZag.tokens``.
    """

    query: np.ndarray
    """First query."""
    queries: np.ndarray
    key: np.ndarray
    """First key."""
    keys: np.ndarray

    @property
    def needed(self) -> np.ndarray:
        """Keys of all tiles: tokens of their rank, int64."""
        return ranges(self.key, self.keys)


@dataclass(frozen=True)
class ZigZag:
    """Zig-zag division of packed sequences over ranks. Ranks have equal numbers of tokens, up to one.

    edges: int64 [n, 2 ranks + 1], first positions of the chunks of each sequence, and its length. A chunk may be empty.
    """

    edges: np.ndarray

    @classmethod
    def of(cls, lengths: np.ndarray, ranks: int) -> "ZigZag":
        """Divide sequences of these lengths, int [n].

        What L / (2 ranks) leaves over goes to the ranks in turn, over all sequences, so that no rank collects it.
        """
        table = np.asarray(lengths, np.int64)
        left = table % (2 * ranks)
        one, rest = left // ranks, left % ranks
        begin = (np.cumsum(rest) - rest) % ranks
        more = one[:, None] + ((np.arange(ranks) - begin[:, None]) % ranks < rest[:, None])
        early, late = np.minimum(more, 1), more - np.minimum(more, 1)
        sizes = table[:, None] // (2 * ranks) + np.concatenate([early, late[:, ::-1]], 1)
        return cls(np.concatenate([np.zeros((len(table), 1), np.int64), np.cumsum(sizes, 1)], 1))

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.edges.shape[1] // 2

    @cached_property
    def starts(self) -> np.ndarray:
        """First packed token of each sequence, int64 [n]."""
        return np.cumsum(self.edges[:, -1]) - self.edges[:, -1]

    def chunks(self, rank: int) -> Chunks:
        """Return both chunks of a rank."""
        other = 2 * self.ranks - 1 - rank
        return Chunks(self.edges[:, rank], self.edges[:, rank + 1], self.edges[:, other], self.edges[:, other + 1])

    def positions(self, rank: int) -> np.ndarray:
        """Return the position of each token of a rank in its sequence, int64 [own]."""
        begin, counts = self._pieces(rank)
        return ranges(begin, counts)

    def tokens(self, rank: int) -> np.ndarray:
        """Return the packed indices of a rank's tokens, ascending, int64 [own]."""
        begin, counts = self._pieces(rank)
        return ranges(begin + np.repeat(self.starts, 2), counts)

    def _pieces(self, rank: int) -> tuple[np.ndarray, np.ndarray]:
        own = self.chunks(rank)
        counts = np.stack([own.early_stop - own.early, own.late_stop - own.late], 1)
        return np.stack([own.early, own.late], 1).ravel(), counts.ravel()

    def tiles(self, rank: int, source: int, window: int | None = None) -> AttentionTiles:
        """Return what the queries of ``rank`` attend to of the tokens of ``source``.

        Keys after all queries, and keys behind the window of all of them, are left out, and queries likewise.
        """
        own, theirs, width = self.chunks(rank), self.chunks(source), WHOLE if window is None else window
        skipped, asked, seen = np.zeros(len(self.edges), np.int64), own.counts, theirs.counts
        behind = skipped
        if source < rank:  # all queries see the early chunk, none the late one
            seen = theirs.early_stop - theirs.early
            behind = np.minimum(theirs.before(own.first - width + 1), seen)
            asked = own.before(theirs.early_stop - 1 + width)
        elif source > rank:  # late queries see both chunks, early ones neither
            skipped = own.early_stop - own.early
            behind = theirs.before(own.late - width + 1)
            asked = own.before(theirs.last + width) - skipped
        mine, yours = np.cumsum(own.counts) - own.counts, np.cumsum(theirs.counts) - theirs.counts
        some = np.flatnonzero((asked > 0) & (seen > behind))
        found = mine + skipped, asked, yours + behind, seen - behind
        return AttentionTiles(*(column[some] for column in found))

    def pairs(self, window: int | None = None) -> np.ndarray:
        """Return each rank's work: pairs of a token and one that it attends to, itself included, int64 [ranks]."""
        width = WHOLE if window is None else window
        return np.array([np.minimum(self.positions(rank) + 1, width).sum() for rank in range(self.ranks)], np.int64)

    def sent(self, window: int | None = None) -> np.ndarray:
        """Return the tokens whose keys and values each rank (row) sends to each other (column): int64 [ranks, ranks].

        Without a window, rank s sends its early chunk to ranks after it and all tokens to those before it: on average
        3/4 (``RING_SHARE``) of what a ring sends that passes whole blocks on.
        """
        table = np.zeros((self.ranks, self.ranks), np.int64)
        for source in range(self.ranks):
            for rank in range(self.ranks):
                if rank != source:
                    table[source, rank] = self.tiles(rank, source, window).keys.sum()
        return table


def ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Concatenate ``start, start + 1, ...`` with this count of each: int64 [sum of counts]."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total) + np.repeat(starts - (ends - counts), counts)
