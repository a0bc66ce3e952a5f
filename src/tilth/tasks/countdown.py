"""Task countdown: reach a target from given numbers with the four operations (as in TinyZero)."""

from __future__ import annotations

import itertools
import operator
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from tilth.config.tasks import Task
from tilth.core.errors import RewardError
from tilth.data.columns import Prompt
from tilth.data.computed import Computed, random_words
from tilth.rewards.verifiers import Info, answer_of, graded

if TYPE_CHECKING:
    import numpy as np  # in functions otherwise: a reward process imports tasks but not numpy

_OPERATORS = "+-*/"
_PIECE = 1 << 17
"""Puzzles drawn at once: few enough for the CPU cache, and the unit by which the search ends if few puzzles exist."""
MOST_CHARACTERS, MOST_PARENTHESES = 256, 32
"""Limits of an expression, which bound time and stack of the parser."""


class Puzzles(NamedTuple):
    """numbers: int64 [n, 3 or 4]; target: int64 [n]; form: int64 [n], the expression of the target, see ``_steps``."""

    numbers: np.ndarray
    target: np.ndarray
    form: np.ndarray

    def take(self, rows: np.ndarray) -> Puzzles:
        """Return the puzzles of these rows."""
        return Puzzles(self.numbers[rows], self.target[rows], self.form[rows])


