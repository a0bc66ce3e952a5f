"""What a judge of solutions reads, says and is paid for (FAPO, arXiv 2510.22543). Pure functions of texts; no torch.

A solution is split into steps by one rule, at a judge's training and at its use, so that the index of a step means the
same in both. The verdict is the index of the first wrong step, -1 where none is.
"""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

NONE_WRONG = -1
"""The verdict on a solution without a wrong step."""
_VERDICT = re.compile(r"(?:#+[ \t]*|\\boxed[ \t]*\{[ \t]*)(-?[0-9]{1,9})(?![0-9])")


def steps(solution: str) -> list[str]:
    """The steps of a solution: its lines, without white space at their ends and without empty ones."""
    return [line for line in map(str.strip, solution.split("\n")) if line]


def question(problem: str, answer: str, solution: Sequence[str]) -> str:
    """What a judge is asked: the problem, the right answer, and each step behind its index, from 0.

    One form for data that a judge is trained on and for its use.
    """
    listed = "".join(f"{i}:{step}\n" for i, step in enumerate(solution))
    return f"{problem.strip()}\n{answer.strip()}\n{listed}?"


def verdict(said: str, count: int) -> int | None:
    """The index of the first wrong step of ``count``, or -1, after the last ``#`` or in the last ``\\boxed{}``.

    None: it says no index, or one that there is not.
    """
    found = _VERDICT.findall(said)
    index = int(found[-1]) if found else None
    return index if index is not None and NONE_WRONG <= index < count else None


def process_reward(said: int | None, truth: int, count: int) -> float:
    """What a judge earns, in [-1, 1]: 1 or -1 for the label flawed or clean, less the distance where both say flawed.

    said, truth: index of the first wrong step of ``count``, -1: none; said None: it could not be read, which is -1. The
    distance is that of the two indices over the number of steps (FAPO, section 3.2), so that a right label earns more
    than a wrong one wherever it is put.
    """
    if said is None or (said == NONE_WRONG) != (truth == NONE_WRONG):
        return -1.0
    return 1.0 - abs(said - truth) / count


def penalty(reward: "np.ndarray", *, coefficient: float, flawed: "np.ndarray") -> "np.ndarray":
    """float64 [n]: rewards after their judgement, where wrong is 0 and right is 1. flawed: bool [n].

    FAPO takes ``coefficient`` (lambda) off rewards of -1 and 1, which are twice as far apart: half of it is taken here,
    so that advantages over the group's spread are those of the paper.
    """
    import numpy as np  # here: processes that score import nothing heavy

    return np.where(flawed, reward - coefficient / 2, reward)
