"""Environments of ``benchmarks/agents.py``: some turns, each after a wait that follows from the record and the turn."""

import math
import random
import time
from collections.abc import Mapping
from typing import Any

import tilth


class Waiting(tilth.Environment):
    """Answers after a lognormal time from LEAST to MOST seconds, with p99 = SPREAD * p50."""

    def reset(self, info: dict[str, Any]) -> list[dict[str, str]]:
        self.info, self.turns = info, 0
        return [{"role": "user", "content": info["prompt"]}]

    def step(self, message: Mapping[str, Any]) -> tuple[list[dict[str, str]], bool]:
        self.turns += 1
        time.sleep(latency(self.info["number"], self.turns, self.info["middle"], self.info["spread"]))
        said, over = f"{self.info['number'] * self.turns % 97};", self.turns >= self.info["turns"]
        return [{"role": "user", "content": said}], over

    def reward(self) -> float:
        return float(self.turns)


def latency(number: int, turn: int, middle: float, spread: float) -> float:
    """Return the seconds that this turn's tool takes; 0 if ``middle`` is."""
    if not middle:
        return 0.0
    drawn = random.Random(f"{number} {turn}").gauss(0.0, math.log(spread) / 2.326)
    return min(2.0, max(0.01, middle * math.exp(drawn)))


class Looking(Waiting):
    """Has one tool, which answers after such a time; ends after a last turn whose call is not made."""

    def reset(self, info: dict[str, Any]) -> list[dict[str, str]]:
        self.info, self.turns, self.calls = info, 0, 0
        return [{"role": "user", "content": info["prompt"]}]

    def step(self, message: Mapping[str, Any]) -> tuple[Any, bool]:
        self.turns += 1
        over = self.turns > self.info["turns"]
        return ([] if over else self.call_tools(message)), over

    @tilth.tool
    def look(self, number: int) -> str:
        """Look at a number."""
        self.calls += 1
        time.sleep(latency(self.info["number"], self.calls, self.info["middle"], self.info["spread"]))
        return str(self.info["number"] * self.calls % 97)

    def reward(self) -> float:
        return float(self.turns)
