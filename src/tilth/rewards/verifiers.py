"""Verifiers: rewards that follow from the data. Pure functions of (prompt, completion, info); no torch, no eval.

A task declares its verifier in ``tilth.tasks``; this module has verifiers for any data and helpers for all.

A verifier scores completions and, by ``check``, the answer in the data. An unusable completion is wrong (0), never
missing; an unusable answer is bad data, reported before a run.
"""

import json
import math
import re
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Protocol

from tilth.config.plugins import shipped_tasks
from tilth.config.tasks import task_of
from tilth.core.errors import RewardError
from tilth.process.handlers import handling
from tilth.rewards.programs import UnitTests

Info = Mapping[str, Any]
"""Columns of a prompt's record other than the prompt."""

MOST_DIGITS = 64
"""Digits of the longest accepted number, which bounds the cost of exact arithmetic."""


class Verifier(Protocol):
    """Reward function that can also check the given answer."""

    decides: ClassVar[bool]
    """True if its value is 1 for right and 0 for wrong, so that the mean is an accuracy."""

    def __call__(self, prompt: str, completion: str, info: dict[str, Any]) -> float | dict[str, float]:
        """Return the reward, or ``reward`` with the parts ``correct`` and ``format``."""
        ...

    def check(self, info: Info) -> str:
        """Describe what is wrong with the given answer; "" if nothing is. info: also has the key ``prompt``."""
        ...


# ---- whole numbers and texts ----


def integer(text: str) -> str | None:
    """Return the canonical digits of a decimal integer of any size; None for any other text."""
    found = re.fullmatch(r"\s*(-?)0*([0-9]+)\s*", text)
    return None if found is None else (found[1] + found[2] if found[2] != "0" else "0")


@dataclass(frozen=True)
class Exact:
    """1.0 if the completion equals ``info["answer"]`` apart from white space at both ends, else 0.0."""

    decides: ClassVar[bool] = True

    def __call__(self, prompt: str, completion: str, info: Info) -> float:
        return float(completion.strip() == answer_of(info).strip())

    def check(self, info: Info) -> str:
        """Refuse an empty answer, which would reward silence."""
        return missing(info) or ("" if answer_of(info).strip() else "the answer is empty")


@dataclass(frozen=True)
class Regex:
    """1.0 if the pattern is found anywhere in the completion, else 0.0: checks form, not truth.

    Raises RewardError with the position of the mistake for an invalid pattern. The time limit of the pool ends endless
    backtracking.
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
        """Accept any record: a pattern needs no answer."""
        return ""


def _at(pattern: str, error: re.error) -> str:
    place = len(pattern) if error.pos is None else error.pos
    rest = pattern[place : place + 20]
    return f"{error.msg} at character {place + 1} of the pattern" + (f", before {rest!r}" if rest else ", its end")


# ---- GSM8K ----

_BEHIND = (  # text that makes it part of another number, of a sum or fraction, or of a list
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

    ``info["answer"]`` ends in ``#### N``, or is a bare or boxed number. Numbers are compared exactly, as rationals:
    ``$1,234.50`` is 1234.5. Compounds such as ``3/4``, ``3,4``, ``3 4``, ``3 x 4`` or ``2e3`` are not numbers.

    Parts: ``correct``; ``format``: 1 if the completion has a number in one of these places. The reward is 1 if correct,
    else ``partial`` if the format is right, else 0.
    """

    partial: float = 0.0
    decides: ClassVar[bool] = True

    def __call__(self, prompt: str, completion: str, info: Info) -> dict[str, float]:
        wanted = gold_number(answer_of(info))
        if wanted is None:
            raise RewardError(f"the answer has no number: {answer_of(info)[:60]!r}", key="answer.number")
        given = marked_number(completion)
        return graded(given is not None, given == wanted, self.partial)

    def check(self, info: Info) -> str:
        """Check that the answer has a number."""
        return missing(info) or ("" if gold_number(answer_of(info)) is not None else "the answer has no number")


