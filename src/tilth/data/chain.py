"""The tasks chain (arithmetic, step by step) and flaws (which of the written steps is the first wrong one)."""

from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

import numpy as np

from tilth.core.random import stream
from tilth.data.columns import Prompt
from tilth.data.sources import Computed, text_hashes
from tilth.rewards.judging import NONE_WRONG, question
from tilth.rewards.verifiers_steps import Problem, first_wrong

_SIGNS = "+-*"
_FLAWS = 4
"""Random words of a flaw: whether, which kind, where, what."""


class WrittenProblem(NamedTuple):
    """A problem, its solution, and what is written for it; the index of its first wrong step, -1 if none is."""

    problem: Problem
    right: list[str]
    steps: list[str]
    first: int


class Chains(Computed):
    """What both tasks have in common: problems of ``length`` steps with ``digits`` digits, and solutions to them.

    Numbers are added, subtracted and multiplied from left to right modulo 10^digits. Of the solutions a share
    ``flawed`` has a wrong step though the answer is right. All is a pure function of an index below ``MOST``.
    """

    MOST = 100_000

    def __init__(self, name: str, digits: int, length: int, flawed: float, kinds: str) -> None:
        """kinds: of flaws, see ``flaw``."""
        self.name = name
        self.digits, self.length, self.flawed, self.kinds = digits, length, flawed, kinds

    def __len__(self) -> int:
        return self.MOST

    @cached_property
    def _words(self) -> np.ndarray:
        """int64 [n, 2 length + 1 + _FLAWS]: 32 random bits each: numbers, signs, and what makes a flaw."""
        width = 2 * self.length + 1 + _FLAWS
        return stream(0, self.name, self.digits, self.length).bits(0, self.MOST * width).numpy().reshape(-1, width)

    def problem(self, index: int) -> Problem:
        """The problem of an index."""
        words = self._words[index].tolist()
        numbers = (f"{word * 10**self.digits >> 32:0{self.digits}}" for word in words[: self.length + 1])
        signs = (_SIGNS[word * len(_SIGNS) >> 32] for word in words[self.length + 1 : 2 * self.length + 1])
        return Problem(tuple(numbers), tuple(signs))

    def written(self, index: int) -> WrittenProblem:
        """A solution of it; flawed or not as the index says."""
        problem = self.problem(index)
        whether, kind, where, what = self._words[index, -_FLAWS:].tolist()
        right = problem.solution()
        if whether >= self.flawed * 2**32:
            return WrittenProblem(problem, right, right, NONE_WRONG)
        found = flaw(problem, right, self.kinds[kind * len(self.kinds) >> 32], where * self.length >> 32, what)
        return WrittenProblem(problem, right, found, first_wrong(right, found))

    @cached_property
    def hashes(self) -> np.ndarray:
        """Of all texts."""
        return text_hashes(text.encode() for text in self._texts())

    def _texts(self) -> Iterator[str]:
        raise NotImplementedError

    def fingerprint(self) -> str:
        """The task and all that decides what it is."""
        return f"{self.name} of {self.length} steps of {self.digits} digits, {self.flawed} flawed"


def flaw(problem: Problem, right: list[str], kind: str, at: int, word: int) -> list[str]:
    """The solution with a flaw in step ``at``, of which the answer is right nevertheless. word: 32 random bits.

    Kinds: ``s`` slip: a wrong result is written, and the right one used; ``c`` cancelling: the wrong result is used,
    and the next step makes up for it by another mistake; ``k`` skipped: a step is not written; ``g`` garbled: the step
    takes another number than the problem says.
    """
    modulus = 10 ** len(problem.numbers[0])
    if kind == "k":
        return [*right[:at], *right[at + 1 :]]
    left, result = right[at].split("=")
    other = f"{(int(result) + 1 + (word * (modulus - 1) >> 32)) % modulus:0{len(result)}}"
    if kind == "g":
        sign, number = problem.signs[at], problem.numbers[at + 1]
        changed = f"{(int(number) + 1 + (word * (modulus - 1) >> 32)) % modulus:0{len(number)}}"
        return [*right[:at], f"{left[: -len(number) - 1]}{sign}{changed}={result}", *right[at + 1 :]]
    written = [*right[:at], f"{left}={other}", *right[at + 1 :]]
    if kind == "c" and at + 1 < len(problem.signs):
        written[at + 1] = other + right[at + 1][len(result) :]
    return written


class Chain(Chains):
    """``3+4*2=`` -> ``3+4=7``, ``7*2=4``, ``#4``, a line each: the value of a chain, with its steps.

    The answer is the number at the end; a solution that a warm-up teaches has a wrong step in a share ``flawed`` of all
    prompts, so that a policy learns to write such ones too.
    """

    def __init__(self, digits: int, length: int, flawed: float) -> None:
        super().__init__("chain", digits, length, flawed, "sck")

    def prompt(self, index: int) -> Prompt:
        """The prompt at an index."""
        problem, right, written, _ = self.written(index)
        return Prompt(index, spelled(problem), "\n".join(written), {"answer": right[-1][1:]})

    def _texts(self) -> Iterator[str]:
        return (spelled(self.problem(i)) for i in range(len(self)))

    def sizes(self) -> np.ndarray:
        """All the same."""
        return np.full(len(self), (self.length + 1) * (self.digits + 1), np.int64)

    def alphabet(self) -> str:
        """Digits, signs, what marks an answer, and the end of a line."""
        return "\n#*+-0123456789="


class Flaws(Chains):
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

    def _texts(self) -> Iterator[str]:
        return (asked(self.written(i)) for i in range(len(self)))

    def sizes(self) -> np.ndarray:
        """Bytes of a text with all its steps, which is the longest."""
        return np.full(len(self), len(asked(self.written(0)._replace(steps=self.problem(0).solution()))), np.int64)

    def alphabet(self) -> str:
        """That of the chain, and what a judge is asked with."""
        return "\n#*+-0123456789:=?"


def spelled(problem: Problem) -> str:
    """The text of a problem."""
    first, *others = problem.numbers
    return first + "".join(sign + number for sign, number in zip(problem.signs, others)) + "="


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
