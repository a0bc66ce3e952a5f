"""Task chain: arithmetic step by step, and the problems that it shares with the task flaws."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from tilth.config.tasks import Task
from tilth.core.errors import RewardError
from tilth.data.columns import Prompt
from tilth.data.computed import Computed, random_words
from tilth.rewards.judging import NONE_WRONG, steps
from tilth.rewards.verifiers import Info, graded

if TYPE_CHECKING:
    import numpy as np  # in functions otherwise: a reward process imports tasks but not numpy

_CHAIN = re.compile(r"[0-9]+(?:[-+*][0-9]+)+=", re.ASCII)
_STEP = re.compile(r"[0-9]+[-+*][0-9]+=[0-9]+", re.ASCII)
_END = re.compile(r"#[ \t]*([0-9]{1,64})", re.ASCII)
_SIGNS = "+-*"
_FLAWS = 4
"""Random words of a flaw: whether, kind, position, value."""


class Problem(NamedTuple):
    """``3+4*2=``: numbers and the signs between them, computed from left to right modulo 10^digits."""

    numbers: tuple[str, ...]
    signs: tuple[str, ...]

    def results(self) -> Iterator[str]:
        """Yield the result of each step as text."""
        width = len(self.numbers[0])
        value = int(self.numbers[0])
        for sign, number in zip(self.signs, self.numbers[1:]):
            value = apply(value, sign, int(number), 10**width)
            yield f"{value:0{width}}"

    def solution(self) -> list[str]:
        """Return all steps and the answer: ``3+4=7``, ``7*2=4``, ``#4``."""
        written, before = [], self.numbers[0]
        for sign, number, result in zip(self.signs, self.numbers[1:], self.results()):
            written.append(f"{before}{sign}{number}={result}")
            before = result
        return [*written, f"#{before}"]


def apply(value: int, sign: str, number: int, modulus: int) -> int:
    """Compute one step modulo ``modulus``."""
    made = value * number if sign == "*" else value + number if sign == "+" else value - number
    return made % modulus


def problem_of(prompt: str) -> Problem:
    """Parse a prompt. Raises RewardError if it is no chain."""
    text = prompt.strip()
    if not _CHAIN.fullmatch(text):
        raise RewardError(f"chain needs prompts such as '3+4*2=', not {text[:60]!r}", key="prompt")
    found = Problem(tuple(re.findall(r"[0-9]+", text)), tuple(re.findall(r"[-+*]", text)))
    if len({len(number) for number in found.numbers}) > 1:
        message = f"numbers of a chain have equally many digits, as in '03+42=', not {text[:60]!r}"
        raise RewardError(message, key="prompt.digits")
    return found


def first_wrong(right: Sequence[str], written: Sequence[str]) -> int:
    """Return the index of the first written step that differs from the right solution; -1 if none does.

    If the steps end too early, return their number. A step after an omitted one, a step with another number than the
    last result, and a wrong step that a later one compensates all count as wrong.
    """
    for i, step in enumerate(written):
        if i >= len(right) or step != right[i]:
            return i
    return NONE_WRONG if len(written) == len(right) else len(written)


class WrittenProblem(NamedTuple):
    """A problem, its solution, the written steps, and the index of the first wrong one (-1: none)."""

    problem: Problem
    right: list[str]
    steps: list[str]
    first: int


