"""Splits depend on texts alone; what a step draws depends on (seed, stream, step) alone."""

import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.reading import load_texts
from tests.errors import raises
from tilth.config.load import load_recipe
from tilth.config.schema import DataConfig
from tilth.core.errors import DataError
from tilth.core.random import stream
from tilth.data.prompts import PromptSet, load_source, with_holdout


@pytest.fixture(scope="module")
def addition():
    return load_source(DataConfig())


def texts(prompts):
    return {p.text for p in prompts}


# -- split -----------------------------------------------------------------------------------------------------------


def test_split_parts_the_set(addition):
    train, held = addition.split(0.1)
    assert len(train) + len(held) == len(addition) == 10**6
    assert (np.bincount(np.concatenate([train.rows, held.rows])) == 1).all()
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
    with raises(DataError, "data.holdout"):
        some.split(1.0)


# -- draw ------------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.integers(1, 30), st.integers(1, 40), st.integers(0, 2**63 - 1))
def test_every_epoch_draws_each_prompt_once(size, count, seed):
    prompts = PromptSet.of([f"p{i}" for i in range(size)])
    order = stream(seed, "prompts")
    drawn = np.concatenate([prompts.take(order, step * count, count) for step in range(3 * size // count + 1)])
    for epoch in range(len(drawn) // size):
        assert sorted(drawn[epoch * size : (epoch + 1) * size]) == list(range(size))


def test_a_step_is_drawn_without_the_steps_before(addition):
    first, again = (PromptSet(addition.source, addition.split(0.1)[0].rows) for _ in range(2))
    order = stream(3, "prompts")
    run = [first.take(order, 64 * step, 64) for step in range(4)]
    assert (again.take(order, 192, 64) == run[3]).all() and run[3].dtype == np.int64
    assert len(np.unique(np.concatenate(run))) == 256


def test_draws_differ_by_seed_stream_and_epoch():
    prompts = PromptSet.of([f"p{i}" for i in range(100)])
    orders = [stream(0, "prompts"), stream(1, "prompts"), stream(0, "examples")]
    drawn = [tuple(prompts.take(order, 100 * epoch, 100)) for order in orders for epoch in range(2)]
    assert len(set(drawn)) == len(drawn)


def test_draws_of_other_streams_between_change_nothing():
    prompts = PromptSet.of([f"p{i}" for i in range(10)])
    order = stream(0, "prompts")
    before = prompts.take(order, 0, 10)
    for seed in range(20):
        prompts.take(stream(seed, "other"), 50, 10)
    assert (prompts.take(order, 0, 10) == before).all() and len(prompts._orders) < 10


def test_draw_stays_inside_its_split(addition):
    train, held = addition.split(0.1)
    assert np.isin(train.take(stream(0, "x"), 2500, 500), train.rows).all()
    assert np.isin(held.take(stream(0, "x"), 2500, 500), held.rows).all()


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


def test_a_subset_of_all_is_held_out_no_more_than_the_rest(addition):
    _, held = addition.split(0.1)
    assert 40 < np.isin(addition.subset(1000).rows, held.rows).sum() < 180


def test_the_longest_and_the_shortest():
    prompts = PromptSet.of(["aa", "b", "cccc", "ddd"])
    assert [p.text for p in prompts.extremes(2)] == ["cccc", "ddd", "b"]


# -- load_source -----------------------------------------------------------------------------------------------------


def test_task_with_digits():
    assert next(iter(load_source(DataConfig(digits=2)))).text == "00+00="


def test_file(tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_text('{"prompt": "a"}\n')
    assert [p.text for p in load_source(DataConfig(source=str(path)))] == ["a"]


@pytest.mark.parametrize(
    ("source", "hint"),
    [
        ("additon", "did you mean the task addition?"),
        ("/x/y.jsonl", "tasks are addition, calculator, chain, code_sandbox"),
    ],
)
def test_neither_task_nor_file(source, hint):
    with raises(DataError, "data.source") as caught:
        load_source(DataConfig(source=source))
    assert hint in str(caught.value)


# -- a held-out source -----------------------------------------------------------------------------------------------


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


@pytest.fixture
def two(tmp_path):
    train = write(tmp_path / "train.jsonl", [{"q": f"t{i}", "answer": str(i)} for i in range(20)])
    test = write(tmp_path / "test.jsonl", [{"q": "t3", "answer": "3"}, {"q": "new", "answer": "é"}, {"q": "t7"}])
    return DataConfig(source=train, heldout=test, columns={"prompt": "q"})


def test_the_second_source_is_held_out_and_nothing_else(two):
    prompts = load_source(two)
    train, held = prompts.split(0.5)
    assert len(prompts) == 23 and [p.text for p in held] == ["t3", "new", "t7"] and held.rows.tolist() == [20, 21, 22]
    assert [p.text for p in train] == [f"t{i}" for i in range(20) if i not in (3, 7)]
    assert prompts.copies == train.copies == 2
    assert all(prompts[i].index == i for i in range(23)) and prompts[21].answer == "é"
    assert "é" in prompts.alphabet() and prompts.source.sizes().tolist() == [len(p.text) for p in prompts]


def test_a_split_of_a_split_stays_on_its_side(two):
    train, held = load_source(two).split(0.0)
    again, none = train.split(0.5)
    assert (again.rows == train.rows).all() and len(none) == 0
    assert (held.subset(2).rows >= 20).all() and train.subset(5).rows.max() < 20


def test_copies_are_told_by_text_and_not_by_hash_alone(two, monkeypatch):
    prompts = load_source(two)
    for source in prompts.source.parts:
        source.__dict__["hashes"] = np.zeros(len(source), np.uint32)  # every text collides with every other
    assert prompts.source.copies.nonzero()[0].tolist() == [3, 7]


def test_nothing_left_to_train_on(two):
    same = two.model_copy(update={"heldout": two.source})
    with raises(DataError, "data.heldout"):
        load_source(same).split(0.1)


def test_a_task_may_be_held_out_from_files(tmp_path):
    train = write(tmp_path / "d.jsonl", [{"prompt": "1+1="}, {"prompt": "11+1="}])
    left, held = load_source(DataConfig(source=train, heldout="addition", digits=1)).split(0.0)
    assert len(held) == 100 and [p.text for p in left] == ["11+1="]


def test_fingerprints(two, tmp_path):
    prompts = load_source(two)
    alone = load_source(two.model_copy(update={"heldout": ""}))
    turned = load_source(two.model_copy(update={"source": two.heldout, "heldout": two.source}))
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    chat = PromptSet.of([{"messages": turns}])
    said = PromptSet.of([{"messages": [turns[0]], "answer": "b"}])
    flat = PromptSet.of([{"prompt": "a", "answer": "b"}])
    assert len({p.fingerprint() for p in (prompts, alone, turned, chat, said, flat)}) == 6
    assert load_source(two).fingerprint() == prompts.fingerprint()


@pytest.mark.parametrize("key", ["source", "heldout"])
def test_a_mistyped_source_names_its_key(two, key):
    wrong = getattr(two, key).replace("jsonl", "josnl")
    with raises(DataError, f"data.{key}") as caught:
        load_source(two.model_copy(update={key: wrong}))
    assert str(caught.value).endswith(f"did you mean {getattr(two, key)!r}?")


# -- documents ---------------------------------------------------------------------------------------------------------


def test_documents_and_a_share_of_them(tmp_path):
    some = [f"document {i}" for i in range(200)]
    source = write(tmp_path / "d.jsonl", [{"text": text} for text in [*some, "", some[0]]])
    train, held = load_texts(DataConfig(source=source, holdout=0.2))
    assert sorted(train + held) == sorted([*some, some[0]]) and not set(train) & set(held)
    assert 15 < len(held) < 70 and train == [text for text in [*some, some[0]] if text in set(train)]
    backwards = write(tmp_path / "e.jsonl", [{"text": text} for text in some[::-1]])
    assert set(load_texts(DataConfig(source=backwards, holdout=0.2))[1]) == set(held)
    assert load_texts(DataConfig(source=source, holdout=0.0))[1] == []


def test_documents_of_text_files(tmp_path):
    (tmp_path / "a.txt").write_text("one\n<|endoftext|>\ntwo")
    (tmp_path / "b.txt").write_text("three")
    assert load_texts(DataConfig(source=str(tmp_path), holdout=0.0)) == (["one", "two", "three"], [])
    assert load_texts(DataConfig(source=f"{tmp_path}/a.txt", heldout=f"{tmp_path}/b.txt")) == (
        ["one", "two"],
        ["three"],
    )


def test_held_out_documents_are_not_trained_on(tmp_path):
    train = write(tmp_path / "a.jsonl", [{"text": t} for t in "abcd"])
    held = write(tmp_path / "b.jsonl", [{"text": t} for t in "bx"])
    assert load_texts(DataConfig(source=train, heldout=held)) == (["a", "c", "d"], ["b", "x"])
    with raises(DataError, "data.heldout"):
        load_texts(DataConfig(source=train, heldout=train))


def test_documents_of_a_task():
    train, held = load_texts(DataConfig(digits=1))
    assert len(train) + len(held) == 100 and "1+2=03" in train + held


@pytest.mark.parametrize(
    ("content", "key"),
    [
        ("", "data.source.documents"),
        ('{"text": ""}\n', "data.source.documents"),
        ('{"text": "a"}\n{"body": "b"}\n', "d.jsonl:2.text.missing"),
        ('{"text": "a"}\n', "data.holdout"),
    ],
)
def test_mistakes_in_documents(tmp_path, content, key):
    (tmp_path / "d.jsonl").write_text(content)
    with raises(DataError, key):
        load_texts(DataConfig(source=str(tmp_path / "d.jsonl"), holdout=1.0))


def test_flows_of_one_file_hold_the_same_records_out(tmp_path):
    """Pre-training, supervised and reinforcement learning, each with its own columns of one file."""
    records = [{"question": f"what is {i}?", "answer": f"it is {i}"} for i in range(200)]
    source = write(tmp_path / "d.jsonl", records)
    asked, unheard = (
        {p.text.strip() for p in side}
        for side in load_source(DataConfig(source=source, columns={"prompt": "question"})).split(0.2)
    )
    assert 20 < len(unheard) < 60
    grpo = load_source(DataConfig(source=source, columns={"prompt": "{question}\n"}))
    assert {p.text.strip() for p in grpo.split(0.2)[1]} == unheard
    for columns in (
        {"text": "{question}\n{answer}"},
        {"text": "Q: {question} A: {answer}"},
        {"prompt": "question", "text": "{answer}: {question}"},
        {"prompt": "{question}\n"},
    ):
        train, held = load_texts(DataConfig(source=source, holdout=0.2, columns=columns))
        assert len(train) == len(asked) and len(held) == len(unheard)
        assert all(any(question in text for question in unheard) for text in held), columns


@pytest.mark.parametrize("task", ["addition", pytest.param("countdown", marks=pytest.mark.slow)])
def test_documents_of_a_task_are_split_as_its_prompts(task):
    data = DataConfig(source=task, digits=2 if task == "addition" else 1, holdout=0.3)
    _, held = load_source(data).split(0.3)
    assert load_texts(data)[1] == [p.text + p.answer for p in held]


def test_white_space_around_a_text_moves_it_nowhere(tmp_path):
    some = [f"document {i}" for i in range(100)]
    plain, spaced = (
        load_texts(DataConfig(source=write(tmp_path / name, [{"text": form.format(t)} for t in some]), holdout=0.4))
        for name, form in (("a.jsonl", "{}"), ("b.jsonl", " {}\n"))
    )
    assert plain[1] == [text.strip() for text in spaced[1]] and plain[1]


def test_a_held_out_question_is_trained_on_in_no_form(tmp_path):
    train = write(tmp_path / "a.jsonl", [{"prompt": f"{t}\n", "answer": "1"} for t in "abc"])
    held = write(tmp_path / "b.jsonl", [{"prompt": "b", "answer": "2"}])
    data = DataConfig(source=train, heldout=held)
    assert load_texts(data) == (["a\n1", "c\n1"], ["b2"])
    assert [p.text for p in load_source(data).split(0.0)[0]] == ["a\n", "c\n"]


def test_conversations_as_documents(tmp_path):
    turns = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    data = DataConfig(source=write(tmp_path / "a.jsonl", [{"messages": turns}]), holdout=0.0)
    with raises(DataError, "a.jsonl:1.template"):
        load_texts(data)
    train, _ = load_texts(data.model_copy(update={"template": "chatml"}))
    assert train == ["<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n"]
    with raises(DataError, "data.tokenizer"):
        load_texts(data.model_copy(update={"template": "model"}))


# -- real files --------------------------------------------------------------------------------------------------------

GSM8K = Path(os.environ.get("TILTH_DATA", Path(__file__).parents[2] / ".." / "shared" / "data")) / "gsm8k"
real = pytest.mark.skipif(
    not (GSM8K / "test.jsonl").is_file(), reason=f"no GSM8K files in {GSM8K}; TILTH_DATA names the folder above"
)


@real
def test_gsm8k():
    data = DataConfig(
        source=str(GSM8K / "train.jsonl"), heldout=str(GSM8K / "test.jsonl"), columns={"prompt": "{question}\n"}
    )
    prompts = load_source(data)
    train, held = prompts.split(0.1)
    assert (len(train), len(held), prompts.copies) == (7473, 1319, 0)
    first = next(iter(train))
    assert first.text.startswith("Natalia sold clips") and first.text.endswith("?\n")
    assert first.answer.endswith("#### 72") and first.info["answer"] == first.answer
    texts, unseen = load_texts(data)
    assert texts[0] == first.text + first.answer and (len(texts), len(unseen)) == (7473, 1319)


@real
def test_gsm8k_without_its_columns():
    with raises(DataError, "train.jsonl:1.prompt.missing") as caught:
        load_source(DataConfig(source=str(GSM8K / "train.jsonl")))
    assert str(caught.value).endswith("try data.columns.prompt=question")


@pytest.mark.slow
def test_a_million_lines(tmp_path):
    with open(tmp_path / "d.jsonl", "w") as file:
        file.writelines(json.dumps({"prompt": f"p{i}", "answer": str(i), "level": i % 5}) + "\n" for i in range(10**6))
    prompts = load_source(DataConfig(source=str(tmp_path / "d.jsonl")))
    train, held = prompts.split(0.1)
    assert len(train) + len(held) == 10**6 and prompts[10**6 - 1].text == "p999999"


def test_common_prompts_are_those_of_equal_text_whatever_the_white_space():
    mine = PromptSet.of(["1+1=", "2+2=\n", "3+3=", "3+3="])
    assert mine.common(PromptSet.of([" 2+2=", "3+3=", "9+9="])) == 3
    assert mine.common(PromptSet.of(["4+4="])) == 0


def test_a_share_that_nobody_set_holds_prompts_out():
    prompts = PromptSet.of([{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(16)])
    least = float(prompts.source.hashes.min()) / 2**32
    recipe = load_recipe("sft")
    found = with_holdout(recipe.replaced("data"), prompts)
    if least < 0.02:
        assert found.told == ()
    else:
        assert 0 < len(prompts.split(found.data.holdout)[1]) < 16 and len(found.told) == 1
    chosen = load_recipe("sft", ["data.holdout=0.0001"])
    assert with_holdout(chosen, prompts) is chosen


def test_equal_samples_that_are_left_out_are_counted():
    records = [{"prompt": str(i % 50), "answer": "x"} for i in range(100)]
    prompts = load_source(DataConfig(deduplicate=True), {"source": records})
    assert len(prompts) == 50 and list(prompts.left_out()) == [
        "50 samples equal an earlier one and are left out (data.deduplicate)"
    ]
    assert pickle.loads(pickle.dumps(prompts)).repeats == 50
    assert not list(load_source(DataConfig(), {"source": records}).left_out())
