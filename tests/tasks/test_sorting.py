"""Sorting: every prompt has its answer, lists are spread over all there are, hashes and sizes are of the texts."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tilth.config.schema import DataConfig
from tilth.data.computed import text_hashes
from tilth.data.prompts import load_source
from tilth.rewards.verifiers import builtin
from tilth.tasks.sorting import SortingPrompts

sorting = builtin("sorting")
GOLDEN = ["58,67,8,60=", "68,28,78,16=", "13,25,88,87="]
SIZES = [(1, 2), (1, 3), (2, 2), pytest.param(1, 6, marks=pytest.mark.slow)]


@pytest.fixture(scope="module", params=[20_000, pytest.param(SortingPrompts.MOST, marks=pytest.mark.slow)])
def task(request):
    made = SortingPrompts(2, 4)
    made.MOST = request.param
    return made


@settings(deadline=None, max_examples=examples(100))
@given(index=st.integers(0, 10**6 - 1))
def test_a_prompt_and_its_answer(task, index):
    prompt = task.prompt(index := index % len(task))
    numbers = [int(n) for n in prompt.text.removesuffix("=").split(",")]
    assert prompt.text.endswith("=") and len(numbers) == 4 and all(0 <= n < 100 for n in numbers)
    assert [int(n) for n in prompt.answer.split(",")] == sorted(numbers)
    assert prompt.info == {"numbers": numbers, "answer": prompt.answer} and prompt.index == index
    assert set(prompt.text + prompt.answer) <= set(task.alphabet())
    assert sorting(prompt.text, prompt.answer, prompt.info) == {"reward": 1.0, "correct": 1.0, "format": 1.0}


@pytest.mark.slow
def test_some_prompts_of_every_machine_and_version():
    task = SortingPrompts(2, 4)
    said = [task.prompt(i).text for i in (0, 500_000, 999_999)]
    assert said == [SortingPrompts(2, 4).prompt(i).text for i in (0, 500_000, 999_999)] == GOLDEN


@pytest.mark.parametrize("digits, length", SIZES)
def test_all_lists_of_a_small_task(digits, length):
    task = SortingPrompts(digits, length)
    texts = {task.prompt(i).text for i in range(len(task))}
    assert len(task) == len(texts) == 10 ** (digits * length)


@pytest.mark.parametrize("digits, length", SIZES)
def test_hashes_and_sizes_are_those_of_the_texts(digits, length):
    task = SortingPrompts(digits, length)
    texts = [task.prompt(i).text.encode() for i in range(len(task))]
    assert np.array_equal(task.hashes, text_hashes(texts))
    assert task.sizes().tolist() == [len(text) for text in texts]


def test_drawn_numbers_are_even_and_of_few_repetitions(task):
    counts = np.bincount(task._numbers.ravel(), minlength=100)
    mean = len(task) * 4 / 100
    assert len(counts) == 100 and abs(counts - mean).max() < 6 * mean**0.5
    assert len(np.unique(task._numbers @ 100 ** np.arange(4))) > 0.99 * len(task)


def test_nine_digits_and_long_lists_fit():
    task = SortingPrompts(9, 2)
    assert len(task) == 10**6 and 0 <= task._numbers.min() and task._numbers.max() < 10**9


def test_a_recipe_names_it():
    prompts = load_source(DataConfig(source="sorting", digits=1, length=3))
    assert len(prompts) == 1000 and prompts[123].text.count(",") == 2
    assert prompts.fingerprint() != load_source(DataConfig(source="sorting", digits=1, length=2)).fingerprint()


@pytest.mark.parametrize(
    "completion, result",
    [
        ("7,12,31", (1, 1)),
        (" 7, 12 ,031\n", (1, 1)),
        ("12,7,31", (0, 1)),
        ("7,12", (0, 0)),
        ("7,12,31,31", (0, 0)),
        ("7,12,32", (0, 0)),
        ("7,12,31,", (0, 0)),
        ("7 12 31", (0, 0)),
        ("", (0, 0)),
        ("7,,12,31", (0, 0)),
        ("7,12,3.1", (0, 0)),
        ("7,12,٣١", (0, 0)),
        ("7,12,31" + " " * 5000, (0, 0)),
    ],
)
def test_sorting(completion, result):
    found = builtin("sorting")("31,7,12=", completion, {"answer": "7,12,31"})
    assert (found["correct"], found["format"]) == result
    partly = builtin("sorting:0.25")("31,7,12=", completion, {"answer": "7,12,31"})
    assert partly["reward"] == (1.0 if result[0] else 0.25 if result[1] else 0.0)


def test_a_number_of_very_many_digits_is_none():
    digits = "1" * 65
    assert builtin("sorting")("", f"1,{digits}", {"answer": "1,2"})["format"] == 0
    assert "no list" in builtin("sorting").check({"answer": f"1,{digits}"})


@pytest.mark.parametrize("answer, wrong", [("1,2,2", ""), ("2,1", "in order"), ("1,x", "no list"), (None, "no answer")])
def test_what_sorting_says_of_given_answers(answer, wrong):
    assert (
        (wrong in builtin("sorting").check({"answer": answer}))
        if wrong
        else not builtin("sorting").check({"answer": answer})
    )
