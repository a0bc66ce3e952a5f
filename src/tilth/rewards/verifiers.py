"""Verifiers: rewards that follow from the task itself. Pure functions of (prompt, completion, info); no torch, no eval.

A verifier judges completions, and by ``check`` the answer that the data gives. A completion that says nothing usable is
wrong (0), never missing; a given answer that says nothing usable is bad data and is told before a run.
"""

import math
import operator
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar, NamedTuple, Protocol

from tilth.core.errors import RewardError
from tilth.rewards.verifiers_steps import Chain, Flaws

Info = Mapping[str, Any]
"""What the data says of a prompt: every column but the prompt."""

MOST_CHARACTERS, MOST_PARENTHESES = 256, 32
"""A longer or deeper expression is not read, so that neither time nor the stack gets out of hand."""
MOST_LIST = 4096
"""Characters of a longer list are not read."""
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


@dataclass(frozen=True)
class Addition:
    """1.0 if the completion is the integer ``info["answer"]``, else 0.0.

    Exact equality of integers: white space around the number and leading zeros do not matter (the task itself pads its
    answers), anything else does: a word, a space inside, a plus sign, a decimal point, an empty completion.
    """

    decides: ClassVar[bool] = True

    def __call__(self, prompt: str, completion: str, info: Info) -> float:
        given = _integer(completion)
        return float(given is not None and given == _integer(answer_of(info)))

    def check(self, info: Info) -> str:
        """The answer has to be an integer."""
        return _missing(info) or ("" if _integer(answer_of(info)) else "the answer is no integer")


def _integer(text: str) -> str | None:
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
        return _missing(info) or ("" if answer_of(info).strip() else "the answer is empty")


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
            raise RewardError("reward 'regex:' has no pattern after the colon, and an empty one is found everywhere")
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise RewardError(f"reward {'regex:' + self.pattern!r}: {_at(self.pattern, error)}") from None
        except (OverflowError, RecursionError) as error:
            raise RewardError(f"reward {'regex:' + self.pattern!r} is too large a pattern: {error}") from None

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
            raise RewardError(f"the answer has no number: {answer_of(info)[:60]!r}")
        given = said_number(completion)
        return _graded(given is not None, given == wanted, self.partial)

    def check(self, info: Info) -> str:
        """The answer has to have a number."""
        return _missing(info) or ("" if gold_number(answer_of(info)) is not None else "the answer has no number")


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


# ---- Countdown ----

_TOKEN = re.compile(r"\s*([0-9]+|[-+*/()])\s*")
_TASK = re.compile(r"\s*([0-9]+(?:\s*,\s*[0-9]+)*)\s*=\s*([0-9]+)\s*:\s*", re.ASCII)


class NoExpression(ValueError):
    """A text that is no expression of the grammar, or has no value; the message says why."""


@dataclass(frozen=True)
class Countdown:
    """Make a target out of given numbers by + - * / and parentheses; each number exactly once (as in TinyZero).

    The completion is the expression, or has it in the last ``<answer>...</answer>``. It is read by a parser of its own
    and computed in exact rationals, so ``8/3*3`` is 8. Numbers and target: ``info["numbers"]`` (or ``nums``) and
    ``info["target"]``, or a prompt of the form ``3,25,7=46:``.

    Parts: ``correct``; ``format``: 1 for an expression that uses the numbers as it may, whatever its value. The reward
    is ``correct``, and ``partial`` where only the format is right.
    """

    partial: float = 0.0
    decides: ClassVar[bool] = True

    def __call__(self, prompt: str, completion: str, info: Info) -> dict[str, float]:
        numbers, target = _task(prompt, info)
        try:
            expression = parse(_expression(completion))
        except NoExpression:
            return _graded(False, False, self.partial)
        well_formed = Counter(expression.numbers) == Counter(numbers)
        return _graded(well_formed, well_formed and expression.value == target, self.partial)

    def check(self, info: Info) -> str:
        """The numbers have to be there; a given answer has to be right."""
        try:
            numbers, target = _task(str(info.get("prompt", "")), info)
        except RewardError as error:
            return str(error)
        if info.get("answer") is None or self("", answer_of(info), {"numbers": numbers, "target": target})["correct"]:
            return ""
        return f"the answer does not make {target} of {', '.join(map(str, numbers))}"


