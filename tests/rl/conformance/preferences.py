"""The oracle of preference losses: value, and slope by the score of each answer, written down by hand."""

import math
from collections.abc import Callable
from typing import Any

Options = dict[str, Any]
Pair = tuple[float, float, float]
"""Loss, and its derivatives by the chosen and by the rejected answer's score."""
Oracle = Callable[[tuple[float, float, float], tuple[float, float, float], float, Options], Pair]
ORACLES: dict[str, Oracle] = {}
"""Each takes (score, reference, tokens) of both answers, the pair's own margin, and the options."""


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > -700 else 0.0


def softplus(x: float) -> float:
    """-log sigmoid(-x)."""
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def oracle(name: str) -> Callable[[Oracle], Oracle]:
    """Make a reference known for a registered name."""

    def add(function: Oracle) -> Oracle:
        ORACLES[name] = function
        return function

    return add


def _implicit(won: Any, lost: Any, margin: float, o: Options) -> tuple[float, float, float]:
    """x, and how it moves with both scores: beta times the log-ratio, of a token where averaged."""
    by = [o["beta"] / (a[2] if o["average"] else 1.0) for a in (won, lost)]
    x = by[0] * (won[0] - won[1]) - by[1] * (lost[0] - lost[1]) - o["margin"] - margin
    return x, by[0], -by[1]


def _smoothed(x: float, e: float) -> tuple[float, float]:
    """(1 - e) L(x) + e L(-x), L(x) = -log sigmoid(x), and its slope."""
    return (1 - e) * softplus(-x) + e * softplus(x), -(1 - e) * sigmoid(-x) + e * sigmoid(x)


@oracle("sigmoid")
def dpo(won: Any, lost: Any, margin: float, o: Options) -> Pair:
    x, up, down = _implicit(won, lost, margin, o)
    value, slope = _smoothed(x, o["smoothing"])
    return value, slope * up, slope * down


@oracle("robust")
def robust(won: Any, lost: Any, margin: float, o: Options) -> Pair:
    x, up, down = _implicit(won, lost, margin, o)
    e = o["smoothing"]
    value = ((1 - e) * softplus(-x) - e * softplus(x)) / (1 - 2 * e)
    slope = (-(1 - e) * sigmoid(-x) - e * sigmoid(x)) / (1 - 2 * e)
    return value, slope * up, slope * down


@oracle("hinge")
def hinge(won: Any, lost: Any, margin: float, o: Options) -> Pair:
    x, up, down = _implicit(won, lost, margin, o)
    return (1 - x, -up, -down) if x < 1 else (0.0, 0.0, 0.0)


@oracle("ipo")
def ipo(won: Any, lost: Any, margin: float, o: Options) -> Pair:
    h = (won[0] - won[1]) / won[2] - (lost[0] - lost[1]) / lost[2]
    off = h - 1 / (2 * o["beta"])
    return off**2, 2 * off / won[2], -2 * off / lost[2]


@oracle("simpo")
def simpo(won: Any, lost: Any, margin: float, o: Options) -> Pair:
    x = o["beta"] * (won[0] / won[2] - lost[0] / lost[2]) - o["margin"] - margin
    value, slope = _smoothed(x, o["smoothing"])
    return value, slope * o["beta"] / won[2], -slope * o["beta"] / lost[2]


@oracle("bradley_terry")
def bradley_terry(won: Any, lost: Any, margin: float, o: Options) -> Pair:
    x, both = won[0] - lost[0] - o["margin"] - margin, won[0] + lost[0]
    pull = 2 * o["centring"] * both
    return softplus(-x) + o["centring"] * both**2, -sigmoid(-x) + pull, sigmoid(-x) + pull
