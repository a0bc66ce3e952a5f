"""Countdown: every prompt can be solved, by what an evaluator of its own says; no two prompts are the same problem."""

import ast
import itertools
import re
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilth.data.columns import Prompt
from tilth.data.countdown import Countdown, _evaluate, _expression, _forms, _puzzles
from tilth.data.sources import text_hashes
from tilth.rewards.verifiers import countdown

GOLDEN = ["54,6,22=70:54+22-6", "47,1,61,78=31:61+47+1-78", "94,77,19,46=44:46-19+94-77"]


@pytest.fixture(scope="module")
def task():
    return Countdown(2)


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


def test_some_prompts_of_every_machine_and_version(task):
    assert [task.prompt(i).text + task.prompt(i).answer for i in (0, 500_000, 999_999)] == GOLDEN
    assert task.prompt(1) == Countdown(2).prompt(1) and isinstance(task.prompt(1), Prompt)


@settings(deadline=None, max_examples=300)
@given(index=st.integers(0, 10**6 - 1))
def test_every_prompt_is_solved_by_its_answer(task, index):
    prompt = task.prompt(index)
    check(prompt, 2)
    assert prompt.index == index and set(prompt.text + prompt.answer) <= set(task.alphabet())


def test_the_reward_agrees(task):
    for index in range(0, len(task), 4999):
        prompt = task.prompt(index)
        assert countdown(prompt.text, prompt.answer, prompt.info)["correct"] == 1
        assert countdown(prompt.text, f"{prompt.answer}+1", prompt.info)["correct"] == 0
        assert countdown.check({**prompt.info, "prompt": prompt.text}) == ""


@pytest.mark.parametrize(
    "digits", [1, pytest.param(3, marks=pytest.mark.slow), pytest.param(9, marks=pytest.mark.slow)]
)
def test_other_sizes(digits):
    task = Countdown(digits)
    assert len(task) == 10**6 or digits == 1
    for index in np.linspace(0, len(task) - 1, 500).astype(int):
        check(task.prompt(int(index)), digits)


@pytest.mark.slow
def test_all_answers_are_right(task):
    for part in task._parts:
        value = _evaluate(part.numbers, part.form, 1000)
        assert (value == part.target).all()


def test_a_million_half_of_three_numbers(task):
    assert len(task) == 10**6 == len(task.hashes) == len(task.sizes())
    assert task.prompt(499_999).text.count(",") == 2 and task.prompt(500_000).text.count(",") == 3


def test_no_two_are_the_same_problem(task):
    for part in task._parts:
        problem = np.concatenate([np.sort(part.numbers, 1), part.target[:, None]], 1)
        code = problem @ (100 ** np.arange(problem.shape[1], dtype=np.int64))  # exact: all are below 100
        assert len(np.unique(code)) == len(code) == 500_000


def test_all_numbers_targets_and_operators_are_there(task):
    for part in task._parts:
        assert set(np.unique(part.numbers)) == set(range(1, 100))
        assert set(np.unique(part.target)) == set(range(1, 100))
    said = Counter("".join(task.prompt(i).answer for i in range(0, 10**6, 997)))
    assert all(said[sign] > 20 for sign in "+-*/()")


def test_hashes_and_sizes_are_those_of_the_texts(task):
    some = np.linspace(0, len(task) - 1, 300).astype(int)
    texts = [task.prompt(int(i)).text.encode() for i in some]
    assert (task.hashes[some] == text_hashes(texts)).all()
    assert task.sizes()[some].tolist() == [len(t) for t in texts]


def test_fingerprints_differ():
    assert len({Countdown(d).fingerprint() for d in (1, 2, 3)}) == 3


# -- the pieces --------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=200)
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
