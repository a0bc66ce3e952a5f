"""Task code_sandbox: write a function; unit tests judge it in a sandbox, and a wrong one may be written again."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

from tilth.config.tasks import Task
from tilth.data.columns import Prompt
from tilth.data.computed import Computed
from tilth.envs.environment import Environment, Message
from tilth.rewards.programs import UnitTests

STEPS = {"plus": "+", "minus": "-", "times": "*"}
TRIED = range(5)
_NUMBERS = 20
_STRIDE = 7_919


class CodePrompts(Computed):
    """``plus 3 times 7 minus 2``: three steps; the answer is a function ``f`` that does them in order.

    A share ``flawed`` of the worked conversations forgets the last step.
    """

    def __init__(self, flawed: float) -> None:
        self.flawed = flawed

    def __len__(self) -> int:
        return (len(STEPS) * _NUMBERS) ** 3

    def steps(self, index: int) -> list[tuple[str, int]]:
        """Return the steps of an index."""
        rest, found = index * _STRIDE % len(self), []
        for _ in range(3):
            rest, one = divmod(rest, len(STEPS) * _NUMBERS)
            found.append((list(STEPS)[one % len(STEPS)], 1 + one // len(STEPS)))
        return found

    def prompt(self, index: int) -> Prompt:
        """Return the question of an index, its program and its tests."""
        steps = self.steps(index)
        program, flawed = _program(steps), random.Random(f"code {index}").random() < self.flawed
        written = _program(steps[:-1]) if flawed else program
        tests = "\n".join(f"assert f({x}) == {_value(steps, x)}" for x in TRIED)
        question = " ".join(f"{name} {number}" for name, number in steps)
        turns = ({"role": "user", "content": question}, {"role": "assistant", "content": written})
        return Prompt(index, question, program, {"answer": program, "tests": tests}, turns)

    def texts(self) -> Iterator[str]:
        """Yield the text of each question."""
        return (" ".join(f"{name} {number}" for name, number in self.steps(i)) for i in range(len(self)))

    def alphabet(self) -> str:
        """Return letters, digits and the signs of a program."""
        return "".join(sorted(set("plusminustimesdef return x0123456789+-*(): ")))

    def fingerprint(self) -> str:
        """Return the task and its size."""
        return f"code of three steps, numbers to {_NUMBERS}, {self.flawed} flawed"


def _program(steps: Sequence[tuple[str, int]]) -> str:
    body = "x"
    for name, number in steps:
        body = f"({body}{STEPS[name]}{number})"
    return f"def f(x): return {body}"


def _value(steps: list[tuple[str, int]], x: int) -> int:
    for name, number in steps:
        x = x + number if name == "plus" else x - number if name == "minus" else x * number
    return x


class CodeSandbox(Environment):
    """Runs each turn's program with its tests; a wrong one may be written again."""

    describes_tools = False

    def reset(self, info: dict[str, Any]) -> list[Message]:
        """Ask the question."""
        self.tests, self.passed, self.turns = info["tests"], False, 0
        return [{"role": "user", "content": info["prompt"]}]

    def step(self, message: Message) -> tuple[list[Message], bool]:
        """Judge a program."""
        self.turns += 1
        verdict = UnitTests()("", message["content"], {"tests": self.tests})
        self.passed = verdict["correct"] == 1.0
        said = "wrong" if verdict["format"] else "no program"
        return [{"role": "user", "content": said}], self.passed

    def reward(self) -> dict[str, float]:
        """Return 1 for a program that passed, a fifth less for each turn before it."""
        value = 1.0 - 0.2 * (self.turns - 1) if self.passed else 0.0
        return {"reward": value, "correct": float(self.passed)}


TASK = Task(CodePrompts, UnitTests(), environment=CodeSandbox)
