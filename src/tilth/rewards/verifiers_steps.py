"""Verifiers of what is written step by step: chains of arithmetic, and verdicts on such solutions. No torch."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from tilth.core.errors import RewardError
from tilth.rewards.judging import NONE_WRONG, process_reward, steps, verdict

Info = Mapping[str, Any]

_CHAIN = re.compile(r"[0-9]+(?:[-+*][0-9]+)+=", re.ASCII)
_STEP = re.compile(r"[0-9]+[-+*][0-9]+=[0-9]+", re.ASCII)
_END = re.compile(r"#[ \t]*([0-9]{1,64})", re.ASCII)


class Problem(NamedTuple):
    """``3+4*2=``: numbers, and the signs between them, from left to right, modulo 10 to the number of digits."""

    numbers: tuple[str, ...]
    signs: tuple[str, ...]

    def results(self) -> Iterator[str]:
        """What each step makes, as it is written."""
        width = len(self.numbers[0])
        value = int(self.numbers[0])
        for sign, number in zip(self.signs, self.numbers[1:]):
            value = apply(value, sign, int(number), 10**width)
            yield f"{value:0{width}}"

    def solution(self) -> list[str]:
        """All steps, the last one the answer: ``3+4=7``, ``7*2=4``, ``#4``."""
        written, before = [], self.numbers[0]
        for sign, number, result in zip(self.signs, self.numbers[1:], self.results()):
            written.append(f"{before}{sign}{number}={result}")
            before = result
        return [*written, f"#{before}"]


def apply(value: int, sign: str, number: int, modulus: int) -> int:
    """One step, modulo 10 to the number of digits."""
    made = value * number if sign == "*" else value + number if sign == "+" else value - number
    return made % modulus


def problem_of(prompt: str) -> Problem:
    """What a prompt asks. Raises RewardError if it is no chain."""
    text = prompt.strip()
    if not _CHAIN.fullmatch(text):
        raise RewardError(f"chain needs prompts such as '3+4*2=', not {text[:60]!r}")
    found = Problem(tuple(re.findall(r"[0-9]+", text)), tuple(re.findall(r"[-+*]", text)))
    if len({len(number) for number in found.numbers}) > 1:
        raise RewardError(f"numbers of a chain have equally many digits, as in '03+42=', not {text[:60]!r}")
    return found


def first_wrong(right: Sequence[str], written: Sequence[str]) -> int:
    """Index of the first step that is not what comes next, -1 if none is; their number where they end too early.

    right: the problem's own solution. A step that leaves one out, takes another number than was written before, or is
    wrong though a later one makes up for it: each is wrong where it stands.
    """
    for i, step in enumerate(written):
        if i >= len(right) or step != right[i]:
            return i
    return NONE_WRONG if len(written) == len(right) else len(written)


@dataclass(frozen=True)
class Chain:
    """The right number at the end: 1 if the last line of the completion is ``#N`` with the answer, whatever is above.

    Parts: ``correct``; ``format``: 1 if every line is a step such as ``3+4=7`` and the last one ``#N``; of a right
    answer also ``flawed``: 1 if a written step is wrong. The reward does not know that one, which a judge of steps is
    measured by: it is ``correct``, and ``partial`` where only the format is right.
    """

    partial: float = 0.0
    decides: ClassVar[bool] = True

    def __call__(self, prompt: str, completion: str, info: Info) -> dict[str, float]:
        right, written = problem_of(prompt).solution(), steps(completion)
        end = _END.fullmatch(written[-1]) if written else None
        correct = end is not None and int(end[1]) == int(right[-1][1:])
        well_formed = end is not None and all(_STEP.fullmatch(step) for step in written[:-1])
        reward = 1.0 if correct else self.partial if well_formed else 0.0
        graded = {"reward": reward, "correct": float(correct), "format": float(well_formed)}
        return graded | ({"flawed": float(first_wrong(right, written) != NONE_WRONG)} if correct else {})

    def check(self, info: Info) -> str:
        """The prompt has to be a chain; a given answer has to be what it makes."""
        try:
            right = problem_of(str(info.get("prompt", ""))).solution()[-1][1:]
        except RewardError as error:
            return str(error)
        given = info.get("answer")
        return "" if given is None or str(given).strip() == right else f"the answer is not {right}"


@dataclass(frozen=True)
class Flaws:
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
        raise RewardError(f"a verdict needs a column steps, their number; it is {count!r}"[:200])
    if not re.fullmatch(r"-1|[0-9]{1,9}", answer, re.ASCII) or int(answer) >= count:
        raise RewardError(f"the answer is {answer[:60]!r}, neither the index of one of {count} steps nor -1")
    return int(answer), count
