"""Verifiers: rewards that follow from the data. Pure functions of (prompt, completion, info); no torch, no eval.

Those of a task are declared with it, in ``tilth.tasks``; here are those of any data, and what all have in common.

A verifier judges completions, and by ``check`` the answer that the data gives. A completion that says nothing usable is
wrong (0), never missing; a given answer that says nothing usable is bad data and is told before a run.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, ClassVar, Protocol

from tilth.config.plugins import shipped_tasks
from tilth.config.tasks import task_of
from tilth.core.errors import RewardError

Info = Mapping[str, Any]
"""What the data says of a prompt: every column but the prompt."""

MOST_DIGITS = 64
"""A longer number is not one: it bounds the cost of exact arithmetic."""


class Verifier(Protocol):
    """A reward function that can judge the given answer too."""

    decides: ClassVar[bool]
    """Whether its bare number says right (1) or wrong (0), so that its mean is an accuracy."""

    def __call__(self, prompt: str, completion: str, info: dict[str, Any]) -> float | dict[str, float]:
        """The reward, or ``reward`` with the parts ``correct`` and ``format``."""
        ...

    def check(self, info: Info) -> str:
        """What is wrong with the given answer; empty if nothing is. info: with the key ``prompt`` besides."""
        ...


# ---- whole numbers and texts ----


def integer(text: str) -> str | None:
    """Canonical digits of a decimal integer of any size; None for any other text."""
    found = re.fullmatch(r"\s*(-?)0*([0-9]+)\s*", text)
    return None if found is None else (found[1] + found[2] if found[2] != "0" else "0")


@dataclass(frozen=True)
class Exact:
    """1.0 if the completion is the text ``info["answer"]``, white space at both ends apart, else 0.0."""

    decides: ClassVar[bool] = True

    def __call__(self, prompt: str, completion: str, info: Info) -> float:
        return float(completion.strip() == answer_of(info).strip())

    def check(self, info: Info) -> str:
        """An empty answer would reward silence."""
        return missing(info) or ("" if answer_of(info).strip() else "the answer is empty")


@dataclass(frozen=True)
class Regex:
    """1.0 if the pattern is found anywhere in the completion, else 0.0: for form, say ``regex:####``, not for truth.

    Raises RewardError with the place of the mistake if the pattern is none. A pattern that backtracks without end meets
    the time limit of the pool.
    """

    pattern: str
    decides: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not self.pattern:
            message = "reward 'regex:' has no pattern after the colon, and an empty one is found everywhere"
            raise RewardError(message, key="regex")
        try:
            re.compile(self.pattern)
        except re.error as error:
            message = f"reward {'regex:' + self.pattern!r}: {_at(self.pattern, error)}"
            raise RewardError(message, key="regex.pattern") from None
        except (OverflowError, RecursionError) as error:
            message = f"reward {'regex:' + self.pattern!r} is too large a pattern: {error}"
            raise RewardError(message, key="regex.size") from None

    def __call__(self, prompt: str, completion: str, info: Info) -> float:
        return float(re.search(self.pattern, completion) is not None)

    def check(self, info: Info) -> str:
        """It needs no answer."""
        return ""


def _at(pattern: str, error: re.error) -> str:
    place = len(pattern) if error.pos is None else error.pos
    rest = pattern[place : place + 20]
    return f"{error.msg} at character {place + 1} of the pattern" + (f", before {rest!r}" if rest else ", its end")


# ---- GSM8K ----

_BEHIND = (  # what would make it another number, a sum or fraction of several, or the first of a list
    r"[0-9A-Za-z_]|[.,:][0-9]|[ \t]*[-+*/^=][ \t]*[0-9$(\\]|[ \t]*\\(?!text|mathrm|[%$ ,;!)\]])"
    r"|(?:[ \t,;]|\\[ ,;!])*(?:(?:x|×|·|÷|−|–|—|or|and|to)[ \t]*)?-?\\?\$?\.?[0-9]"
)
_NUMBER = re.compile(  # a sign before or after a dollar; commas only between thousands
    r"(?P<sign>-?)\\?\$?(?P<minus>-?)"
    r"(?P<number>(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
    rf"(?!{_BEHIND})"
)
_MARKS = (re.compile(r"####[ \t*]*"), re.compile(r"\\boxed[ \t]*\{[ \t]*"))


@dataclass(frozen=True)
class Gsm8k:
    """Grade-school arithmetic (GSM8K, arXiv 2110.14168): the number after the last ``####``, or else in ``\\boxed{}``.

    ``info["answer"]`` ends in ``#### N``; a bare number or a boxed one does too. Numbers are compared exactly as
    rationals: ``$1,234.50`` is 1234.5. Two in one, as in ``3/4``, ``3,4``, ``3 4``, ``3 x 4`` or ``2e3``, are none.

    Parts: ``correct``; ``format``: 1 if there is a number where one is asked for. The reward is ``correct``, and
    ``partial`` for a number that is wrong.
    """

    partial: float = 0.0
    decides: ClassVar[bool] = True

    def __call__(self, prompt: str, completion: str, info: Info) -> dict[str, float]:
        wanted = gold_number(answer_of(info))
        if wanted is None:
            raise RewardError(f"the answer has no number: {answer_of(info)[:60]!r}", key="answer.number")
        given = said_number(completion)
        return graded(given is not None, given == wanted, self.partial)

    def check(self, info: Info) -> str:
        """The answer has to have a number."""
        return missing(info) or ("" if gold_number(answer_of(info)) is not None else "the answer has no number")


def said_number(text: str) -> Fraction | None:
    """The number of the last ``#### N`` in a text, or else of the last ``\\boxed{N}``; None if there is neither."""
    text = text.replace("{,}", ",")  # LaTeX keeps its space away from a comma so
    for mark in _MARKS:
        for place in reversed([found.end() for found in mark.finditer(text)]):
            if (number := _rational(_NUMBER.match(text, place))) is not None:
                return number
    return None


