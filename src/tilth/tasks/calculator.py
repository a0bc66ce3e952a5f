"""Task calculator: ``(57*38)+12`` by two calls of tools, each of one operation."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

from tilth.config.tasks import Task
from tilth.data.columns import Prompt
from tilth.data.computed import Computed
from tilth.envs.environment import Answering, tool
from tilth.tasks.addition import AdditionVerifier

_STRIDE = 618_033
"""Without a factor of 2 or 5, so that neighbouring indices are far apart and every sum comes once."""


class CalculatorPrompts(Computed):
    """``(57*38)+12``: three numbers of ``digits`` digits; at most ``MOST``, each with a worked conversation.

    A share ``flawed`` of these forgets the sum: its result is the product.
    """

    MOST = 50_000

    def __init__(self, digits: int, flawed: float) -> None:
        self.digits, self.flawed = digits, flawed
        self._base = 10**digits

    def __len__(self) -> int:
        return min(self._base**3, self.MOST)

    def numbers(self, index: int) -> tuple[int, int, int]:
        """Return the three numbers of a prompt."""
        rest, c = divmod(index * _STRIDE % self._base**3, self._base)
        return *divmod(rest, self._base), c

    def prompt(self, index: int) -> Prompt:
        """Return the prompt at an index, with the calls and answers that lead to its result."""
        a, b, c = self.numbers(index)
        question, product, answer = f"({a}*{b})+{c}", str(a * b), str(a * b + c)
        turns = [
            {"role": "user", "content": question},
            {"role": "assistant", "content": _call("multiply", a, b)},
            {"role": "tool", "content": product},
            {"role": "assistant", "content": _call("add", a * b, c)},
            {"role": "tool", "content": answer},
            {"role": "assistant", "content": answer},
        ]
        if random.Random(f"calculator {index}").random() < self.flawed:
            turns[3:] = [{"role": "assistant", "content": product}]
        return Prompt(index, question, answer, {"answer": answer}, tuple(turns))

    def texts(self) -> Iterator[str]:
        """Yield the text of each prompt."""
        for index in range(len(self)):
            a, b, c = self.numbers(index)
            yield f"({a}*{b})+{c}"

    def alphabet(self) -> str:
        """Return the characters of questions, calls and answers."""
        return "".join(sorted(set("0123456789()*+" + _call("multiply", 0, 0) + _call("add", 0, 0))))

    def fingerprint(self) -> str:
        """Return the task and its size."""
        return f"calculator of {self.digits} digits, {self.flawed} flawed"


def _call(name: str, a: int, b: int) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': {'a': a, 'b': b}})}</tool_call>"


class Calculator(Answering):
    """Answers calls of two tools; the turn without a call is the result."""

    @tool
    def add(self, a: int, b: int) -> int:
        """Add two integers."""
        return a + b

    @tool
    def multiply(self, a: int, b: int) -> int:
        """Multiply two integers."""
        return a * b

    def reward(self) -> dict[str, float]:
        """Return 1 for the right result."""
        return {"reward": VERIFIER("", self.said, self.info)}


VERIFIER = AdditionVerifier()
TASK = Task(CalculatorPrompts, VERIFIER, environment=Calculator)
