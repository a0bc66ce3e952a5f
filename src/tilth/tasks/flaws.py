"""Task flaws: find the first wrong step in a written solution of a chain."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from tilth.config.tasks import Task
from tilth.core.errors import RewardError
from tilth.data.columns import Prompt
from tilth.rewards.judging import NONE_WRONG, process_reward, question, verdict
from tilth.rewards.verifiers import Info
from tilth.tasks.chain import Chains, WrittenProblem, problem_text

if TYPE_CHECKING:
    import numpy as np  # in functions otherwise: a reward process imports tasks but not numpy


class FlawsPrompts(Chains):
    """A chain, its answer and a solution in indexed steps -> the index of the first wrong step, or -1.

    The taught text has the right result of each step and a mark before the verdict: ``0:7+1:4-#1``. The final answer is
    always right, as in every question to a judge.
    """

    MOST = 50_000

    def __init__(self, digits: int, length: int, flawed: float) -> None:
        super().__init__("flaws", digits, length, flawed, "sckg")

    def prompt(self, index: int) -> Prompt:
        """Return the prompt at an index."""
        found = self.written(index)
        info = {"answer": str(found.first), "steps": len(found.steps)}
        return Prompt(index, asked(found), reasoned(found), info)

    def texts(self) -> Iterator[str]:
        """Yield the text of each prompt."""
        return (asked(self.written(i)) for i in range(len(self)))

    def sizes(self) -> np.ndarray:
        """Return bytes of the longest text, one with all its steps, for each prompt: int64 [n]."""
        import numpy as np

        return np.full(len(self), len(asked(self.written(0)._replace(steps=self.problem(0).solution()))), np.int64)

    def alphabet(self) -> str:
        """Return the alphabet of the task chain and the signs of a question."""
        return "\n#*+-0123456789:=?"


def asked(found: WrittenProblem) -> str:
    """Return the question to a judge of this solution."""
    return question(problem_text(found.problem), found.right[-1][1:], found.steps)


def reasoned(found: WrittenProblem) -> str:
    """Return the taught verdict: index, right result and mark of each step, ``-`` for the first wrong one."""
    width = len(found.problem.numbers[0])
    until = len(found.right) if found.first == NONE_WRONG else found.first + 1
    results = [step[-width:] for step in found.right[:until]]
    marks = "".join(f"{i}:{result}{'-' if i == found.first else '+'}" for i, result in enumerate(results))
    return f"{marks}#{found.first}"


@dataclass(frozen=True)
class FlawsVerifier:
    """Reward of a judge's verdict in [-1, 1], see ``judging.process_reward``.

    ``info["answer"]``: index of the first wrong step, -1: none; ``info["steps"]``: number of steps.
    Parts: ``correct``: 1 if the label (flawed or clean) is right; ``exact``: 1 if the index is; ``format``: 1 if the
    verdict is readable; ``precision``: ``correct`` of verdicts "flawed"; ``recall``: ``correct`` of flawed solutions.
    """

    decides: ClassVar[bool] = False

    def __call__(self, prompt: str, completion: str, info: Info) -> dict[str, float]:
        truth, count = _truth(info)
        given = verdict(completion, count)
        label = given is not None and (given == NONE_WRONG) == (truth == NONE_WRONG)
        reward = process_reward(given, truth, count)
        graded = {"reward": reward, "correct": float(label), "exact": float(given == truth)}
        graded["format"] = float(given is not None)
        if given not in (None, NONE_WRONG):
            graded["precision"] = float(label)
        if truth != NONE_WRONG:
            graded["recall"] = float(label)
        return graded

    def check(self, info: Info) -> str:
        """Check that the answer is the index of a step, or -1."""
        try:
            _truth(info)
        except RewardError as error:
            return str(error)
        return ""


def _truth(info: Info) -> tuple[int, int]:
    """Return the right verdict and the number of steps. Raises RewardError."""
    count, answer = info.get("steps"), str(info.get("answer", "")).strip()
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        message = f"a verdict needs a column steps, the number of steps, at least 1; it is {count!r}"
        raise RewardError(message[:200], key="steps")
    if not re.fullmatch(r"-1|[0-9]{1,9}", answer, re.ASCII) or int(answer) >= count:
        message = f"the answer is {answer[:60]!r}, neither the index of one of {count} steps nor -1"
        raise RewardError(message, key="answer")
    return int(answer), count


TASK = Task(FlawsPrompts, FlawsVerifier())
