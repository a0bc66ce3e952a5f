"""Task sorting: put a few numbers in order."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar

from tilth.config.tasks import Task
from tilth.core.errors import RewardError
from tilth.data.columns import Prompt
from tilth.data.computed import Computed, mixed, random_words
from tilth.rewards.verifiers import MOST_DIGITS, Info, answer_of, graded, integer, missing

if TYPE_CHECKING:
    import numpy as np  # in functions otherwise: a reward process imports tasks but not numpy

_PIECE = 1 << 15
"""Texts built at once."""
MOST_LIST = 4096
"""Characters of the longest list that is parsed."""
_LIST = re.compile(r"\s*-?[0-9]+(?:\s*,\s*-?[0-9]+)*\s*", re.ASCII)


class SortingPrompts(Computed):
    """``31,7,12=`` -> ``7,12,31``: ``length`` numbers of at most ``digits`` digits each, smallest first.

    All lists if they are at most a million, else a million drawn at random, each a pure function of its index. A few
    drawn lists may be equal; they are on the same side of a split.
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
        import numpy as np

        if self._lists <= self.MOST:
            base = 10**self.digits
            return np.arange(self._lists)[:, None] // base ** np.arange(self.length) % base
        words = random_words(("sorting", self.digits, self.length), 0, self.MOST * self.length)
        return (words * 10**self.digits >> 32).reshape(self.MOST, self.length)

    def prompt(self, index: int) -> Prompt:
        """Return the prompt at an index."""
        numbers = self._numbers[index].tolist()
        answer = ",".join(map(str, sorted(numbers)))
        return Prompt(index, f"{','.join(map(str, numbers))}=", answer, {"numbers": numbers, "answer": answer})

    def texts(self) -> Iterator[str]:
        """Yield the text of each prompt."""
        template = ",".join(["%d"] * self.length) + "="
        for start in range(0, len(self), _PIECE):
            yield from map(template.__mod__, zip(*self._numbers[start : start + _PIECE].T.tolist()))

    def sizes(self) -> np.ndarray:
        """int64 [n]: bytes of each text: the digits, and one sign after each number."""
        import numpy as np

        return (2 + (self._numbers[..., None] >= 10 ** np.arange(1, self.digits)).sum(-1)).sum(1)

    def alphabet(self) -> str:
        """Return ten digits and two signs."""
        return ",0123456789="

    def fingerprint(self) -> str:
        """Return the task and its size."""
        return f"sorting of {self.length} numbers of {self.digits} digits"


@dataclass(frozen=True)
class SortingVerifier:
    """1 if the completion is the list ``info["answer"]``, such as ``7,12,31``.

    White space around numbers and leading zeros do not matter. Parts: ``correct``; ``format``: 1 for a list of the
    numbers of the answer in any order. The reward is ``partial`` if only the format is right.
    """

    partial: float = 0.0
    decides: ClassVar[bool] = True

    def __call__(self, prompt: str, completion: str, info: Info) -> dict[str, float]:
        given, wanted = _numbers(completion), _numbers(answer_of(info))
        if wanted is None:
            raise RewardError(f"the answer is no list of whole numbers: {answer_of(info)[:60]!r}", key="answer.list")
        well_formed = given is not None and Counter(given) == Counter(wanted)
        return graded(well_formed, given == wanted, self.partial)

    def check(self, info: Info) -> str:
        """Check that the answer is a list in order."""
        wanted = None if missing(info) else _numbers(answer_of(info))
        in_order = wanted is not None and sorted(map(int, wanted)) == list(map(int, wanted))
        return missing(info) or ("" if in_order else "the answer is no list of whole numbers in order, as in 7,12,31")


def _numbers(text: str) -> list[str] | None:
    """Return the canonical digits of each number of a list; None for other texts and too long numbers."""
    if len(text) > MOST_LIST or not _LIST.fullmatch(text):
        return None
    found = [number for number in map(integer, text.split(",")) if number and len(number) <= MOST_DIGITS]
    return found if len(found) == text.count(",") + 1 else None


def wrong_order(prompt: Prompt) -> str:
    """Return the sorted numbers with two unequal neighbours swapped; if all are equal, without the last one."""
    import numpy as np

    numbers = (prompt.answer or "").split(",")
    unequal = [i for i, (a, b) in enumerate(pairwise(numbers)) if a != b]
    if not unequal:
        return ",".join(numbers[:-1])
    at = unequal[int(mixed(np.array([prompt.index], np.uint32))[0]) % len(unequal)]
    return ",".join([*numbers[:at], numbers[at + 1], numbers[at], *numbers[at + 2 :]])


TASK = Task(SortingPrompts, SortingVerifier(), wrong_order)
