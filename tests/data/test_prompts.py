"""Splits depend on texts alone; what a step draws depends on (seed, stream, step) alone."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilth.config.schema import Data
from tilth.core.errors import DataError
from tilth.core.random import stream
from tilth.data.prompts import PromptSet, load_source


@pytest.fixture(scope="module")
def addition():
    return load_source(Data())


def texts(prompts):
    return {p.text for p in prompts}


# -- split -----------------------------------------------------------------------------------------------------------


def test_split_parts_the_set(addition):
    train, held = addition.split(0.1)
    assert len(train) + len(held) == len(addition) == 10**6
    assert not np.intersect1d(train.rows, held.rows).size
    assert abs(len(held) / len(addition) - 0.1) < 0.002


def test_this_split_is_the_one_of_every_machine_and_version(addition):
    _, held = addition.split(0.1)
    assert len(held) == 100305 and [held[i].text for i in held.rows[:3]] == ["000+009=", "000+017=", "000+025="]


def test_a_prompt_keeps_its_index(addition):
    train, held = addition.split(0.1)
    index = int(held.rows[5])
    assert held[index] == addition[index] == train[index] and held[index].index == index


words = st.lists(st.text("abcde", min_size=1, max_size=4), min_size=2, max_size=60)


@given(words, st.randoms(use_true_random=False))
def test_split_depends_on_the_texts_only(some, random):
    shuffled = random.sample(some, len(some)) + some[:1]
    sides = []
    for dataset in (some, shuffled):
        try:
            train, held = PromptSet.of(dataset).split(0.5)
        except DataError:
            return
        sides.append((texts(train), texts(held)))
    assert sides[0] == sides[1] and not sides[0][0] & sides[0][1]


@given(words, st.floats(0, 1), st.floats(0, 1))
def test_a_greater_share_holds_out_the_same_and_more(some, a, b):
    low, high = sorted((a, b))
    try:
        less, more = (texts(PromptSet.of(some).split(share)[1]) for share in (low, high))
    except DataError:
        return
    assert less <= more


def test_split_of_nothing_and_of_everything():
    some = PromptSet.of(["a", "b", "c"])
    train, held = some.split(0.0)
    assert (len(train), len(held)) == (3, 0) and list(held) == []
    with pytest.raises(DataError, match=r"data.holdout = 1.0 leaves none of 3 prompts"):
        some.split(1.0)


# -- draw ------------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.integers(1, 30), st.integers(1, 40), st.integers(0, 2**63 - 1))
def test_every_epoch_draws_each_prompt_once(size, count, seed):
    prompts = PromptSet.of([f"p{i}" for i in range(size)])
    order = stream(seed, "prompts")
    drawn = np.concatenate([prompts.draw(order, step, count) for step in range(3 * size // count + 1)])
    for epoch in range(len(drawn) // size):
        assert sorted(drawn[epoch * size : (epoch + 1) * size]) == list(range(size))


def test_a_step_is_drawn_without_the_steps_before(addition):
    first, again = (PromptSet(addition.source, addition.split(0.1)[0].rows) for _ in range(2))
    order = stream(3, "prompts")
    run = [first.draw(order, step, 64) for step in range(4)]
    assert (again.draw(order, 3, 64) == run[3]).all() and run[3].dtype == np.int64
    assert len(np.unique(np.concatenate(run))) == 256


def test_draws_differ_by_seed_stream_and_epoch():
    prompts = PromptSet.of([f"p{i}" for i in range(100)])
    orders = [stream(0, "prompts"), stream(1, "prompts"), stream(0, "examples")]
    drawn = [tuple(prompts.draw(order, epoch, 100)) for order in orders for epoch in range(2)]
    assert len(set(drawn)) == len(drawn)


def test_draws_of_other_streams_between_change_nothing():
    prompts = PromptSet.of([f"p{i}" for i in range(10)])
    order = stream(0, "prompts")
    before = prompts.draw(order, 0, 10)
    for seed in range(20):
        prompts.draw(stream(seed, "other"), 5, 10)
    assert (prompts.draw(order, 0, 10) == before).all() and len(prompts._orders) < 10


def test_draw_stays_inside_its_split(addition):
    train, held = addition.split(0.1)
    assert np.isin(train.draw(stream(0, "x"), 5, 500), train.rows).all()
    assert np.isin(held.draw(stream(0, "x"), 5, 500), held.rows).all()


def test_a_draw_across_several_epochs():
    prompts = PromptSet.of(["a", "b", "c"])
    order = stream(0, "x")
    assert (prompts.take(order, 2, 7) == np.concatenate([prompts.take(order, i, 1) for i in range(2, 9)])).all()
    assert prompts.take(order, 2, 0).tolist() == []


# -- subset, longest -------------------------------------------------------------------------------------------------


def test_subset_is_fixed_and_nested(addition):
    _, held = addition.split(0.1)
    small, large = held.subset(64), held.subset(512)
    assert (small.rows == held.subset(64).rows).all() and np.isin(small.rows, large.rows).all()
    assert np.isin(large.rows, held.rows).all() and (np.diff(large.rows) > 0).all() and len(large) == 512
    assert len(held.subset(10**9)) == len(held)


def test_longest():
    prompts = PromptSet.of(["aa", "b", "cccc", "ddd"])
    assert [p.text for p in prompts.longest(2)] == ["cccc", "ddd"]


# -- load_source -----------------------------------------------------------------------------------------------------


def test_task_with_digits():
    assert next(iter(load_source(Data(digits=2)))).text == "00+00="


def test_file(tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_text('{"prompt": "a"}\n')
    assert [p.text for p in load_source(Data(source=str(path)))] == ["a"]


@pytest.mark.parametrize(
    ("source", "hint"),
    [("additon", "did you mean the task addition?"), ("/x/y.jsonl", "tasks are addition, count")],
)
def test_neither_task_nor_file(source, hint):
    with pytest.raises(DataError) as caught:
        load_source(Data(source=source))
    assert str(caught.value).startswith(f"data.source = {source!r} is neither a task nor a file; {hint}")