def marked_number(text: str) -> Fraction | None:
    """Parse the number of the last ``#### N`` in a text, or else of the last ``\\boxed{N}``; None without either."""
    text = text.replace("{,}", ",")  # LaTeX for a comma without space
    for mark in _MARKS:
        for place in reversed([found.end() for found in mark.finditer(text)]):
            if (number := _rational(_NUMBER.match(text, place))) is not None:
                return number
    return None


def gold_number(text: str) -> Fraction | None:
    """Parse the marked number of a given answer, or the answer itself if it is a bare number."""
    marked = marked_number(text)
    return _rational(_NUMBER.fullmatch(text.strip().rstrip("."))) if marked is None else marked


def _rational(found: re.Match[str] | None) -> Fraction | None:
    if found is None or len(found["number"]) > MOST_DIGITS or (found["sign"] and found["minus"]):
        return None
    value = Fraction(found["number"].replace(",", ""))
    return -value if found["sign"] or found["minus"] else value


# ---- helpers ----


def graded(well_formed: bool, correct: bool, partial: float) -> dict[str, float]:
    """Return reward and parts: 1 if correct, ``partial`` if only the format is right, else 0."""
    reward = 1.0 if correct else partial if well_formed else 0.0
    return {"reward": reward, "correct": float(correct), "format": float(well_formed)}


def answer_of(info: Info) -> str:
    """Return the given answer as text. Raises RewardError if the data has none."""
    if info.get("answer") is None:
        raise RewardError("the data gives no answer (column answer)", key="answer")
    return str(info["answer"])


def missing(info: Info) -> str:
    """Return a complaint if the data has no answer, else ""."""
    return "there is no answer" if info.get("answer") is None else ""


# ---- mathematics and JSON, by libraries ----


_MARKED = re.compile(r"(?<!\\)\$|\\boxed|\\\(|\\\[")
_COMMAND = re.compile(r"\\(?:text|mathrm|begin|end)\{[^}]*\}|\\[A-Za-z]+")
_WORD = re.compile(r"(?:^|\s)[A-Za-z]{2}")
MATH_SECONDS = 2.0
"""Processor seconds for one comparison of ``math_equal``, less than the pool's limit of a call."""


class _Exceeded(BaseException):
    """The processor time of a block is used up. No Exception, which the libraries catch."""


@contextmanager
def _bounded(seconds: float) -> Iterator[None]:
    """Raise _Exceeded in a block that computes longer. In the main thread, where a pool calls; else no limit."""

    def end(number: int, frame: object) -> None:
        raise _Exceeded

    with handling({signal.SIGVTALRM: end}) as able:
        if able:
            signal.setitimer(signal.ITIMER_VIRTUAL, seconds, seconds)  # again: an exception in a finalizer is dropped
        try:
            yield
        finally:
            if able:
                signal.setitimer(signal.ITIMER_VIRTUAL, 0)


@dataclass(frozen=True)
class MathEquivalence:
    """1.0 if the completion's last expression equals that of ``info["answer"]`` as mathematics (library math-verify).

    LaTeX and plain expressions, sets, intervals, equations: ``\\frac{1}{2}`` is 0.5. What needs more than
    ``MATH_SECONDS``, as 9**9**9**9 does, is wrong: no policy avoids a 0 by it. Needs the extra ``rewards``.
    """

    decides: ClassVar[bool] = True

    def __call__(self, prompt: str, completion: str, info: Info) -> float:
        verify, gold = _library("math_verify").verify, self._gold(info)
        try:
            with _bounded(MATH_SECONDS):
                found = self._parse(completion)
                return float(bool(found) and verify(gold, found, timeout_seconds=None))
        except _Exceeded:
            return 0.0

    def _gold(self, info: Info) -> list[Any]:
        """Parse the answer: marked or in a sentence as it stands, else all of it. The library finds no more than a
        number in bare LaTeX: 2 in 2\\sqrt{3}."""
        answer = answer_of(info)
        whole = f"${answer}$" if re.search(r"[0-9\\=+*/^]", answer) else ""  # else words, which would be symbols
        if _MARKED.search(answer) or _WORD.search(_COMMAND.sub("", answer)):
            return self._parse(answer) or self._parse(whole)
        return self._parse(whole) or self._parse(answer)

    @staticmethod
    def _parse(text: str) -> list[Any]:
        """Parse without the library's alarm, which counts the time that other processes take."""
        return _library("math_verify").parse(text, parsing_timeout=None)

    def check(self, info: Info) -> str:
        """Check that the answer has an expression, and one that can be read in time."""
        if complaint := missing(info):
            return complaint
        try:
            with _bounded(MATH_SECONDS):
                return "" if self._gold(info) else "the answer has no mathematical expression"
        except _Exceeded:
            return f"the answer is not read within {MATH_SECONDS:g} s of processor time"