class CountdownPrompts(Computed):
    """``3,25,7=46:`` -> ``25+7*3``: three or four numbers, and an expression with the value of the target.

    Numbers and target have at most ``digits`` digits. The target is the value of a random expression of all numbers in
    which every step is a positive integer, so each prompt has a solution; it equals none of the numbers. No two prompts
    have the same target and the same multiset of numbers, so no held-out prompt is trained on.

    A million prompts, half of them with three numbers, each a pure function of its index; for one digit all that exist.
    """

    MOST = 10**6

    def __init__(self, digits: int) -> None:
        self.digits = digits

    @cached_property
    def _parts(self) -> tuple[Puzzles, Puzzles]:
        return _puzzles(self.digits, 3, self.MOST // 2), _puzzles(self.digits, 4, self.MOST // 2)

    def __len__(self) -> int:
        return sum(len(part.target) for part in self._parts)

    def prompt(self, index: int) -> Prompt:
        """Return the prompt at an index."""
        three, four = self._parts
        part, row = (three, index) if index < len(three.target) else (four, index - len(three.target))
        numbers, target = part.numbers[row].tolist(), int(part.target[row])
        answer = _expression(numbers, int(part.form[row]))
        info = {"numbers": numbers, "target": target, "answer": answer}
        return Prompt(index, f"{','.join(map(str, numbers))}={target}:", answer, info)

    def texts(self) -> Iterator[str]:
        """Yield the text of each prompt, much faster than one by one."""
        for numbers, target, _ in self._parts:
            template = ",".join(["%d"] * numbers.shape[1]) + "=%d:"
            for start in range(0, len(target), _PIECE):
                rows = slice(start, start + _PIECE)
                yield from map(template.__mod__, zip(*numbers[rows].T.tolist(), target[rows].tolist()))

    def sizes(self) -> np.ndarray:
        """int64 [n]: bytes of each text: the digits, and one sign after each number."""
        import numpy as np

        return np.concatenate([(_digits(p.numbers) + 1).sum(1) + _digits(p.target) + 1 for p in self._parts])

    def alphabet(self) -> str:
        """Return digits, operators, brackets and separators."""
        return "()*+,-/0123456789:="

    def fingerprint(self) -> str:
        """Return the task and its size."""
        return f"countdown of {self.digits} digits"


def _digits(numbers: np.ndarray) -> np.ndarray:
    """Count the digits of positive numbers of at most ten digits."""
    import numpy as np

    return 1 + (numbers[..., None] >= 10 ** np.arange(1, 10)).sum(-1)


# -- drawing -----------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=4)
def _puzzles(digits: int, width: int, most: int) -> Puzzles:
    """Return the first ``most`` distinct puzzles of an endless random sequence of numbers and expressions. The search
    ends early when drawing four times as many adds less than a twentieth, since few more exist then."""
    import numpy as np

    found, pieces = _distinct(_draw(digits, width, 0)), 1
    while (before := len(found.target)) < most:
        needed, exhaustive = 1 + pieces * (most - before) // before, 4 * pieces
        drawn = [_draw(digits, width, pieces + i) for i in range(min(needed, exhaustive))]
        found = _distinct(Puzzles(*map(np.concatenate, zip(found, *drawn))))
        if needed > exhaustive and len(found.target) < 1.05 * before:
            break
        pieces += len(drawn)
    return found.take(np.arange(min(most, len(found.target))))


def _draw(digits: int, width: int, piece: int) -> Puzzles:
    """Return the valid puzzles of a piece of the sequence."""
    import numpy as np

    count = _PIECE * (width + 1)
    words = random_words(("countdown", digits, width), piece * count, count).reshape(_PIECE, width + 1)
    numbers = 1 + (words[:, :width] * (10**digits - 1) >> 32)
    form = words[:, width] * _forms(width) >> 32
    target = _evaluate(numbers, form, 10 ** (digits + 1))
    good = (target > 0) & (target < 10**digits) & (numbers != target[:, None]).all(1)
    return Puzzles(numbers, target, form).take(np.flatnonzero(good))


def _distinct(puzzles: Puzzles) -> Puzzles:
    """Keep the first of puzzles with equal target and multiset of numbers, in order. They are compared by a hash of 64
    bits; a collision drops a puzzle, which does no harm."""
    import numpy as np

    key = puzzles.target.astype(np.uint64)
    for column in np.sort(puzzles.numbers, 1).T:
        key = (key ^ (key >> np.uint64(29))) * np.uint64(0x9E3779B97F4A7C15) + column.astype(np.uint64)
    return puzzles.take(np.sort(np.unique(key, return_index=True)[1]))


# -- expressions -------------------------------------------------------------------------------------------------------


def _forms(width: int) -> int:
    """Count the forms: orders of the numbers, operators between them and, for four numbers, two shapes."""
    return len(_orders(width)) * 4 ** (width - 1) * (width - 2)


@lru_cache(maxsize=2)
def _orders(width: int) -> np.ndarray:
    import numpy as np

    return np.array(list(itertools.permutations(range(width))))


def _steps(form: np.ndarray, width: int) -> tuple[np.ndarray, list[np.ndarray], np.ndarray]:
    """Decode forms: order int64 [n, width], operators int64 [n] each, bool [n]: the last two of four combine first."""
    import numpy as np

    form, pairs = np.divmod(form, width - 2)
    operators = []
    for _ in range(width - 1):
        form, operator = np.divmod(form, 4)
        operators.append(operator)
    return _orders(width)[form], operators, pairs.astype(bool)


def _evaluate(numbers: np.ndarray, form: np.ndarray, cap: int) -> np.ndarray:
    """Return values of expressions, int64 [n], 0 if a step is no integer in [1, cap]; agrees with ``_expression``.
    Computed in float64, which divides eight times faster and is exact up to ``cap``, at most 10^10."""
    import numpy as np

    order, operators, pairs = _steps(form, numbers.shape[1])
    x = np.take_along_axis(numbers, order, 1).T.astype(np.float64)
    value = _apply(operators[0], x[0], x[1], cap)
    if len(x) == 3:
        return _apply(operators[1], value, x[2], cap).astype(np.int64)
    second = _apply(operators[1], np.where(pairs, x[2], value), np.where(pairs, x[3], x[2]), cap)
    value = _apply(operators[2], np.where(pairs, value, second), np.where(pairs, second, x[3]), cap)
    return value.astype(np.int64)


def _apply(operator: np.ndarray, a: np.ndarray, b: np.ndarray, cap: int) -> np.ndarray:
    """Combine the larger number with the smaller; 0 if the result is no integer in [1, cap], or a number is 0."""
    import numpy as np

    high, low = np.maximum(a, b), np.minimum(a, b)
    quotient = high / np.maximum(low, 1)
    value = np.choose(operator, [high + low, high - low, high * low, quotient])
    return np.where((low > 0) & (value <= cap) & (np.floor(value) == value), value, 0)


class _Term(NamedTuple):
    value: int
    text: str
    operator: str = ""

    def bracketed(self, operators: str) -> str:
        return f"({self.text})" if self.operator and self.operator in operators else self.text


def _expression(numbers: list[int], form: int) -> str:
    """Return the text of an expression, the larger operand first, with minimal brackets."""
    import numpy as np

    order, operators, pairs = _steps(np.array([form]), len(numbers))
    x = [_Term(numbers[i], str(numbers[i])) for i in order[0]]
    signs = [_OPERATORS[int(operator[0])] for operator in operators]
    first = _join(signs[0], x[0], x[1])
    if len(x) == 3:
        return _join(signs[1], first, x[2]).text
    if pairs[0]:
        return _join(signs[2], first, _join(signs[1], x[2], x[3])).text
    return _join(signs[2], _join(signs[1], first, x[2]), x[3]).text


def _join(sign: str, a: _Term, b: _Term) -> _Term:
    high, low = (a, b) if a.value >= b.value else (b, a)
    if sign == "+":
        return _Term(high.value + low.value, f"{high.text}+{low.text}", sign)
    if sign == "-":
        return _Term(high.value - low.value, f"{high.text}-{low.bracketed('+-')}", sign)
    if sign == "*":
        return _Term(high.value * low.value, f"{high.bracketed('+-')}*{low.bracketed('+-')}", sign)
    return _Term(high.value // low.value, f"{high.bracketed('+-')}/{low.bracketed(_OPERATORS)}", sign)


# -- verifier ----------------------------------------------------------------------------------------------------------

_TOKEN = re.compile(r"\s*([0-9]+|[-+*/()])\s*")
_TASK = re.compile(r"\s*([0-9]+(?:\s*,\s*[0-9]+)*)\s*=\s*([0-9]+)\s*:\s*", re.ASCII)


class NoExpression(ValueError):
    """The text is no expression of the grammar."""


@dataclass(frozen=True)
class CountdownVerifier:
    """1 for an expression of + - * / and parentheses that uses each number once and equals the target.

    The completion is the expression, or has it in the last ``<answer>...</answer>``. It is parsed, never evaluated as
    Python, and computed in exact rationals, so ``8/3*3`` is 8. Numbers and target: ``info["numbers"]`` (or ``nums``)
    and ``info["target"]``, or a prompt of the form ``3,25,7=46:``.

    Parts: ``correct``; ``format``: 1 for an expression that uses each number once, whatever its value. The reward is
    ``partial`` if only the format is right.
    """

    partial: float = 0.0
    decides: ClassVar[bool] = True

    def __call__(self, prompt: str, completion: str, info: Info) -> dict[str, float]:
        numbers, target = _task(prompt, info)
        try:
            expression = parse(_answer_text(completion))
        except NoExpression:
            return graded(False, False, self.partial)
        well_formed = Counter(expression.numbers) == Counter(numbers)
        return graded(well_formed, well_formed and expression.value == target, self.partial)

    def check(self, info: Info) -> str:
        """Check that the record has numbers and target, and that a given answer is right."""
        try:
            numbers, target = _task(str(info.get("prompt", "")), info)
        except RewardError as error:
            return str(error)
        if info.get("answer") is None or self("", answer_of(info), {"numbers": numbers, "target": target})["correct"]:
            return ""
        return f"the answer does not make {target} of {', '.join(map(str, numbers))}"


class Expression(NamedTuple):
    """Numbers of an expression, in order, and its value; None for a division by zero."""

    numbers: tuple[int, ...]
    value: Fraction | None


def parse(text: str) -> Expression:
    """Parse a sum of products of unsigned numbers and parenthesised sums. Raises NoExpression."""
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
    """Consume operands and operators of a level from the end of a reversed list, left-associative."""
    if level == len(_LEVELS):
        return _operand(tokens)
    value = _chain(tokens, level + 1)
    while tokens and tokens[-1] in _LEVELS[level]:
        value = _combine(tokens.pop(), value, _chain(tokens, level + 1))
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


def _combine(sign: str, left: Fraction | None, right: Fraction | None) -> Fraction | None:
    if left is None or right is None:
        return None
    if sign == "/":
        return left / right if right else None
    return left * right if sign == "*" else left + right if sign == "+" else left - right


def _answer_text(completion: str) -> str:
    end = completion.rfind("</answer>")
    start = completion.rfind("<answer>", 0, max(end, 0))
    return completion[start + len("<answer>") : end] if start >= 0 else completion


def _task(prompt: str, info: Info) -> tuple[tuple[int, ...], int]:
    """Return the numbers and the target. Raises RewardError if neither info nor prompt has them."""
    numbers, target = info.get("numbers", info.get("nums")), info.get("target")
    if numbers is None or target is None:
        found = _TASK.fullmatch(prompt)
        if found is None:
            message = "countdown needs columns numbers (or nums) and target, or prompts such as '3,25,7=46:'"
            raise RewardError(message, key="numbers")
        return tuple(map(int, found[1].split(","))), int(found[2])
    try:
        return tuple(operator.index(number) for number in numbers), operator.index(target)
    except TypeError:
        message = f"numbers {numbers!r} and target {target!r} are not whole numbers"
        raise RewardError(message[:200], key="numbers.type") from None


TASK = Task(CountdownPrompts, CountdownVerifier())