class Expression(NamedTuple):
    """What an expression says."""

    numbers: tuple[int, ...]
    """The numbers in it, in order."""
    value: Fraction | None
    """None: it divides by zero."""


def parse(text: str) -> Expression:
    """Read a sum of products of numbers and parenthesised sums; there is no sign in front of a number.

    Raises NoExpression.
    """
    tokens = _tokens(text)
    numbers = tuple(int(token) for token in tokens if token.isdigit())
    tokens.reverse()
    value = _chain(tokens, 0)
    if tokens:
        raise NoExpression(f"{tokens[-1]!r} is too much")
    return Expression(numbers, value)


def _tokens(text: str) -> list[str]:
    text = text.strip()
    if len(text) > MOST_CHARACTERS or text.count("(") > MOST_PARENTHESES:
        raise NoExpression(f"longer than {MOST_CHARACTERS} characters, or of more than {MOST_PARENTHESES} parentheses")
    found, place = [], 0
    while place < len(text):
        token = _TOKEN.match(text, place)
        if token is None:
            raise NoExpression(f"{text[place]!r} does not belong into an expression")
        found.append(token[1])
        place = token.end()
    return found


_LEVELS = (("+", "-"), ("*", "/"))


def _chain(tokens: list[str], level: int) -> Fraction | None:
    """Take operands and the operators of a level from the end of a reversed list; left to right."""
    if level == len(_LEVELS):
        return _operand(tokens)
    value = _chain(tokens, level + 1)
    while tokens and tokens[-1] in _LEVELS[level]:
        value = _apply(tokens.pop(), value, _chain(tokens, level + 1))
    return value


def _operand(tokens: list[str]) -> Fraction | None:
    token = tokens.pop() if tokens else "its end"
    if token.isdigit():
        return Fraction(int(token))
    if token != "(":
        raise NoExpression(f"{token!r} where a number or ( should be")
    value = _chain(tokens, 0)
    if not tokens or tokens.pop() != ")":
        raise NoExpression("a ( without its )")
    return value


def _apply(sign: str, left: Fraction | None, right: Fraction | None) -> Fraction | None:
    if left is None or right is None:
        return None
    if sign == "/":
        return left / right if right else None
    return left * right if sign == "*" else left + right if sign == "+" else left - right


def _expression(completion: str) -> str:
    end = completion.rfind("</answer>")
    start = completion.rfind("<answer>", 0, max(end, 0))
    return completion[start + len("<answer>") : end] if start >= 0 else completion


def _task(prompt: str, info: Info) -> tuple[tuple[int, ...], int]:
    """The given numbers and the target. Raises RewardError if neither info nor prompt says them."""
    numbers, target = info.get("numbers", info.get("nums")), info.get("target")
    if numbers is None or target is None:
        found = _TASK.fullmatch(prompt)
        if found is None:
            raise RewardError("countdown needs columns numbers (or nums) and target, or prompts such as '3,25,7=46:'")
        return tuple(map(int, found[1].split(","))), int(found[2])
    try:
        return tuple(operator.index(number) for number in numbers), operator.index(target)
    except TypeError:
        raise RewardError(f"numbers {numbers!r} and target {target!r} are not whole numbers"[:200]) from None


# ---- sorting ----

_LIST = re.compile(r"\s*-?[0-9]+(?:\s*,\s*-?[0-9]+)*\s*", re.ASCII)


