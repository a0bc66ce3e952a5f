"""Task addition: the sum of two numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

from tilth.config.tasks import Task
from tilth.data.columns import Prompt
from tilth.data.computed import Computed, mixed, text_hashes
from tilth.rewards.verifiers import Info, answer_of, integer, missing

if TYPE_CHECKING:
    import numpy as np  # in functions otherwise: a reward process imports tasks but not numpy


class AdditionPrompts(Computed):
    """``123+456=`` -> ``0579``: the sum of two numbers, zero-padded to one digit more.

    At most a million of the 10^(2 digits) pairs are used, spread evenly: index i is the pair
    ``divmod(i * stride mod 10^(2 digits), 10^digits)``, a bijection since the stride has no factor 2 or 5.
    """

    MOST = 10**6

    def __init__(self, digits: int) -> None:
        self.digits = digits
        self._base = 10**digits
        self._pairs = self._base**2
        # near the golden ratio, so that indices are spread evenly; at most 2^43, so that int64 never overflows
        self._stride = 1 if self._pairs <= self.MOST else _coprime_to_10(min(round(self._pairs * 0.618034), 2**43))

    def __len__(self) -> int:
        return min(self._pairs, self.MOST)

    def pair(self, index: int) -> tuple[int, int]:
        """Return the two numbers of a prompt."""
        return divmod(index * self._stride % self._pairs, self._base)

    def index(self, a: int, b: int) -> int:
        """Return the index of a pair (inverse of ``pair``); at least ``len`` for an unused pair."""
        return (a * self._base + b) * pow(self._stride, -1, self._pairs) % self._pairs

    def prompt(self, index: int) -> Prompt:
        """Return the prompt at an index."""
        a, b = self.pair(index)
        width = self.digits
        answer = f"{a + b:0{width + 1}}"
        return Prompt(index, f"{a:0{width}}+{b:0{width}}=", answer, {"answer": answer})

    @cached_property
    def hashes(self) -> np.ndarray:
        """uint32 [n]: hash of each text, all texts built at once column by column."""
        import numpy as np

        code = np.arange(len(self), dtype=np.int64) * self._stride % self._pairs
        text = np.full((len(self), 2 * self.digits + 2), ord("="), np.uint8)
        text[:, self.digits] = ord("+")
        for column in [*range(2 * self.digits, self.digits, -1), *range(self.digits - 1, -1, -1)]:
            text[:, column] = code % 10 + ord("0")
            code //= 10
        return text_hashes(text.view(f"V{text.shape[1]}").ravel().tolist())

    def sizes(self) -> np.ndarray:
        """Return the equal sizes of all texts, int64 [n]."""
        import numpy as np

        return np.full(len(self), 2 * self.digits + 2, np.int64)

    def alphabet(self) -> str:
        """Return ten digits and two signs."""
        return "+0123456789="

    def fingerprint(self) -> str:
        """Return the task and its size."""
        return f"addition of {self.digits} digits"


def _coprime_to_10(number: int) -> int:
    return next(n for n in range(number, number + 10) if math.gcd(n, 10) == 1)


@dataclass(frozen=True)
class AdditionVerifier:
    """1.0 if the completion is the integer ``info["answer"]``, else 0.0.

    White space around the number and leading zeros do not matter (the task pads its answers). Anything else is wrong: a
    word, a space inside, a plus sign, a decimal point, an empty completion.
    """

    decides: ClassVar[bool] = True

    def __call__(self, prompt: str, completion: str, info: Info) -> float:
        given = integer(completion)
        return float(given is not None and given == integer(answer_of(info)))

    def check(self, info: Info) -> str:
        """Check that the answer is an integer."""
        return missing(info) or ("" if integer(answer_of(info)) else "the answer is no integer")


def wrong_sum(prompt: Prompt) -> str:
    """Return the sum with one digit off by one, like a wrong carry."""
    import numpy as np

    answer = prompt.answer or "0"
    drawn = int(mixed(np.array([prompt.index], np.uint32))[0])
    at, step = drawn % len(answer), 1 if drawn >> 16 & 1 else -1
    return answer[:at] + str((int(answer[at]) + step) % 10) + answer[at + 1 :]


TASK = Task(AdditionPrompts, AdditionVerifier(), wrong_sum)
