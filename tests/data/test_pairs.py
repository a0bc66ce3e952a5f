"""Pairs of answers: which columns make one, what belongs to one prompt, what is wrong in words, and tokens of both."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.reading import load_pairs, pair_records
from tests.data.test_examples import spaceless_tokenizer
from tests.errors import raises
from tilth.cluster.backends.base import Call
from tilth.cluster.worker.executor import failure
from tilth.config.load import from_dict
from tilth.config.schema import DataConfig
from tilth.core.errors import DataError
from tilth.data.columns import Prompt, RecordError
from tilth.data.examples import answer_only, encode_pairs, pairs_of
from tilth.data.pairs import Pair, check_pairs, recipe_prompts
from tilth.data.prompts import PromptSet, load_source
from tilth.data.template import Example, make_template
from tilth.data.tokenizer import Tokenizer
from tilth.rewards.functions import load_reward
from tilth.tasks.addition import wrong_sum
from tilth.tasks.sorting import wrong_order

ONE = {"prompt": "Is it?", "chosen": "Yes.", "rejected": "No."}


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def write(folder, records, name="pairs.jsonl"):
    file = folder / name
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(file)


# ---- reading ----


def test_tools_are_of_the_prompt_and_not_of_the_answers():
    called = [user("Is it?"), {"role": "assistant", "tool_calls": [{"name": "look", "arguments": {}}]},
              {"role": "tool", "content": "yes"}]  # fmt: skip
    pair = {
        "chosen": [*called, assistant("Yes.")],
        "rejected": [*called, assistant("No.")],
        "known": [{"name": "look"}],
    }
    found = pair_records([pair], {"tools": "known"}).prompt(0)
    assert found.tools == ({"type": "function", "function": {"name": "look"}},) and len(found.messages) == 3
    with raises(DataError, "record 1.rejected.tool_calls"):
        pair_records([{**ONE, "rejected": called[:2]}])


def test_columns_of_jsonl_and_parquet_give_the_same(tmp_path):
    records = [
        {**ONE, "margin": 0.5, "source": "a"},
        {**ONE, "prompt": "So?", "chosen": "x", "rejected": "", "margin": 2.0, "source": "b"},
    ]
    lines = load_pairs(DataConfig(source=write(tmp_path, records)))
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "pairs.parquet")
    table = load_pairs(DataConfig(source=str(tmp_path / "pairs.parquet")))
    for found in (lines, table):
        assert [p.text for p in found] == ["Is it?", "So?"]
        assert [p.answer for p in found] == ["Yes.", "x"]
        assert [pair[:3] for i in (0, 1) for pair in pairs_of(found, i)] == [("Yes.", "No.", 0.5), ("x", "", 2.0)]
    assert lines[0].info["source"] == "a" and lines.fingerprint() == table.fingerprint()
    assert pairs_of(lines, 1)[0].where.endswith("pairs.jsonl:2")


def test_columns_have_the_names_that_the_recipe_gives(tmp_path):
    source = write(tmp_path, [{"q": "a", "best": {"text": "b"}, "worst": "c", "gap": 1.5}])
    columns = {"prompt": "Q: {q}", "chosen": "best.text", "rejected": "worst", "margin": "gap"}
    found = load_pairs(DataConfig(source=source, columns=columns))
    assert found[0].text == "Q: a" and pairs_of(found, 0)[0][:3] == ("b", "c", 1.5)


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": [user("hi")], "chosen": [assistant("x")], "rejected": [assistant("y")]},
        {"prompt": [user("hi")], "chosen": "x", "rejected": "y"},
        {"chosen": [user("hi"), assistant("x")], "rejected": [user("hi"), assistant("y")]},
        {"prompt": "hi", "chosen": [user("hi"), assistant("x")], "rejected": [user("hi"), assistant("y")]},
        {"prompt": [user("hi")], "chosen": [user("hi"), assistant("x")], "rejected": "y"},
    ],
)
def test_lists_of_messages_as_datasets_have_them(record):
    found = pair_records([record])
    assert found.prompt(0).text == "hi" and list(found.prompt(0).messages) == [user("hi")]
    assert found.prompt(0).pairs[0][:2] == ("x", "y")


def test_records_of_one_prompt_are_its_pairs_and_equal_texts_of_other_turns_are_others():
    found = pair_records([ONE, {**ONE, "prompt": "Other?"}, {**ONE, "rejected": "Maybe."}])
    assert [len(found.prompt(i).pairs) for i in range(len(found))] == [2, 1]
    system = {"role": "system", "content": "Be brief."}
    turns = [{**ONE, "prompt": [user("Is it?")]}, {**ONE, "prompt": [system, user("Is it?")]}]
    assert len(pair_records(turns)) == 2


@pytest.mark.parametrize(
    "change, field",
    [
        ({"rejected": ...}, "rejected.missing"),
        ({"rejected": None}, "rejected.null"),
        ({"rejected": "Yes."}, "rejected.same"),
        ({"prompt": ""}, "prompt.empty"),
        ({"chosen": 3}, "chosen.type"),
        ({"chosen": [user("Is it?")]}, "chosen.last"),
        ({"margin": "much"}, "margin.type"),
        ({"margin": float("nan")}, "margin.type"),
        ({"margin": True}, "margin.type"),
        ({"margin": 10**400}, "margin.type"),
        ({"margins": 1}, "margins"),
        ({"chosen": [user("Isn't it?"), assistant("Yes.")]}, "chosen.prompt"),
        (
            {"prompt": ..., "chosen": [user("a"), assistant("b")], "rejected": [user("c"), assistant("d")]},
            "rejected.prompt",
        ),
    ],
)
def test_what_is_wrong_is_told_with_its_place(change, field):
    bad = {key: value for key, value in {**ONE, **change}.items() if value is not ...}
    with raises(DataError, f"record 2.{field}"):
        pair_records([{**ONE, "prompt": "Good?"}, bad])


def test_of_a_file_the_place_is_its_line(tmp_path):
    source = write(tmp_path, [ONE, {**ONE, "rejected": "Yes."}])
    with raises(DataError, "pairs.jsonl:2.rejected.same"):
        load_pairs(DataConfig(source=source))
    with raises(DataError, "record 1.type"):
        pair_records(["text"])
    with raises(DataError, "data"):
        pair_records([])
    with raises(DataError, "data.source"):
        load_pairs(DataConfig(source="additon"))
    with raises(DataError, "data.source.pairs"):
        load_pairs(DataConfig(source="countdown"))
    with raises(DataError, "pairs"):
        pairs_of(PromptSet.of(["a"]), 0)


def test_held_out_are_whole_prompts_and_a_source_of_its_own_keeps_its_pairs(tmp_path):
    records = [{"prompt": f"p{i % 40}", "chosen": f"a{i}", "rejected": "b"} for i in range(80)]
    train, held = load_pairs(DataConfig(source=write(tmp_path, records))).split(0.3)
    assert len(train) + len(held) == 40 and all(len(pairs_of(s, p.index)) == 2 for s in (train, held) for p in s)
    other = write(tmp_path, [{"prompt": "p1", "chosen": "x", "rejected": "y"}], "other.jsonl")
    both = load_pairs(DataConfig(source=write(tmp_path, records), heldout=other))
    train, held = both.split(0.3)
    assert len(train) == 39 and both.copies == 1  # p1 is in both
    assert [pairs_of(held, p.index) for p in held] == [(Pair("x", "y", 0.0, f"{other}:1"),)]


def test_the_alphabet_and_the_fingerprint_know_both_answers():
    assert pair_records([{**ONE, "rejected": "ß"}]).alphabet() == "".join(sorted(set("Is it?Yes.ß")))
    prints = {pair_records([{**ONE, **c}]).fingerprint() for c in ({}, {"rejected": "ß"}, {"margin": 1.0})}
    assert len(prints) == 3


# ---- tasks ----


@pytest.mark.parametrize("name", ["addition", "sorting"])
def test_a_tasks_chosen_answer_is_right_and_the_rejected_one_wrong_and_alike(name):
    found = load_pairs(DataConfig(source=name, digits=2, **({"length": 3} if name == "sorting" else {})))
    reward = load_reward(name)
    for i in range(0, len(found), max(1, len(found) // 200)):
        prompt, (pair,) = found[i], pairs_of(found, i)
        value = [reward(prompt.text, a, prompt.info) for a in (pair.chosen, pair.rejected)]
        right, wrong = (v["reward"] if isinstance(v, dict) else v for v in value)
        assert right == 1 and wrong < 1
        assert pairs_of(found, i) == (pair,)
        if name == "addition":
            apart = [int(a) - int(b) for a, b in zip(pair.chosen, pair.rejected, strict=True) if a != b]
            assert len(apart) == 1 and abs(apart[0]) in (1, 9)


def test_a_tasks_split_is_that_of_the_flows_before():
    data = DataConfig(digits=2)
    mine, theirs = load_pairs(data).split(0.2), load_source(data).split(0.2)
    assert all(np.array_equal(a.rows, b.rows) for a, b in zip(mine, theirs))
    assert load_pairs(data).fingerprint() != load_source(data).fingerprint()


def test_wrong_answers_of_tasks_at_their_edges():
    assert wrong_order(Prompt(0, "7,7=", "7,7")) == "7"
    assert sorted(wrong_order(Prompt(3, "2,1=", "1,2")).split(",")) == ["1", "2"]
    places = {i for n in range(300) for i, (a, b) in enumerate(zip("0999", wrong_sum(Prompt(n, "", "0999")))) if a != b}
    assert places == {0, 1, 2, 3}


def test_a_recipes_flow_says_whether_it_reads_pairs():
    assert recipe_prompts(from_dict({"flow": "dpo", "supervised": {"steps": 1}}))[0].pairs
    assert not recipe_prompts(from_dict({"flow": "sft", "supervised": {"steps": 1}}))[0].pairs


# ---- tokens ----


def test_both_answers_begin_with_the_very_tokens_of_the_prompt_and_end_with_its_end():
    prompts = load_pairs(DataConfig(digits=1))
    template = make_template("", Tokenizer.characters(prompts.alphabet()))
    asked = template.prompts([prompts[i] for i in (3, 47)])
    for ids, one in zip(asked, encode_pairs(prompts, [3, 47], template, 16), strict=True):
        for example, answer in ((one.chosen, 0), (one.rejected, 1)):
            text = pairs_of(prompts, one.prompt)[0][answer]
            assert example.tokens[: len(ids)].tolist() == ids
            assert example.mask.tolist() == [0] * len(ids) + [1] * (len(text) + 1)
            assert example.tokens[-1] == template.stops[0]


def test_of_a_conversation_only_the_last_turn_counts():
    talk = [user("a"), assistant("b"), user("c")]
    prompts = PromptSet(pair_records([{"prompt": talk, "chosen": "dd", "rejected": "e"}]))
    tokenizer = Tokenizer.train(["<|im_start|>user\nabcde<|im_end|>\nassistant"] * 3, 300)
    template = make_template("chatml", tokenizer)
    (one,) = encode_pairs(prompts, [0], template, 200)
    for example, text in ((one.chosen, "dd"), (one.rejected, "e")):
        said = tokenizer.decode(example.tokens[example.mask == 1], special=True)
        assert said == f"{text}<|im_end|>" and example.mask[-1] == 1


def test_answer_only_keeps_the_last_run():
    mask = np.array([0, 1, 1, 0, 0, 1, 1, 0], np.uint8)
    assert answer_only(Example(np.arange(8), mask)).mask.tolist() == [0, 0, 0, 0, 0, 1, 1, 0]
    whole = np.ones(3, np.uint8)
    assert answer_only(Example(np.arange(3), whole)).mask.tolist() == [1, 1, 1]


def test_what_does_not_fit_the_context_is_named_with_its_side():
    prompts = PromptSet(pair_records([ONE, {**ONE, "prompt": "Why?", "rejected": "No. " * 9}]))
    template = make_template("", Tokenizer.characters(prompts.alphabet()))
    assert check_pairs(prompts, template, 64) == 41
    with raises(DataError, "record 2, rejected.tokens"):
        check_pairs(prompts, template, 40)


def test_of_many_pairs_those_with_the_longest_answer_are_checked(monkeypatch):
    monkeypatch.setattr("tilth.data.examples._CHECKED", 1)
    long, short = {**ONE, "prompt": "Why" * 9}, {**ONE, "prompt": "?"}
    prompts = PromptSet(pair_records([long, {**ONE, "rejected": "No. " * 15}, short]))
    assert check_pairs(prompts, make_template("", Tokenizer.characters(prompts.alphabet())), 99) == 67


def test_a_prompt_without_tokens_is_named(monkeypatch, tmp_path):
    template = make_template("", spaceless_tokenizer(tmp_path, "yesnow"))
    answers = {"chosen": "yes", "rejected": "no"}
    prompts = PromptSet(pair_records([{"prompt": text, **answers} for text in ("now now", " ", "now")]))
    for _ in range(2):
        with raises(DataError, "record 2, chosen.empty"):
            check_pairs(prompts, template, 64)
        monkeypatch.setattr("tilth.data.examples._CHECKED", 1)  # of a large set too


def test_an_error_of_a_record_travels_between_processes():
    again = failure(RecordError.at("no text", "d/d.jsonl:8", key="prompt")).error(Call("loader", "examples"), 0)
    assert (type(again), again.key) == (RecordError, "d.jsonl:8.prompt") and "d/d.jsonl:8: no text" in str(again)
