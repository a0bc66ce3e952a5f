"""Chains and their flaws: answers are right, flaws are where they are said to be, all is a function of an index."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilth.config.schema import DataConfig
from tilth.data.chain import Chain, Flaws, flaw
from tilth.data.prompts import load_source
from tilth.data.sources import text_hashes
from tilth.rewards.judging import question, steps, verdict
from tilth.rewards.verifiers import builtin
from tilth.rewards.verifiers_steps import first_wrong, problem_of

SOME = range(0, 50_000, 97)
TASKS = {digits: Chain(digits, 4, 0.0) for digits in (1, 2)}


@pytest.fixture(scope="module", params=[(1, 4), (2, 3)])
def size(request):
    return request.param


def test_some_prompts_of_every_machine_and_version():
    found = Chain(1, 4, 0.5).prompt(1)
    assert (found.text, found.answer, found.info) == ("8-5*0-3+9=", "8-5=3\n3*0=0\n0-3=7\n#6", {"answer": "6"})
    asked = Flaws(1, 4, 0.5).prompt(1)
    assert asked.text == "7-0-9*0*0=\n0\n0:7-0=7\n1:7-9=8\n2:8*0=0\n3:0*1=0\n4:#0\n?"
    assert (asked.answer, asked.info) == ("0:7+1:8+2:0+3:0-#3", {"answer": "3", "steps": 5})


def test_all_that_a_warm_up_teaches_ends_right_and_its_share_of_flaws_is_the_one_asked_for(size):
    for share in (0.0, 0.3, 1.0):
        task = Chain(*size, share)
        graded = [builtin("chain")(p.text, p.answer, p.info) for p in map(task.prompt, SOME)]
        assert all(g["correct"] == g["format"] == 1 for g in graded)
        assert np.mean([g["flawed"] for g in graded]) == pytest.approx(share, abs=0.07)


def test_a_judges_task_says_where_the_first_wrong_step_is(size):
    task, oracle = Flaws(*size, 0.5), builtin("flaws")
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
    task = Flaws(1, 4, 1.0)
    first = Counter(task.written(i).first for i in range(2000))
    assert set(first) == {0, 1, 2, 3} and min(first.values()) > 350


@settings(deadline=None, max_examples=300)
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
    some, none = Chain(*size, 0.7), Chain(*size, 0.0)
    assert [some.prompt(i).text for i in SOME] == [none.prompt(i).text for i in SOME]
    assert some.fingerprint() != none.fingerprint()


@pytest.mark.parametrize("make", [Chain, pytest.param(Flaws, marks=pytest.mark.slow)])
def test_hashes_and_sizes_are_those_of_the_texts(make, monkeypatch):
    monkeypatch.setattr(make, "MOST", 2000)
    task = make(1, 3, 0.5)
    texts = [task.prompt(i).text.encode() for i in range(len(task))]
    assert np.array_equal(task.hashes, text_hashes(texts)) and len(set(texts)) > 1900
    assert (task.sizes() >= [len(text) for text in texts]).all() and max(map(len, texts)) == task.sizes().max()


def test_a_recipe_names_them(monkeypatch):
    monkeypatch.setattr(Chain, "MOST", 100)
    monkeypatch.setattr(Flaws, "MOST", 100)
    for name, lines in (("chain", 1), ("flaws", 6)):
        prompts = load_source(DataConfig(source=name, digits=1, length=3, flawed=0.0))
        assert prompts[5].text.count("\n") + 1 - (name == "flaws") == lines
