"""Which spans belong to the same call or communication: the one answer for clocks, transfers, waiting and arrows."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

PAIR = ("send", "receive")
"""The two halves of one communication."""


def ranks_of(detail: str) -> int:
    """Ranks in "0,1,2" or "0>1"; 0 where it names none."""
    names = re.split("[,>]", detail)
    return len(names) if all(name.isdecimal() for name in names) else 0


def together(
    op: np.ndarray, ops: Sequence[str], detail: np.ndarray, details: Sequence[str], seq: np.ndarray, rank: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Of k spans of communications the number of the one that each is part of, from 0 on, and how many ranks it has:
    int64 [k] each; -1 and 0 where it is not there as a whole.

    Members have the same operation (a send and its receive count as one), group and number. A communication is whole
    where each rank that its detail names is there once: members may be lost, or not written yet.

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
    """A column of few different texts: ``names[codes]``. codes: int32 [n]."""

    codes: np.ndarray
    names: tuple[str, ...]

    def is_(self, *names: str) -> np.ndarray:
        """bool [n]: which rows say one of these."""
        return np.array([name in names for name in self.names], bool)[self.codes]

    def text(self, row: int) -> str:
        """What a row says."""
        return self.names[self.codes[row]]

    def __getitem__(self, rows: np.ndarray) -> "Coded":
        return Coded(self.codes[rows], self.names)


@dataclass(frozen=True, eq=False)
class Spans:
    """What spans are matched by. rank, seq, start, end: int64 [n]."""

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
        """int64 [k] each: number and ranks of the communication that each of these rows is part of; -1 and 0: of no
        whole one."""
        op, detail = self.op, self.detail
        return together(op.codes[rows], op.names, detail.codes[rows], detail.names, self.seq[rows], self.rank[rows])

    def calls(self, controller: int, rank: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """int64: rows of a rank's calls with those of their submits, and rows of its calls with those of their
        awaits; of the calls that have one."""
        here = self.of("call", rank=rank)
        here = here[self.seq[here] >= 0]
        submits, awaits = self.of("submit", rank=controller), self.of("await", rank=controller)
        _, i, asked = np.intersect1d(self.seq[here], self.seq[submits], return_indices=True)
        _, j, answered = np.intersect1d(self.seq[here], self.seq[awaits], return_indices=True)
        return here[i], submits[asked], here[j], awaits[answered]


def split(ranks: np.ndarray) -> dict[int, np.ndarray]:
    """Where each of the ranks is, ascending. They are below 65,536, which sorts fast."""
    order = np.argsort(ranks.astype(np.uint16), kind="stable")
    found, first = np.unique(ranks[order], return_index=True)
    return dict(zip(found.tolist(), np.split(order, first[1:])))
