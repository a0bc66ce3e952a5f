"""Addition: index and pair are inverse, hashes are those of the texts, which differ."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tilth.data.columns import Prompt
from tilth.data.computed import text_hashes
from tilth.tasks.addition import AdditionPrompts


def test_addition_of_three_digits():
    prompt = AdditionPrompts(3).prompt(123456)
    assert prompt == Prompt(123456, "123+456=", "0579", {"answer": "0579"})
    assert AdditionPrompts(3).prompt(999999).answer == "1998" and AdditionPrompts(3).prompt(0).text == "000+000="


@given(st.integers(1, 9), st.data())
def test_index_and_pair_are_inverse(digits, data):
    task = AdditionPrompts(digits)
    index = data.draw(st.integers(0, len(task) - 1))
    a, b = task.pair(index)
    prompt = task.prompt(index)
    assert task.index(a, b) == index and 0 <= min(a, b) and max(a, b) < 10**digits
    assert prompt.text == f"{str(a).zfill(digits)}+{str(b).zfill(digits)}="
    assert prompt.answer == str(a + b).zfill(digits + 1) and len(prompt.answer) == digits + 1


@pytest.mark.parametrize(("digits", "size"), [(1, 100), (2, 10_000), (3, 10**6), (4, 10**6), (9, 10**6)])
def test_size_and_spread(digits, size):
    task = AdditionPrompts(digits)
    assert len(task) == size
    pairs = [task.pair(i) for i in range(0, size, 997 if size > 10_000 else 1)]
    assert len(set(pairs)) == len(pairs)
    for column in zip(*pairs):
        # every first digit and every last digit of both numbers is there
        assert {x // 10 ** (digits - 1) for x in column} == set(range(10))
        assert {x % 10 for x in column} == set(range(10))


@settings(max_examples=examples(10), deadline=None)
@given(st.integers(1, 9))
def test_hashes_are_those_of_the_texts(digits):
    task = AdditionPrompts(digits)
    some = np.linspace(0, len(task) - 1, 100).astype(int)
    assert (task.hashes[some] == text_hashes(task.prompt(int(i)).text.encode() for i in some)).all()
    assert len(task.hashes) == len(task) == len(task.sizes())
    assert (task.sizes() == len(task.prompt(0).text)).all()


def test_hashes_of_alike_texts_are_uniform():
    hashes = AdditionPrompts(3).hashes
    counts = np.bincount(hashes >> np.uint32(28), minlength=16)
    assert np.abs(counts / counts.mean() - 1).max() < 0.02  # five standard deviations of 62,500 are 2 %
    # and their low bits, and pairs that differ in one digit, which a bare CRC maps to one fixed difference
    assert abs((hashes & 1).mean() - 0.5) < 0.005
    assert len(np.unique(hashes[:-1] ^ hashes[1:])) > 900_000


def test_alphabet_of_addition_covers_it():
    task = AdditionPrompts(2)
    assert set(task.alphabet()) == set("".join(task.prompt(i).text + task.prompt(i).answer for i in range(0, 10000, 7)))