class Chains(Computed):
    """Problems of ``length`` steps with ``digits`` digits, and solutions, for the tasks chain and flaws.

    Numbers are added, subtracted and multiplied from left to right modulo 10^digits. A share ``flawed`` of the
    solutions has a wrong step but the right answer. Each is a pure function of an index below ``MOST``.
    """

    MOST = 100_000

    def __init__(self, name: str, digits: int, length: int, flawed: float, kinds: str) -> None:
        """kinds: letters of flaws, see ``flaw``."""
        self.name = name
        self.digits, self.length, self.flawed, self.kinds = digits, length, flawed, kinds

    def __len__(self) -> int:
        return self.MOST

    @cached_property
    def _words(self) -> np.ndarray:
        """int64 [n, 2 length + 1 + _FLAWS]: 32 random bits each for numbers, signs and the flaw."""
        width = 2 * self.length + 1 + _FLAWS
        return random_words((self.name, self.digits, self.length), 0, self.MOST * width).reshape(-1, width)

    def problem(self, index: int) -> Problem:
        """Return the problem of an index."""
        words = self._words[index].tolist()
        numbers = (f"{word * 10**self.digits >> 32:0{self.digits}}" for word in words[: self.length + 1])
        signs = (_SIGNS[word * len(_SIGNS) >> 32] for word in words[self.length + 1 : 2 * self.length + 1])
        return Problem(tuple(numbers), tuple(signs))

    def written(self, index: int) -> WrittenProblem:
        """Return the problem of an index with its written solution, flawed or not."""
        problem = self.problem(index)
        whether, kind, where, what = self._words[index, -_FLAWS:].tolist()
        right = problem.solution()
        if whether >= self.flawed * 2**32:
            return WrittenProblem(problem, right, right, NONE_WRONG)
        found = flaw(problem, right, self.kinds[kind * len(self.kinds) >> 32], where * self.length >> 32, what)
        return WrittenProblem(problem, right, found, first_wrong(right, found))

    def fingerprint(self) -> str:
        """Return the task and its parameters."""
        return f"{self.name} of {self.length} steps of {self.digits} digits, {self.flawed} flawed"


def flaw(problem: Problem, right: list[str], kind: str, at: int, word: int) -> list[str]:
    """Return the solution with a flaw in step ``at`` but the right answer. word: 32 random bits.

    Kinds: ``s`` slip: a wrong result is written, but the right one used; ``c`` cancelling: the wrong result is used,
    and another mistake in the next step compensates; ``k`` skipped: a step is left out; ``g`` garbled: the step has
    another number than the problem.
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


class ChainPrompts(Chains):
    """``3+4*2=`` -> ``3+4=7``, ``7*2=4``, ``#4``, one per line: the value of a chain, with its steps.

    The answer is the number at the end. A share ``flawed`` of the solutions taught in a warm-up has a wrong step, so
    that a policy learns to write flawed solutions too.
    """

    def __init__(self, digits: int, length: int, flawed: float) -> None:
        super().__init__("chain", digits, length, flawed, "sck")

    def prompt(self, index: int) -> Prompt:
        """Return the prompt at an index."""
        problem, right, written, _ = self.written(index)
        return Prompt(index, problem_text(problem), "\n".join(written), {"answer": right[-1][1:]})

    def texts(self) -> Iterator[str]:
        """Yield the text of each prompt."""
        return (problem_text(self.problem(i)) for i in range(len(self)))

    def sizes(self) -> np.ndarray:
        """Return the equal sizes of all texts, int64 [n]."""
        import numpy as np

        return np.full(len(self), (self.length + 1) * (self.digits + 1), np.int64)

    def alphabet(self) -> str:
        """Return digits, signs, the mark of an answer and the end of a line."""
        return "\n#*+-0123456789="


def problem_text(problem: Problem) -> str:
    """Return the text of a problem."""
    first, *others = problem.numbers
    return first + "".join(sign + number for sign, number in zip(problem.signs, others)) + "="


@dataclass(frozen=True)
class ChainVerifier:
    """1 if the last line of the completion is ``#N`` with the answer, whatever the lines above.

    Parts: ``correct``; ``format``: 1 if every line is a step such as ``3+4=7`` and the last one ``#N``; for a right
    answer also ``flawed``: 1 if a written step is wrong, which does not change the reward and measures a judge of
    steps. The reward is ``partial`` if only the format is right.
    """

    partial: float = 0.0
    decides: ClassVar[bool] = True

    def __call__(self, prompt: str, completion: str, info: Info) -> dict[str, float]:
        right, written = problem_of(prompt).solution(), steps(completion)
        end = _END.fullmatch(written[-1]) if written else None
        correct = end is not None and int(end[1]) == int(right[-1][1:])
        well_formed = end is not None and all(_STEP.fullmatch(step) for step in written[:-1])
        flawed = {"flawed": float(first_wrong(right, written) != NONE_WRONG)} if correct else {}
        return graded(well_formed, correct, self.partial) | flawed

    def check(self, info: Info) -> str:
        """Check that the prompt is a chain and a given answer its value."""
        try:
            right = problem_of(str(info.get("prompt", ""))).solution()[-1][1:]
        except RewardError as error:
            return str(error)
        given = info.get("answer")
        return "" if given is None or str(given).strip() == right else f"the answer is not {right}"


TASK = Task(ChainPrompts, ChainVerifier())
