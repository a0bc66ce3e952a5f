"""Countdown: every prompt can be solved, by what an evaluator of its own says; no two prompts are the same problem."""

import ast
import itertools
import operator
import re
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.errors import raises
from tests.examples import examples
from tilth.core.errors import RewardError
from tilth.data.columns import Prompt
from tilth.data.computed import text_hashes
from tilth.rewards.verifiers import builtin
from tilth.tasks.countdown import (
    CountdownPrompts,
    CountdownVerifier,
    NoExpression,
    _evaluate,
    _expression,
    _forms,
    _puzzles,
    _tokens,
    parse,
)

countdown = builtin("countdown")

GOLDEN = ["54,6,22=70:54+22-6", "47,1,61,78=31:61+47+1-78", "94,77,19,46=44:46-19+94-77"]


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.slow)])
def task(request):
    """A set of few problems; all of two digits are a million."""
    return CountdownPrompts(request.param)


def evaluate(text):
    """Exact value, the numbers used and every value on the way, by Python's own parser."""
    numbers, values = [], []

    def walk(node):
        if isinstance(node, ast.Constant):
            numbers.append(node.value)
            return Fraction(node.value)
        left, right = walk(node.left), walk(node.right)
        kind = type(node.op)
        value = {
            ast.Add: lambda: left + right,
            ast.Sub: lambda: left - right,
            ast.Mult: lambda: left * right,
            ast.Div: lambda: left / right,
        }[kind]()
        values.append(value)
        return value

    return walk(ast.parse(text, mode="eval").body), numbers, values


def check(prompt, digits):
    said = re.fullmatch(r"(\d+(?:,\d+){2,3})=(\d+):", prompt.text)
    numbers, target = [int(n) for n in said[1].split(",")], int(said[2])
    value, used, _ = evaluate(prompt.answer)
    assert value == target and Counter(used) == Counter(numbers)
    assert all(1 <= n < 10**digits for n in [*numbers, target]) and target not in numbers
    assert prompt.info == {"numbers": numbers, "target": target, "answer": prompt.answer}


@pytest.mark.slow
def test_some_prompts_of_every_machine_and_version():
    task = CountdownPrompts(2)
    assert [task.prompt(i).text + task.prompt(i).answer for i in (0, 500_000, 999_999)] == GOLDEN
    assert task.prompt(1) == CountdownPrompts(2).prompt(1) and isinstance(task.prompt(1), Prompt)


@settings(deadline=None, max_examples=5 * settings.default.max_examples)
@given(index=st.integers(0, 10**6 - 1))
def test_every_prompt_is_solved_by_its_answer(task, index):
    prompt = task.prompt(index := index % len(task))
    check(prompt, task.digits)
    assert prompt.index == index and set(prompt.text + prompt.answer) <= set(task.alphabet())


