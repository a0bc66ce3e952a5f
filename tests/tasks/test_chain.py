"""Chains and their flaws: answers are right, flaws are where they are said to be, all is a function of an index."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.errors import raises
from tests.examples import examples
from tilth.config.schema import DataConfig
from tilth.core.errors import RewardError
from tilth.data.computed import text_hashes
from tilth.data.prompts import load_source
from tilth.rewards.judging import question, steps, verdict
from tilth.rewards.verifiers import builtin
from tilth.tasks.chain import ChainPrompts, Problem, first_wrong, flaw, problem_of
from tilth.tasks.flaws import FlawsPrompts

SOME = range(0, 50_000, 97)
TASKS = {digits: ChainPrompts(digits, 4, 0.0) for digits in (1, 2)}


@pytest.fixture(scope="module", params=[(1, 4), (2, 3)])
def size(request):
    return request.param


def test_some_prompts_of_every_machine_and_version():
    found = ChainPrompts(1, 4, 0.5).prompt(1)
    assert (found.text, found.answer, found.info) == ("8-5*0-3+9=", "8-5=3\n3*0=0\n0-3=7\n#6", {"answer": "6"})
    asked = FlawsPrompts(1, 4, 0.5).prompt(1)
    assert asked.text == "7-0-9*0*0=\n0\n0:7-0=7\n1:7-9=8\n2:8*0=0\n3:0*1=0\n4:#0\n?"
    assert (asked.answer, asked.info) == ("0:7+1:8+2:0+3:0-#3", {"answer": "3", "steps": 5})


def test_all_that_a_warm_up_teaches_ends_right_and_its_share_of_flaws_is_the_one_asked_for(size):
    for share in (0.0, 0.3, 1.0):
        task = ChainPrompts(*size, share)
        graded = [builtin("chain")(p.text, p.answer, p.info) for p in map(task.prompt, SOME)]
        assert all(g["correct"] == g["format"] == 1 for g in graded)
        assert np.mean([g["flawed"] for g in graded]) == pytest.approx(share, abs=0.07)


def test_a_judges_task_says_where_the_first_wrong_step_is(size):
    task, oracle = FlawsPrompts(*size, 0.5), builtin("flaws")
    for prompt in map(task.prompt, SOME):
        problem, answer, *listed = prompt.text.split("\n")
        written = [line.partition(":")[2] for line in listed[:-1]]
        right = problem_of(problem).solution()
        assert int(prompt.info["answer"]) == first_wrong(right, written) and prompt.info["steps"] == len(written)
        assert right[-1] == written[-1] == f"#{answer}"
        assert prompt.text == question(problem, answer, steps("\n".join(written)))
        assert verdict(prompt.answer, len(written)) == int(prompt.info["answer"])
        assert oracle(prompt.text, prompt.answer, prompt.info)["reward"] == 1 and oracle.check(prompt.info) == ""
        assert set(prompt.text + prompt.answer) <= set(task.alphabet())


def test_flaws_are_spread_over_kinds_and_steps():
    task = FlawsPrompts(1, 4, 1.0)
    first = Counter(task.written(i).first for i in range(2000))
    assert set(first) == {0, 1, 2, 3} and min(first.values()) > 350


@settings(deadline=None, max_examples=examples(300))
@given(st.sampled_from("sckg"), st.integers(0, 2**32 - 1), st.integers(0, 10**4), st.integers(1, 2))
def test_a_flaw_is_in_its_step_and_the_answer_stays(kind, word, index, digits):
    problem = TASKS[digits].problem(index)
    right = problem.solution()
    at = index % 4
    written = flaw(problem, right, kind, at, word)
    assert written[-1] == right[-1] and written != right
    found = first_wrong(right, written)
    assert (found >= at) if kind == "k" else (found == at)
    assert found < len(written)


def test_a_solution_is_the_same_whatever_its_problem_is_trained_for(size):
    """The problem of an index does not depend on the share of flaws, so held-out prompts stay held out."""
    some, none = ChainPrompts(*size, 0.7), ChainPrompts(*size, 0.0)
    assert [some.prompt(i).text for i in SOME] == [none.prompt(i).text for i in SOME]
    assert some.fingerprint() != none.fingerprint()


@pytest.mark.parametrize("make", [ChainPrompts, pytest.param(FlawsPrompts, marks=pytest.mark.slow)])
def test_hashes_and_sizes_are_those_of_the_texts(make, monkeypatch):
    monkeypatch.setattr(make, "MOST", 2000)
    task = make(1, 3, 0.5)
    texts = [task.prompt(i).text.encode() for i in range(len(task))]
    assert np.array_equal(task.hashes, text_hashes(texts)) and len(set(texts)) > 1900
    assert (task.sizes() >= [len(text) for text in texts]).all() and max(map(len, texts)) == task.sizes().max()


def test_a_recipe_names_them(monkeypatch):
    monkeypatch.setattr(ChainPrompts, "MOST", 100)
    monkeypatch.setattr(FlawsPrompts, "MOST", 100)
    for name, lines in (("chain", 1), ("flaws", 6)):
        prompts = load_source(DataConfig(source=name, digits=1, length=3, flawed=0.0))
        assert prompts[5].text.count("\n") + 1 - (name == "flaws") == lines


# ---- chains ----


def chain(completion, prompt="3+4*2-5=", **info):
    return builtin("chain")(prompt, completion, {"answer": "9", **info})


@pytest.mark.parametrize(
    "completion, correct, form, flawed",
    [
        ("3+4=7\n7*2=4\n4-5=9\n#9", 1, 1, 0),
        (" 3+4=7\n\n7*2=4\n4-5=9 \n#9\n", 1, 1, 0),
        ("3+4=8\n7*2=4\n4-5=9\n#9", 1, 1, 1),  # a slip
        ("3+4=8\n8*2=4\n4-5=9\n#9", 1, 1, 1),  # cancelled
        ("3+4=7\n4-5=9\n#9", 1, 1, 1),  # left out
        ("#9", 1, 1, 1),  # guessed
        ("3+4=7\n7*2=4\n4-5=9\n9+0=9\n#9", 1, 1, 1),  # too much
        ("3+4=7\n7*2=4\nwell\n#9", 1, 0, 1),
        ("3+4=7\n7*2=4\n4-5=9\n#8", 0, 1, None),
        ("3+4=7\n7*2=4\n4-5=9", 0, 0, None),
        ("#9\n3+4=7", 0, 0, None),
        ("#09", 1, 1, 1),
        ("", 0, 0, None),
        ("#٩", 0, 0, None),
    ],
)
def test_a_chain_is_right_by_its_end_and_flawed_by_its_steps(completion, correct, form, flawed):
    found = chain(completion)
    assert (found["correct"], found["format"], found.get("flawed")) == (correct, form, flawed)
    assert found["reward"] == correct
    assert builtin("chain:0.25")("3+4*2-5=", completion, {})["reward"] == (correct or 0.25 * form)


@pytest.mark.parametrize(
    "written, first",
    [
        (["3+4=7", "7*2=4", "4-5=9", "#9"], -1),
        (["3+4=7", "7*2=4", "4-5=8", "#9"], 2),
        (["3+4=7", "7*2=4", "4-5=9", "#8"], 3),
        (["3+4=7", "4-5=9", "#9"], 1),
        (["3+4=7", "7*2=4", "4-5=9"], 3),
        (["3+4=7", "7*2=4", "4-5=9", "#9", "#9"], 4),
        ([], 0),
    ],
)
def test_the_first_wrong_step(written, first):
    assert first_wrong(problem_of("3+4*2-5=").solution(), written) == first


@given(st.lists(st.tuples(st.sampled_from("+-*"), st.integers(0, 99)), min_size=1, max_size=6), st.integers(0, 99))
def test_a_chain_is_worth_what_python_says(terms, first):
    value, text = first, f"{first:02}"
    for sign, number in terms:
        value = eval(f"({value}){sign}{number}") % 100
        text += f"{sign}{number:02}"
    problem = problem_of(text + "=")
    assert problem.solution()[-1] == f"#{value:02}" and len(problem.solution()) == len(terms) + 1
    assert isinstance(problem, Problem) and first_wrong(problem.solution(), problem.solution()) == -1


@pytest.mark.parametrize("prompt", ["", "3=", "3+4", "3/4=", "3+44=", "3+4=7", "a+b=", "+3="])
def test_what_is_no_chain(prompt):
    with raises(RewardError, "prompt.digits" if prompt == "3+44=" else "prompt"):
        chain("#1", prompt)
    assert builtin("chain").check({"prompt": prompt})


def test_what_a_chain_says_of_given_answers():
    check = builtin("chain").check
    assert check({"prompt": "3+4=", "answer": "7"}) == "" == check({"prompt": "3+4="})
    assert check({"prompt": "3+4=", "answer": "8"}) == "the answer is not 7"
