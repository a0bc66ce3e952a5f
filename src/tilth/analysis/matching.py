"""Which spans are members of the same communication: the one answer for clocks, transfers, waiting and arrows."""

import re
from collections.abc import Sequence

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
