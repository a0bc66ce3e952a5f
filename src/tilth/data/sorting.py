"""The task sorting: put a few numbers in order."""

from collections.abc import Iterator
from functools import cached_property

import numpy as np

from tilth.core.random import stream
from tilth.data.columns import Prompt
from tilth.data.sources import Computed, text_hashes

_PIECE = 1 << 15
"""Texts made at once."""


class Sorting(Computed):
    """``31,7,12=`` -> ``7,12,31``: ``length`` numbers of at most ``digits`` digits each, smallest first.

    All lists where there are at most a million, otherwise a million drawn at random, each a pure function of its index.
    Of those drawn a few may be the same: they are on the same side of a split.
    """

    MOST = 10**6

    def __init__(self, digits: int, length: int) -> None:
        self.digits = digits
        self.length = length
        self._lists = 10 ** (digits * length)

    def __len__(self) -> int:
        return min(self._lists, self.MOST)

    @cached_property
    def _numbers(self) -> np.ndarray:
        """int64 [n, length]."""
        if self._lists <= self.MOST:
            base = 10**self.digits
            return np.arange(self._lists)[:, None] // base ** np.arange(self.length) % base
        words = stream(0, "sorting", self.digits, self.length).bits(0, self.MOST * self.length).numpy()
        return (words * 10**self.digits >> 32).reshape(self.MOST, self.length)

    def prompt(self, index: int) -> Prompt:
        """The prompt at an index."""
        numbers = self._numbers[index].tolist()
        answer = ",".join(map(str, sorted(numbers)))
        return Prompt(index, f"{','.join(map(str, numbers))}=", answer, {"numbers": numbers, "answer": answer})

    @cached_property
    def hashes(self) -> np.ndarray:
        """Of all texts."""
        return text_hashes(text.encode() for text in self._texts())

    def _texts(self) -> Iterator[str]:
        spelled = ",".join(["%d"] * self.length) + "="
        for start in range(0, len(self), _PIECE):
            yield from map(spelled.__mod__, zip(*self._numbers[start : start + _PIECE].T.tolist()))

    def sizes(self) -> np.ndarray:
        """A digit is a byte, and each number has a sign after it."""
        return (2 + (self._numbers[..., None] >= 10 ** np.arange(1, self.digits)).sum(-1)).sum(1)

    def alphabet(self) -> str:
        """Ten digits and two signs."""
        return ",0123456789="

    def fingerprint(self) -> str:
        """The task and its size."""
        return f"sorting of {self.length} numbers of {self.digits} digits"