@dataclass(frozen=True)
class Sorting:
    """Numbers in order: 1 if the completion is the list ``info["answer"]``, such as ``7,12,31``.

    White space around numbers and leading zeros do not matter. Parts: ``correct``; ``format``: 1 for a list of the very
    numbers of the answer in whatever order. The reward is ``correct``, and ``partial`` where only the format is right.
    """

    partial: float = 0.0
    decides: ClassVar[bool] = True

    def __call__(self, prompt: str, completion: str, info: Info) -> dict[str, float]:
        given, wanted = _numbers(completion), _numbers(answer_of(info))
        if wanted is None:
            raise RewardError(f"the answer is no list of whole numbers: {answer_of(info)[:60]!r}")
        well_formed = given is not None and Counter(given) == Counter(wanted)
        return _graded(well_formed, given == wanted, self.partial)

    def check(self, info: Info) -> str:
        """The answer has to be a list in order."""
        wanted = None if _missing(info) else _numbers(answer_of(info))
        in_order = wanted is not None and sorted(map(int, wanted)) == list(map(int, wanted))
        return _missing(info) or ("" if in_order else "the answer is no list of whole numbers in order, as in 7,12,31")


def _numbers(text: str) -> list[str] | None:
    """Canonical digits of each number of a list; None for any other text, and for one of a number that is too long."""
    if len(text) > MOST_LIST or not _LIST.fullmatch(text):
        return None
    found = [number for number in map(_integer, text.split(",")) if number and len(number) <= MOST_DIGITS]
    return found if len(found) == text.count(",") + 1 else None


# ---- what is common ----


def _graded(well_formed: bool, correct: bool, partial: float) -> dict[str, float]:
    reward = 1.0 if correct else partial if well_formed else 0.0
    return {"reward": reward, "correct": float(correct), "format": float(well_formed)}


def answer_of(info: Info) -> str:
    """The given answer as text. Raises RewardError if the data has none."""
    if info.get("answer") is None:
        raise RewardError("the data gives no answer (column answer)")
    return str(info["answer"])


def _missing(info: Info) -> str:
    return "there is no answer" if info.get("answer") is None else ""


addition, exact, gsm8k, countdown, sorting = Addition(), Exact(), Gsm8k(), Countdown(), Sorting()

BUILTIN: dict[str, Verifier] = {
    "addition": addition,
    "countdown": countdown,
    "sorting": sorting,
    "chain": Chain(),
    "flaws": Flaws(),
    "exact": exact,
    "gsm8k": gsm8k,
}
TASKS = ("addition", "countdown", "sorting", "chain", "flaws")
"""Verifiers that are the reward of the task of the same name."""
_MAKERS: dict[str, Callable[[str], Verifier]] = {
    "regex": Regex,
    "countdown": lambda text: Countdown(_credit("countdown", text)),
    "gsm8k": lambda text: Gsm8k(_credit("gsm8k", text)),
    "sorting": lambda text: Sorting(_credit("sorting", text)),
    "chain": lambda text: Chain(_credit("chain", text)),
}
SPECS = (*BUILTIN, *(f"{name}:CREDIT" for name in _MAKERS if name in BUILTIN), "regex:PATTERN")
"""How built-in verifiers are named."""


def builtin(spec: str) -> Verifier | None:
    """The verifier of a name: one of ``SPECS``, as in ``gsm8k``, ``countdown:0.1``, ``regex:####``. None: no such name.

    CREDIT: the reward of a well-formed wrong answer, from 0 to below 1. Raises RewardError for a wrong one, and for a
    pattern that is none.
    """
    if spec in BUILTIN:
        return BUILTIN[spec]
    name, colon, option = spec.partition(":")
    return _MAKERS[name](option) if colon and name in _MAKERS else None


def _credit(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < 1:
        raise RewardError(
            f"reward {f'{name}:{text}'!r}: after the colon comes the reward of a well-formed wrong answer, "
            f"from 0 to below 1, as in {name}:0.1"
        )
    return value
