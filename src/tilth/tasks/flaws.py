"""The task flaws: which of the written steps of a chain is the first wrong one."""

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
from tilth.tasks.chain import Chains, WrittenProblem, spelled

if TYPE_CHECKING:
    import numpy as np  # in functions otherwise: a reward process imports tasks but not numpy


class FlawsPrompts(Chains):
    """A judge's task: a chain, its answer and a solution in indexed steps -> the index of the first wrong step, or -1.

    What is taught before the verdict is what each step should have made, and whether it did: ``0:7+1:4-#1``. The
    answer is right everywhere, as wherever a judge is asked.
    """

    MOST = 50_000

    def __init__(self, digits: int, length: int, flawed: float) -> None:
        super().__init__("flaws", digits, length, flawed, "sckg")

    def prompt(self, index: int) -> Prompt:
        """The prompt at an index."""
        found = self.written(index)
        info = {"answer": str(found.first), "steps": len(found.steps)}
        return Prompt(index, asked(found), reasoned(found), info)

    def texts(self) -> Iterator[str]:
        """Text of each prompt."""
        return (asked(self.written(i)) for i in range(len(self)))

    def sizes(self) -> np.ndarray:
        """Bytes of a text with all its steps, which is the longest."""
        import numpy as np

        return np.full(len(self), len(asked(self.written(0)._replace(steps=self.problem(0).solution()))), np.int64)

    def alphabet(self) -> str:
        """That of the chain, and what a judge is asked with."""
        return "\n#*+-0123456789:=?"


def asked(found: WrittenProblem) -> str:
    """What a judge of this solution is asked."""
    return question(spelled(found.problem), found.right[-1][1:], found.steps)


def reasoned(found: WrittenProblem) -> str:
    """What a judge is taught to say: index and right result of each step and a sign, ``-`` at the first wrong one."""
    width = len(found.problem.numbers[0])
    until = len(found.right) if found.first == NONE_WRONG else found.first + 1
    results = [step[-width:] for step in found.right[:until]]
    marks = "".join(f"{i}:{result}{'-' if i == found.first else '+'}" for i, result in enumerate(results))
    return f"{marks}#{found.first}"


@dataclass(frozen=True)
class FlawsVerifier:
    """What a judge of solutions earns for its verdict, see ``judging.process_reward``: from -1 to 1.

    ``info["answer"]``: the index of the first wrong step, -1 where none is; ``info["steps"]``: their number.
    Parts: ``correct``: 1 if the label, flawed or clean, is right; ``exact``: 1 if the index is; ``format``: 1 if it
    could be read. ``precision`` is the part ``correct`` of what it calls flawed, ``recall`` of what is.
    """

    decides: ClassVar[bool] = False

    def __call__(self, prompt: str, completion: str, info: Info) -> dict[str, float]:
        truth, count = _truth(info)
        said = verdict(completion, count)
        label = said is not None and (said == NONE_WRONG) == (truth == NONE_WRONG)
        graded = {"reward": process_reward(said, truth, count), "correct": float(label), "exact": float(said == truth)}
        graded["format"] = float(said is not None)
        if said not in (None, NONE_WRONG):
            graded["precision"] = float(label)
        if truth != NONE_WRONG:
            graded["recall"] = float(label)
        return graded

    def check(self, info: Info) -> str:
        """The answer has to be an index of a step, or -1."""
        try:
            _truth(info)
        except RewardError as error:
            return str(error)
        return ""


def _truth(info: Info) -> tuple[int, int]:
    """The right verdict and the number of steps."""
    count, answer = info.get("steps"), str(info.get("answer", "")).strip()
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        message = f"a verdict needs a column steps, the number of steps, at least 1; it is {count!r}"
        raise RewardError(message[:200], key="steps")
    if not re.fullmatch(r"-1|[0-9]{1,9}", answer, re.ASCII) or int(answer) >= count:
        message = f"the answer is {answer[:60]!r}, neither the index of one of {count} steps nor -1"
        raise RewardError(message, key="answer")
    return int(answer), count


TASK = Task(FlawsPrompts, FlawsVerifier())
