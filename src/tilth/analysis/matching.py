"""Match spans of the same call or communication, for clocks, transfers, waiting and arrows."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

PAIR = ("send", "receive")
"""The two halves of one communication."""


def ranks_of(detail: str) -> int:
    """Count the ranks in "0,1,2" or "0>1"; 0 where it names none."""
    names = re.split("[,>]", detail)
    return len(names) if all(name.isdecimal() for name in names) else 0


def together(
    op: np.ndarray, ops: Sequence[str], detail: np.ndarray, details: Sequence[str], seq: np.ndarray, rank: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Number the communications of k spans from 0 on, and count their ranks: int64 [k] each; -1 and 0 if incomplete.

    Members have the same operation (a send and its receive count as one), group and number. A communication is
    complete if each rank that its detail names is there once: members may be lost, or not written yet.

    op, detail: int [k], codes of ``ops`` and ``details``; seq, rank: int64 [k].
    """
    sizes = np.array([ranks_of(text) for text in details], np.int64)[detail]
    pairs = np.isin(op, [i for i, name in enumerate(ops) if name in PAIR])
    kind = np.where(pairs, len(ops), op) * np.int64(len(details)) + detail
    key = kind * (int(seq.max(initial=0)) + 2) + seq + 1
    _, number, count = np.unique(key, return_inverse=True, return_counts=True)
    number = number.reshape(-1)
    _, once = np.unique(number * (int(rank.max(initial=0)) + 1) + rank, return_index=True)
    there = np.bincount(number[once], minlength=len(count))
    whole = (sizes > 0) & (count[number] == sizes) & (there[number] == sizes) & (seq >= 0)
    return np.where(whole, number, -1), np.where(whole, sizes, 0)


@dataclass(frozen=True, eq=False)
class Coded:
    """A column of few distinct texts: ``names[codes]``."""

    codes: np.ndarray  # int32 [n]
    names: tuple[str, ...]

    def is_(self, *names: str) -> np.ndarray:
        """bool [n]: rows with one of these texts."""
        return np.array([name in names for name in self.names], bool)[self.codes]

    def text(self, row: int) -> str:
        """Return the text of a row."""
        return self.names[self.codes[row]]

    def __getitem__(self, rows: np.ndarray) -> "Coded":
        return Coded(self.codes[rows], self.names)


@dataclass(frozen=True, eq=False)
class Spans:
    """Columns that spans are matched by. rank, seq, start, end: int64 [n]."""

    rank: np.ndarray
    seq: np.ndarray
    start: np.ndarray
    end: np.ndarray
    op: Coded
    detail: Coded

    @cached_property
    def rows(self) -> dict[int, np.ndarray]:
        """Rows of each rank, ascending."""
        return split(self.rank)

    def of(self, *names: str, rank: int | None = None) -> np.ndarray:
        """int64 [k]: rows of these operations, of all ranks or of one."""
        if rank is None:
            return np.flatnonzero(self.op.is_(*names))
        mine = self.rows.get(rank, np.zeros(0, np.int64))
        return mine[self.op[mine].is_(*names)]

    def grouped(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Apply ``together`` to these rows: numbers and ranks of their communications, int64 [k] each."""
        op, detail = self.op, self.detail
        return together(op.codes[rows], op.names, detail.codes[rows], detail.names, self.seq[rows], self.rank[rows])

    def calls(self, controller: int, rank: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Match a rank's calls: int64 rows (calls, their submits, calls, their awaits), of calls that have one."""
        here = self.of("call", rank=rank)
        here = here[self.seq[here] >= 0]
        submits, awaits = self.of("submit", rank=controller), self.of("await", rank=controller)
        _, i, asked = np.intersect1d(self.seq[here], self.seq[submits], return_indices=True)
        _, j, answered = np.intersect1d(self.seq[here], self.seq[awaits], return_indices=True)
        return here[i], submits[asked], here[j], awaits[answered]


def split(ranks: np.ndarray) -> dict[int, np.ndarray]:
    """Return the rows of each rank, ascending. Ranks are below 65,536: 16-bit integers sort fast."""
    order = np.argsort(ranks.astype(np.uint16), kind="stable")
    found, first = np.unique(ranks[order], return_index=True)
    return dict(zip(found.tolist(), np.split(order, first[1:])))
