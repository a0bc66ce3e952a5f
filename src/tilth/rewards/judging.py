"""Questions to a judge of solutions, its verdicts and its reward (FAPO, arXiv 2510.22543). Pure functions; no torch.

Training and use of a judge split a solution into steps by one rule, so that step indices agree. The verdict is the
index of the first wrong step, or -1 if all are right.
"""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

NONE_WRONG = -1
"""Verdict on a solution without a wrong step."""
_VERDICT = re.compile(r"(?:#+[ \t]*|\\boxed[ \t]*\{[ \t]*)(-?[0-9]{1,9})(?![0-9])")

_GRADE = re.compile(
    r"(?:score[ \t]*[:=][ \t]*|#+[ \t]*|\\boxed[ \t]*\{[ \t]*)(-?[0-9]{1,9}(?:\.[0-9]{1,9})?)(?![0-9])"
    r"(?:[ \t]*/[ \t]*([0-9]{1,9}))?",
    re.IGNORECASE,
)


def steps(solution: str) -> list[str]:
    """Return the steps of a solution: its stripped, non-empty lines."""
    return [line for line in map(str.strip, solution.split("\n")) if line]


def question(problem: str, answer: str, solution: Sequence[str]) -> str:
    """Return the question to a judge: the problem, the right answer, and each step behind its index from 0."""
    listed = "".join(f"{i}:{step}\n" for i, step in enumerate(solution))
    return f"{problem.strip()}\n{answer.strip()}\n{listed}?"


def verdict(text: str, count: int) -> int | None:
    """Parse the index of the first wrong step of ``count``, or -1, after the last ``#`` or in the last ``\\boxed{}``.

    Return None if the text has no index or one out of range.
    """
    found = _VERDICT.findall(text)
    index = int(found[-1]) if found else None
    return index if index is not None and NONE_WRONG <= index < count else None


def grading(rubric: str, problem: str, answer: str, completion: str) -> str:
    """Return the prompt of a judge that grades: the rubric with {prompt}, {answer} and {completion} filled in."""
    known = {"{prompt}": problem, "{answer}": answer, "{completion}": completion}
    return re.sub("|".join(map(re.escape, known)), lambda found: known[found[0]], rubric)


def grade(text: str) -> float | None:
    """Parse the score after the last ``Score:`` or ``#``, or in the last ``\\boxed{}``; ``7/10`` is 0.7. None: it has
    none."""
    found = list(_GRADE.finditer(text))
    if not found:
        return None
    value, whole = float(found[-1][1]), float(found[-1][2] or 1)
    return value / whole if whole else None


def process_reward(given: int | None, truth: int, count: int) -> float:
    """Return a judge's reward in [-1, 1]: 1 or -1 for its label (flawed or clean), less the distance of two flaws.

    given, truth: index of the first wrong step of ``count``, -1: none; given None: an unreadable verdict, which earns
    -1. The distance is |given - truth| / count (FAPO, section 3.2), so that a right label always earns more than a
    wrong one.
    """
    if given is None or (given == NONE_WRONG) != (truth == NONE_WRONG):
        return -1.0
    return 1.0 - abs(given - truth) / count


def penalty(reward: "np.ndarray", *, coefficient: float, flawed: "np.ndarray") -> "np.ndarray":
    """Return rewards (0 wrong, 1 right) after judgement, float64 [n]. flawed: bool [n].

    FAPO subtracts ``coefficient`` (lambda) from rewards of -1 and 1, which are twice as far apart; half of it is
    subtracted here, so that advantages normalised by the group's spread equal the paper's.
    """
    import numpy as np  # here: reward processes import nothing heavy

    return np.where(flawed, reward - coefficient / 2, reward)