@dataclass(frozen=True)
class JsonSchema:
    """1.0 if the completion is JSON that a schema allows (library jsonschema), else 0.0; ``format``: 1 if it is JSON.

    path: of a file with the schema. Raises RewardError if it cannot be read or is none. Needs the extra ``rewards``.
    """

    path: str
    decides: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self._validator()

    def _validator(self) -> Any:
        library = _library("jsonschema")
        try:
            schema = json.loads(Path(self.path).read_text("utf-8"))
            kind = library.validators.validator_for(schema)
            kind.check_schema(schema)
        except (OSError, ValueError, library.exceptions.SchemaError) as error:
            first = str(error).partition("\n")[0]
            message = f"reward 'json:{self.path}': the file holds no JSON schema: {first}"
            raise RewardError(message, key="json.schema") from None
        return kind(schema)

    def __call__(self, prompt: str, completion: str, info: Info) -> dict[str, float]:
        try:
            value = json.loads(completion)
        except (ValueError, RecursionError):
            return {"reward": 0.0, "format": 0.0}
        return {"reward": float(self._validator().is_valid(value)), "format": 1.0}

    def check(self, info: Info) -> str:
        """Accept any record: a schema needs no answer."""
        return ""


@cache
def _library(name: str) -> Any:
    """Import a library of the extra ``rewards``; RewardError if it is not installed."""
    try:
        return import_module(name)
    except ImportError:
        message = f"this reward needs the library {name.replace('_', '-')}: pip install '.[rewards]' in Tilth's folder"
        raise RewardError(message, key=name) from None


_VERIFIERS: dict[str, Any] = {
    "exact": Exact(),
    "gsm8k": Gsm8k(),
    "math_equal": MathEquivalence(),
    "unit_tests": UnitTests(),
}


def verifier_names() -> list[str]:
    """Return the names of the verifiers that come with Tilth and need no pattern."""
    return [*shipped_tasks(), *_VERIFIERS]


def verifier_specs() -> list[str]:
    """Return the forms of names of built-in verifiers, with options after a colon."""
    names = verifier_names()
    return [
        *names,
        *(f"{name}:CREDIT" for name in names if hasattr(builtin(name), "partial")),
        "json:SCHEMA.json",
        "regex:PATTERN",
        "https://HOST/PATH",
    ]


def builtin(spec: str) -> Any | None:
    """Return the verifier of a name such as ``gsm8k``, ``countdown:0.1``, ``regex:####``, or of a URL; None: no such.

    The number after the colon is ``partial``, the reward of a well-formed wrong answer in [0, 1). Raises RewardError
    for an invalid number or pattern.
    """
    name, colon, option = spec.partition(":")
    if colon and name == "regex":
        return Regex(option)
    if colon and name == "json":
        return JsonSchema(option)
    if name in ("http", "https") and option.startswith("//"):
        from tilth.rewards.endpoint import HttpReward  # HTTP takes a third of the start of a reward process

        return HttpReward(spec)
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