def test_the_reward_agrees(task):
    for index in range(0, len(task), len(task) // 200):
        prompt = task.prompt(index)
        assert countdown(prompt.text, prompt.answer, prompt.info)["correct"] == 1
        assert countdown(prompt.text, f"{prompt.answer}+1", prompt.info)["correct"] == 0
        assert countdown.check({**prompt.info, "prompt": prompt.text}) == ""


@pytest.mark.parametrize(
    "digits", [1, pytest.param(3, marks=pytest.mark.slow), pytest.param(9, marks=pytest.mark.slow)]
)
def test_other_sizes(digits):
    task = CountdownPrompts(digits)
    assert len(task) == 10**6 or digits == 1
    for index in np.linspace(0, len(task) - 1, 500).astype(int):
        check(task.prompt(int(index)), digits)


def test_all_answers_are_right(task):
    for part in task._parts:
        value = _evaluate(part.numbers, part.form, 1000)
        assert (value == part.target).all()


@pytest.mark.slow
def test_a_million_half_of_three_numbers():
    task = CountdownPrompts(2)
    assert len(task) == 10**6 == len(task.hashes) == len(task.sizes())
    assert task.prompt(499_999).text.count(",") == 2 and task.prompt(500_000).text.count(",") == 3


def test_no_two_are_the_same_problem(task):
    for part in task._parts:
        problem = np.concatenate([np.sort(part.numbers, 1), part.target[:, None]], 1)
        code = problem @ (100 ** np.arange(problem.shape[1], dtype=np.int64))  # exact: all are below 100
        assert len(np.unique(code)) == len(code)


def test_all_numbers_targets_and_operators_are_there(task):
    for part in task._parts:
        assert set(np.unique(part.numbers)) == set(range(1, 10**task.digits))
        assert set(np.unique(part.target)) == set(range(1, 10**task.digits))
    said = Counter("".join(task.prompt(i).answer for i in range(0, len(task), len(task) // 1000)))
    assert all(said[sign] > 20 for sign in "+-*/()")


def test_hashes_and_sizes_are_those_of_the_texts(task):
    some = np.linspace(0, len(task) - 1, 300).astype(int)
    texts = [task.prompt(int(i)).text.encode() for i in some]
    assert (task.hashes[some] == text_hashes(texts)).all()
    assert task.sizes()[some].tolist() == [len(t) for t in texts]


def test_fingerprints_differ():
    assert len({CountdownPrompts(d).fingerprint() for d in (1, 2, 3)}) == 3


# -- the pieces --------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=examples(200))
@given(st.lists(st.integers(1, 12), min_size=3, max_size=4), st.data())
def test_value_and_expression_of_a_form_agree(numbers, data):
    form = data.draw(st.integers(0, _forms(len(numbers)) - 1))
    cap = 1000
    found = int(_evaluate(np.array([numbers]), np.array([form]), cap)[0])
    if found == 0:
        return  # some step is not whole, not positive or too large: seen by the test below
    value, used, _ = evaluate(_expression(numbers, form))
    assert value == found and Counter(used) == Counter(numbers)


@pytest.mark.parametrize("numbers", [(2, 3, 7), (1, 1, 1), (6, 4, 3, 2), (5, 5, 10, 1)])
def test_reachable_values_are_those_of_a_search(numbers):
    """Brute force over all ways to join two numbers, with the same rule for each step."""

    def search(values, cap):
        if len(values) == 1:
            return {values[0]}
        found = set()
        for i, j in itertools.combinations(range(len(values)), 2):
            rest = [v for k, v in enumerate(values) if k not in (i, j)]
            low, high = sorted((values[i], values[j]))
            steps = [high + low, high - low, high * low, *([high // low] if high % low == 0 else [])]
            for step in steps:
                if 1 <= step <= cap:
                    found |= search([*rest, step], cap)
        return found

    forms = np.arange(_forms(len(numbers)))
    found = _evaluate(np.tile(numbers, (len(forms), 1)), forms, 60)
    assert set(found[found > 0].tolist()) == search(list(numbers), 60)


def test_float_arithmetic_is_exact_at_the_largest_size():
    """Products above 2^53 are refused, not rounded."""
    numbers = np.array([[10**9 - 1, 10**9 - 2, 10**9 - 3]])
    form = np.arange(_forms(3))
    found = _evaluate(np.repeat(numbers, len(form), 0), form, 10**10)
    for f, value in zip(form, found):
        if value:
            exact, _, steps = evaluate(_expression(numbers[0].tolist(), int(f)))
            assert exact == value and max(steps) <= 10**10
    assert (found > 0).any() and (found == 0).any()


def test_brackets_only_where_needed():
    said = {_expression([8, 4, 2], form) for form in range(_forms(3))}
    assert {"8-(4-2)", "8-4-2", "8+4+2", "(8+4)*2", "8/(4/2)", "8/4/2", "8*4/2", "8-4/2"} <= said
    for text in said:
        for bracket in re.findall(r"\(.*?\)", text):  # without it the value is another one
            assert evaluate(text.replace(bracket, bracket[1:-1]))[0] != evaluate(text)[0]


def test_fewer_than_asked_for_where_there_are_no_more():
    few = _puzzles(1, 3, 10**6)
    assert len(few.target) < 2000 and len(_puzzles(1, 3, 10).target) == 10
    assert (few.take(np.arange(10)).target == _puzzles(1, 3, 10).target).all()


# -- verifier --

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def by_python(text):
    """(value, numbers) by Python's grammar, in rationals; None and nothing where it divides by zero. The reference."""

    def value(node):
        if isinstance(node, ast.BinOp):
            return OPERATORS[type(node.op)](value(node.left), value(node.right))
        assert isinstance(node, ast.Constant) and type(node.value) is int
        found.append(node.value)
        return Fraction(node.value)

    found: list[int] = []
    tree = ast.parse(text.strip(), mode="eval").body
    try:
        return value(tree), sorted(found)
    except ZeroDivisionError:
        return None, []


numbers = st.integers(0, 99).map(str)
expressions = st.recursive(
    numbers,
    lambda inner: st.one_of(
        inner.map("({})".format),
        st.tuples(inner, st.sampled_from(["+", "-", "*", "/", " + ", " / "]), inner).map("".join),
    ),
    max_leaves=12,
)


@given(expressions)
def test_an_expression_is_what_python_says(text):
    found = parse(text)
    value, numbers = by_python(text)
    assert found.value == value
    if value is not None:
        assert sorted(found.numbers) == numbers


@given(st.text(alphabet="0123456789+-*/() .", max_size=12))
def test_what_is_read_is_an_expression_of_python_too(text):
    """And what Python reads and we do not, has a sign in front of a number, a point, a power, // or a leading zero."""
    try:
        found = parse(text)
    except NoExpression:
        return
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except SyntaxError:
        assert any(token.startswith("0") and token.strip("0") for token in _tokens(text))
        return
    assert not any(isinstance(node, ast.UnaryOp) for node in ast.walk(tree))
    assert found.value == by_python(text)[0]


@pytest.mark.parametrize(
    "text, why",
    [
        ("", "its end"),
        (" ", "its end"),
        ("1+", "its end"),
        ("(1+2", "a ( without its )"),
        ("1+2)", "')' is too much"),
        ("()", "')' where a number"),
        ("1 2", "'2' is too much"),
        ("-3+5", "'-' where a number"),
        ("2**3", "'*' where a number"),
        ("2//3", "'/' where a number"),
        ("3!", "'!' does not belong"),
        ("1.5*2", "'.' does not belong"),
        ("3+4=7", "'=' does not belong"),
        ("a", "'a' does not belong"),
        ("__import__('os')", "'_' does not belong"),
        ("٣+٤", "does not belong"),
        ("²", "does not belong"),
        ("1+" * 200 + "1", "longer than 256"),
    ],
)
def test_what_is_no_expression(text, why):
    with pytest.raises(NoExpression) as error:
        parse(text)
    assert why in str(error.value)


def test_depth_and_size_are_bounded():
    assert parse("(" * 32 + "1" + ")" * 32).value == 1
    assert parse("*".join(["99"] * 80)).value == 99**80
    for text in ("(" * 33 + "1" + ")" * 33, "(" * 256, "(" * 100_000, "1+" * 128 + "1"):
        with pytest.raises(NoExpression) as caught:
            parse(text)
        assert "256" in str(caught.value) and "32" in str(caught.value)


def graded(completion, prompt="3,25,7=46:", verifier=countdown, **info):
    found = verifier(prompt, completion, info)
    return found["reward"], found["correct"], found["format"]


@pytest.mark.parametrize(
    "prompt, completion, result",
    [
        ("3,25,7=46:", "(25-7)*3", (0, 0, 1)),
        ("3,25,7=54:", "(25-7)*3", (1, 1, 1)),
        ("3,25,7=54:", " 3 * ( 25 - 7 )\n", (1, 1, 1)),
        ("3,25,7=54:", "3*(25-7)+7-7", (0, 0, 0)),  # a number too often
        ("3,25,7=22:", "25-3", (0, 0, 0)),  # a number left out
        ("3,25,7=54:", "54", (0, 0, 0)),
        ("3,25,7=54:", "", (0, 0, 0)),
        ("3,25,7=54:", "(25-7)*3=54", (0, 0, 0)),
        ("8,3,3=8:", "8/3*3", (1, 1, 1)),  # exact in between
        ("1,3,5=0:", "1/(5-3-2)", (0, 0, 0)),
        ("5,5,1=1:", "1/(5-5)", (0, 0, 1)),  # no value, but well-formed
        ("3,3,8,8=24:", "8/(3-8/3)", (1, 1, 1)),
        ("3, 25 ,7 = 54 : ", "(25-7)*3", (1, 1, 1)),
        ("3,25,7=54:", "I think <answer> 25*3 </answer> no, <answer>(25-7)*3</answer>.", (1, 1, 1)),
        ("3,25,7=54:", "<answer>(25-7)*3</answer> or <answer>(25+7)*3</answer>", (0, 0, 1)),
    ],
)
def test_countdown(prompt, completion, result):
    assert graded(completion, prompt) == result


def test_partial_credit_is_an_option():
    partly = builtin("countdown:0.1")
    assert partly == CountdownVerifier(0.1)
    cases = [("(25-7)*3", (1, 1, 1)), ("25-7*3", (0.1, 0, 1)), ("25-7", (0, 0, 0)), ("?", (0, 0, 0))]
    assert [graded(text, "3,25,7=54:", partly) for text, _ in cases] == [result for _, result in cases]


@pytest.mark.parametrize("key", ["numbers", "nums"])
def test_numbers_and_target_of_the_data_come_before_the_prompt(key):
    info = {key: [19, 36, 55, 7], "target": 65}
    prompt = "Using the numbers [19, 36, 55, 7], create an equation that equals 65."
    assert graded("<answer>55 + 36 - 7 - 19</answer>", prompt, **info) == (1, 1, 1)
    assert graded("55+36-7-19", "1,2=3:", **info) == (1, 1, 1)


@pytest.mark.parametrize(
    "prompt, info, key",
    [
        ("make 5 of 2 and 3", {}, "numbers"),
        ("make 5", {"numbers": [2, 3]}, "numbers"),
        ("", {"numbers": [2.5, 3], "target": 5}, "numbers.type"),
        ("", {"numbers": "2,3", "target": 5}, "numbers.type"),
        ("", {"numbers": [2, 3], "target": "5"}, "numbers.type"),
        ("", {"numbers": 5, "target": 5}, "numbers.type"),
    ],
)
def test_a_prompt_that_is_no_countdown(prompt, info, key):
    with raises(RewardError, key):
        countdown(prompt, "1+1", info)
    assert countdown.check({"prompt": prompt, **info})


def reachable(numbers):
    """All values of expressions of all the numbers: brute force over pairs, as texts. The reference."""
    if len(numbers) == 1:
        return {numbers[0][0]: numbers[0][1]}
    found = {}
    for i, j in itertools.permutations(range(len(numbers)), 2):
        rest = [n for k, n in enumerate(numbers) if k not in (i, j)]
        (a, left), (b, right) = numbers[i], numbers[j]
        for sign, function in (("+", operator.add), ("-", operator.sub), ("*", operator.mul), ("/", operator.truediv)):
            if sign != "/" or b:
                found |= reachable([*rest, (function(a, b), f"({left}{sign}{right})")])
    return found


@settings(max_examples=examples(20), deadline=None)
@given(st.lists(st.integers(1, 30), min_size=2, max_size=3))
def test_every_value_that_can_be_reached_is_found_right_and_no_other(given_numbers):
    table = reachable([(Fraction(n), str(n)) for n in given_numbers])
    prompt = f"{','.join(map(str, given_numbers))}="
    for value, text in table.items():
        if value.denominator == 1 and value >= 0:
            assert graded(text, f"{prompt}{value}:") == (1, 1, 1)
            assert graded(text, f"{prompt}{value + 1}:") == (0, 0, 1)


@given(st.text(alphabet="0123456789+-*/() <answer>", max_size=60))
def test_any_expression_is_right_or_wrong_and_never_missing(text):
    reward, correct, form = graded(text)
    assert reward == correct and correct <= form and {correct, form} <= {0.0, 1.0}
    assert graded("<answer>" * 9_000) == (0, 0, 0)