def gold_number(text: str) -> Fraction | None:
    """As ``said_number``; a text that is a number and nothing else will do too."""
    said = said_number(text)
    return _rational(_NUMBER.fullmatch(text.strip().rstrip("."))) if said is None else said


def _rational(found: re.Match[str] | None) -> Fraction | None:
    if found is None or len(found["number"]) > MOST_DIGITS or (found["sign"] and found["minus"]):
        return None
    value = Fraction(found["number"].replace(",", ""))
    return -value if found["sign"] or found["minus"] else value


# ---- what is common ----


def graded(well_formed: bool, correct: bool, partial: float) -> dict[str, float]:
    reward = 1.0 if correct else partial if well_formed else 0.0
    return {"reward": reward, "correct": float(correct), "format": float(well_formed)}


def answer_of(info: Info) -> str:
    """The given answer as text. Raises RewardError if the data has none."""
    if info.get("answer") is None:
        raise RewardError("the data gives no answer (column answer)", key="answer")
    return str(info["answer"])


def missing(info: Info) -> str:
    return "there is no answer" if info.get("answer") is None else ""


_VERIFIERS: dict[str, Any] = {"exact": Exact(), "gsm8k": Gsm8k()}


def verifier_names() -> list[str]:
    """Names of the verifiers that come with Tilth and need no pattern."""
    return [*shipped_tasks(), *_VERIFIERS]


def verifier_specs() -> list[str]:
    """How built-in verifiers are named, with what may stand after a colon."""
    names = verifier_names()
    return [*names, *(f"{name}:CREDIT" for name in names if hasattr(builtin(name), "partial")), "regex:PATTERN"]


def builtin(spec: str) -> Any | None:
    """The verifier of a name, as in ``gsm8k``, ``countdown:0.1``, ``regex:####``. None: no such name.

    After the colon comes the reward of a well-formed wrong answer, from 0 to below 1, where the verifier has one
    (``partial``). Raises RewardError for a wrong one, and for a pattern that is none.
    """
    name, colon, option = spec.partition(":")
    if colon and name == "regex":
        return Regex(option)
    found: Any = task_of(name).reward if name in shipped_tasks() else _VERIFIERS.get(name)
    if not colon or not hasattr(found, "partial"):
        return None if colon else found
    return replace(found, partial=_credit(name, option))


def _credit(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < 1:
        raise RewardError(
            f"reward {f'{name}:{text}'!r}: after the colon comes the reward of a well-formed wrong answer, "
            f"from 0 to below 1, as in {name}:0.1",
            key=f"{name}.credit",
        )
    return value
