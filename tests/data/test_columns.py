"""Columns, paths and patterns; conversations; each mistake with its place and what would be right."""

import json
from collections import deque
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.errors import raises
from tilth.core.errors import DataError
from tilth.core.media import MediaItem
from tilth.data.columns import Prompt, messages, plain, to_document, to_prompt

USER = {"role": "user", "content": "2+2?"}
TOLD = {"role": "assistant", "content": "4"}
SYSTEM = {"role": "system", "content": "Be short."}


def of(record, **columns):
    return to_prompt(record, 7, "d.jsonl:8", columns)


def fails(record, key, **columns):
    with raises(DataError, key) as caught:
        to_prompt(record, 7, "folder/d.jsonl:8", columns)
    message = str(caught.value)
    assert message.startswith("folder/d.jsonl:8") and "\n" not in message
    return message


# -- columns -----------------------------------------------------------------------------------------------------------


def test_columns_of_the_very_name_need_no_word():
    assert of({"prompt": "p", "answer": "a", "n": 1}) == Prompt(7, "p", "a", {"answer": "a", "n": 1})
    assert of({"prompt": "p"}) == Prompt(7, "p", None, {})


def test_columns_by_name():
    record = {"question": "q", "solution": "s", "n": 1}
    assert of(record, prompt="question", answer="solution") == Prompt(
        7, "q", "s", {"solution": "s", "n": 1, "answer": "s"}
    )
    assert of(record, prompt="question").answer is None
    assert of({**record, "answer": "other"}, prompt="question", answer="solution").info["answer"] == "s"


def test_a_named_prompt_goes_before_messages():
    record = {"prompt": "p", "question": "q", "messages": [USER]}
    assert (of(record).text, of(record, prompt="question").text) == ("p", "q")
    assert of(record, messages="messages").text == "2+2?"


def test_a_pattern_of_columns():
    record = {"question": "q", "n": 2, "xs": [1, "é"], "b": b"ok", "answer": 7}
    prompt = of(record, prompt="Q: {question} ({n}, {xs}, {b})\nA:", answer="{answer}")
    assert prompt.text == 'Q: q (2, [1, "é"], ok)\nA:' and prompt.answer == "7"
    assert prompt.info == {**record, "answer": "7"}
    fails({"question": None}, "d.jsonl:8.question.null", prompt="{question}\n")
    message = fails({"question": "q"}, "d.jsonl:8.qestion.missing", prompt="{qestion}\n")
    assert message.endswith("try data.columns.prompt=question")


def test_a_path_into_an_object():
    record = {"prompt": "p", "reward_model": {"style": "rule", "ground_truth": "42"}, "a.b": "dotted"}
    assert of(record, answer="reward_model.ground_truth").answer == "42"
    assert of(record, answer="a.b").answer == "dotted"  # a column of that very name goes first
    message = fails(record, "d.jsonl:8 in reward_model.truth.missing", answer="reward_model.truth")
    assert "'style', 'ground_truth'" in message
    message = fails(record, "d.jsonl:8 in reward_model.ground_trut.missing", answer="reward_model.ground_trut")
    assert message.endswith("try data.columns.answer=reward_model.ground_truth")


@pytest.mark.parametrize(
    ("record", "columns", "field", "hint"),
    [
        ([1], {}, "type", ""),
        ({}, {}, "prompt.missing", "there is none"),
        ({"question": 1, "x": 2}, {}, "prompt.missing", "there is 'question', 'x'; try data.columns.prompt=question"),
        ({"promt": 1}, {}, "prompt.missing", "try data.columns.prompt=promt"),
        ({"conversations": []}, {}, "prompt.missing", "try data.columns.messages=conversations"),
        ({"zzz": 1}, {}, "prompt.missing", "try data.columns.prompt=NAME"),
        ({"prompt": "p", "answr": 1}, {"answer": "anser"}, "anser.missing", "try data.columns.answer=answr"),
        ({"prompt": 3}, {}, "prompt.type", '"{prompt}" makes it one'),
        ({"prompt": ""}, {}, "prompt.empty", ""),
        ({"prompt": None}, {}, "prompt.type", ""),
        ({"prompt": "p", "answer": 7}, {}, "answer.type", '"{answer}" makes it one'),
        ({"prompt": "p", "answer": ["a"]}, {}, "answer.type", ""),
        ({"prompt": "\ud800"}, {}, "prompt.unicode", ""),
        ({"prompt": "p", "answer": "\udfff"}, {}, "answer.unicode", ""),
        ({"prompt": "p", "x": "\udfff"}, {"prompt": "{x}"}, "x.unicode", ""),
        ({"prompt": b"\xff"}, {}, "prompt.utf8", ""),
    ],
)
def test_mistakes(record, columns, field, hint):
    assert fails(record, f"d.jsonl:8.{field}", **columns).endswith(hint)


def test_bytes_are_text_where_text_is_meant():
    assert of({"prompt": "é".encode(), "answer": b"a"}).text == "é"


def test_many_columns_and_long_values_are_cut():
    assert len(fails({f"column{i}": 1 for i in range(1000)}, "d.jsonl:8.prompt.missing")) < 400
    assert len(fails({"prompt": ["x" * 10_000]}, "d.jsonl:8.prompt[0].type")) < 250


# -- conversations -----------------------------------------------------------------------------------------------------


def test_the_last_turn_of_the_assistant_is_the_answer():
    record = {"messages": [SYSTEM, USER, TOLD], "n": 1}
    assert of(record) == Prompt(7, "Be short.\n\n2+2?", "4", {"n": 1, "answer": "4"}, (SYSTEM, USER, TOLD))
    turns = [USER, TOLD, {"role": "user", "content": "3+3?"}, {"role": "assistant", "content": "6"}]
    assert (of({"messages": turns}).text, of({"messages": turns}).answer) == ("2+2?\n\n4\n\n3+3?", "6")


def test_without_such_a_turn_the_answer_is_the_column():
    assert of({"messages": [USER], "answer": "4"}) == Prompt(7, "2+2?", "4", {"answer": "4"}, (USER,))
    assert of({"messages": [USER]}) == Prompt(7, "2+2?", None, {}, (USER,))


def test_a_column_beside_the_turn_is_what_the_reward_is_given():
    prompt = of({"messages": [USER, {"role": "assistant", "content": "It is 4."}], "answer": "4"})
    assert (prompt.answer, prompt.info) == ("It is 4.", {"answer": "4"})


def test_a_prompt_of_turns_as_other_trainers_have_it():
    assert of({"prompt": [USER], "reward_model": {"ground_truth": "4"}}, answer="reward_model.ground_truth") == Prompt(
        7, "2+2?", "4", {"reward_model": {"ground_truth": "4"}, "answer": "4"}, (USER,)
    )


def test_a_table_of_turns():
    assert messages({"role": ["user", "assistant"], "content": ["2+2?", "4"]}, "x") == (USER, TOLD)


def test_what_else_a_turn_has_is_left_out():
    assert messages([{**USER, "name": None, "weight": 1, "tool_calls": None}], "x") == (USER,)


@pytest.mark.parametrize(
    ("turns", "field"),
    [
        ("text", "messages.type"),
        ([], "messages.type"),
        (None, "messages.type"),
        (["text"], "messages[0].type"),
        ([{"role": "user"}], "messages[0].type"),
        ([{"from": "human", "value": "x"}], "messages[0].type"),
        ([USER, {"role": "bot", "content": "x"}], "messages[1].role"),
        ([{"role": None, "content": "x"}], "messages[0].role"),
        ([{"role": ["user"], "content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": None}], "messages[0].content.type"),
        ([{"role": "user", "content": [{"type": "image"}]}], "messages[0].content.type"),
        ([{"role": "user", "content": "\ud800"}], "messages[0].content.unicode"),
        ([{**USER, "tool_calls": [{}]}], "messages[0].tool_calls"),
        ([TOLD, USER], "messages.first"),
        ([SYSTEM], "messages.user"),
        ([USER, SYSTEM], "messages.last"),
        ([{"role": "user", "content": ""}, TOLD], "messages.empty"),
    ],
)
def test_mistakes_in_messages(turns, field):
    fails({"messages": turns}, f"d.jsonl:8.{field}")


# -- tools -------------------------------------------------------------------------------------------------------------

ADD = {"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {"a": {"default": None}}}}
WRAPPED = {"type": "function", "function": ADD}


def call(arguments, **more):
    return {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "add", **arguments}}], **more}


@pytest.mark.parametrize(
    "arguments",
    [{"a": 1, "b": [None, {}]}, {"a": 1, "b": [None, {"c": None}], "d": None}, '{"a": 1, "b": [null, {}]}'],
)
def test_calls_in_the_forms_of_other_trainers_are_one(arguments):
    wanted = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": [None, {}]}}}
    bare = {"role": "assistant", "content": None, "tool_calls": [{"name": "add", "arguments": arguments}]}
    for turn in (call({"arguments": arguments}), call({"arguments": arguments}, content=""), bare):
        (found,) = messages([USER, turn], "x")[1]["tool_calls"]
        assert {k: v for k, v in found.items() if k != "id"} == wanted and len(found["id"]) == 9


def test_a_null_in_json_is_an_argument():
    (found,) = messages([USER, call({"arguments": '{"a": null}'})], "x")[1]["tool_calls"]
    assert found["function"]["arguments"] == {"a": None}
    assert messages([USER, call({})], "x")[1]["tool_calls"][0]["function"]["arguments"] == {}


def test_the_answer_of_a_tool_names_its_call():
    calls = [{"id": f"call_{n}", "function": {"name": n, "arguments": "{}"}} for n in ("one", "two", "three")]
    said = [{"role": "tool", "tool_call_id": "call_two", "content": "2"}, {"role": "tool", "content": "1"},
            {"role": "tool", "name": "own", "content": "3"}]  # fmt: skip
    _, _, *found = messages([USER, {"role": "assistant", "content": "", "tool_calls": calls}, *said], "x")
    assert [turn["name"] for turn in found] == ["two", "one", "own"]
    assert [turn["tool_call_id"] for turn in found] == ["call_two", "call_one", "call_three"]


@pytest.mark.parametrize("tools", [[WRAPPED], [ADD], json.dumps([WRAPPED]), json.dumps([ADD])])
def test_tools_of_a_record(tools):
    prompt = of({"messages": [USER, TOLD], "tools": tools})
    assert prompt.tools == (WRAPPED,) and prompt.info["tools"] == tools
    table = {"type": "function", "strict": None, "function": {**ADD, "returns": None}}
    assert of({"messages": [USER, TOLD], "functions": [table]}, tools="functions").tools == (WRAPPED,)
    assert of({"messages": [USER, TOLD], "tools": None}).tools == of({"messages": [USER]}).tools == ()
    assert of({"prompt": "2+2?", "tools": "hammer"}).tools == ()


@pytest.mark.parametrize(
    ("record", "field"),
    [
        ({"tools": "hammer"}, "tools.type"),
        ({"tools": 7}, "tools.type"),
        ({"tools": [ADD, {"type": "function"}]}, "tools[1].type"),
        ({"messages": [USER, call({}), {"role": "assistant", "tool_calls": 7}]}, "messages[2].tool_calls.type"),
        ({"messages": [USER, call({"name": ""})]}, "messages[1].tool_calls[0].type"),
        ({"messages": [USER, call({"arguments": "{"})]}, "messages[1].tool_calls[0].arguments"),
        ({"messages": [USER, call({"arguments": "[1]"})]}, "messages[1].tool_calls[0].arguments"),
        ({"messages": [USER, call({"arguments": 7})]}, "messages[1].tool_calls[0].arguments"),
    ],
)
def test_mistakes_in_tools(record, field):
    fails({"messages": [USER, TOLD], **record}, f"d.jsonl:8.{field}")


def test_an_episode_begins_with_what_is_asked_not_with_the_whole_transcript():
    prompt = of({"messages": [SYSTEM, USER, call({}), {"role": "tool", "content": "4"}, TOLD]})
    assert json.loads(prompt.episode)["messages"] == [SYSTEM, USER]
    assert json.loads(prompt.episode)["prompt"] == f"{SYSTEM['content']}\n\n{USER['content']}"


# -- documents ---------------------------------------------------------------------------------------------------------


def key(document):
    """What decides on the side of a document in a split."""
    return Prompt(0, document.prompt or document.text, whole=document.text).key


def test_documents():
    assert to_document({"text": "t", "prompt": "p"}, "x", {}).text == "t"
    assert to_document({"content": "c"}, "x", {"text": "content"}).text == "c"
    assert to_document({"q": "a", "r": "b"}, "x", {"text": "{q}\n{r}"}).text == "a\nb"
    assert to_document({"prompt": "2+2=", "answer": "4"}, "x", {}).text == "2+2=4"
    assert to_document({"prompt": "2+2="}, "x", {}).text == "2+2="
    assert to_document({"question": "q", "answer": "4"}, "x", {"prompt": "{question}\n"}).text == "q\n4"
    said = to_document(
        {"messages": [SYSTEM, USER, TOLD]}, "x", {}, lambda p: "/".join(m["content"] for m in p.messages)
    )
    assert said == ("Be short./2+2?/4", "Be short.\n\n2+2?")
    assert to_document({"text": ""}, "x", {}).text == ""


def test_documents_are_split_by_the_prompt_that_other_flows_read():
    both = {"question": " 2+2? ", "answer": "4", "n": 1}
    keys = [
        to_document({"prompt": "2+2?\n", "answer": "4"}, "x", {}),
        to_document({"prompt": "2+2?", "text": "2+2? 4"}, "x", {}),
        to_document(both, "x", {"text": "{question}\n{answer}", "prompt": "{question}\n"}),
        to_document(both, "x", {"text": "{question}\n{answer}"}),
        to_document(both, "x", {"text": "Q: {question}\nA: {answer} ({n})"}),
        to_document({"q": "2+2?", "a": "4"}, "x", {"text": "{q} {a}", "answer": "a"}),
        to_document({"text": "2+2? 4", "messages": [USER, TOLD]}, "x", {}),
        to_document({"messages": [USER, TOLD]}, "x", {}, str),
    ]
    assert {key(one) for one in keys} == {"2+2?"}


def test_documents_without_a_prompt_are_split_by_their_text():
    assert to_document({"text": " t\n"}, "x", {}) == (" t\n", "") and key(to_document({"text": " t\n"}, "x", {})) == "t"
    assert key(to_document({"q": "a", "r": "b"}, "x", {"text": "{q}\n{r}"})) == "a\nb"
    assert key(to_document({"answer": "4", "n": 3}, "x", {"text": "{answer} {n}"})) == "4 3"
    assert key(to_document({"text": "t", "prompt": None}, "x", {})) == "t"


def test_a_prompt_is_called_by_its_place():
    assert (
        of({"prompt": "p"}).name == of({"messages": [USER]}).where == "d.jsonl:8" and Prompt(3, "p").name == "prompt 3"
    )


@pytest.mark.parametrize(
    ("record", "columns", "key", "hint"),
    [
        ({"messages": [USER, TOLD]}, {}, "x.template", "set data.template=chatml or a file"),
        (
            {"question": "q", "answer": "a"},
            {"text": "wrong"},
            "x.wrong.missing",
            """try data.columns.text='"{question}\\n{answer}"', a pattern of columns""",
        ),
        ({"zz": "q", "yy": "a"}, {"text": "w"}, "x.w.missing", """data.columns.text='"{zz}"', a pattern of columns"""),
        (
            {"meta": {"zz": "q"}},
            {"text": "meta.w"},
            "x in meta.w.missing",
            """data.columns.text='"{meta.zz}"', a pattern of columns""",
        ),
        ({"content": "c"}, {}, "x.text.missing", "there is 'content'; try data.columns.text=content"),
        ({"text": 3}, {}, "x.text.type", '"{text}" makes it one'),
        ({"text": "\ud800"}, {}, "x.text.unicode", ""),
        (["text"], {}, "x.type", ""),
        ({"prompt": "p"}, {"text": "body"}, "x.body.missing", ""),
    ],
)
def test_mistakes_in_documents(record, columns, key, hint):
    with raises(DataError, key) as caught:
        to_document(record, "x", columns)
    assert str(caught.value).endswith(hint)


# -- plain -------------------------------------------------------------------------------------------------------------

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


@given(values)
def test_what_is_json_already_stays_as_it_is(value):
    assert plain(value) == value


@given(st.dictionaries(st.text(), values | st.binary() | st.dates() | st.decimals() | st.tuples(st.integers())))
def test_everything_becomes_json(value):
    assert json.loads(json.dumps(plain(value))) == plain(value)


def test_a_flat_record_is_not_copied():
    record = {"a": 1, "b": "x", "c": None}
    assert plain(record) is record


@dataclass
class Holder:
    held: object


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ((i for i in ()), "generator"),
        (lambda: 1, "function"),
        (object().__init__, "method-wrapper"),
        (deque([object()]), "deque"),
        (Holder(object()), "Holder"),
        (compile("1", "<string>", "eval"), "code"),
        (torch.eye(2).to_sparse(), "Tensor"),
    ],
)
def test_what_has_no_text_of_its_own_is_refused_with_its_place(value, kind):
    with raises(DataError, f"d.jsonl:8.type.{kind}") as caught:
        plain({"a": [value]}, "data/d.jsonl:8")
    assert str(caught.value).startswith("data/d.jsonl:8: ")


def test_a_text_may_speak_of_an_address():
    text = type("Text", (str,), {})("<it at 0x7f>")
    assert plain([text, Holder("x"), deque([1])]) == ["<it at 0x7f>", "Holder(held='x')", "deque([1])"]


def test_times_of_numpy_are_texts_and_long_numbers_are_numbers():
    at = "2020-01-01T00:00:00.000000001"
    days = np.array([["2020-01-01"], ["2020-01-02"]], "M8[ns]")
    assert plain([np.datetime64(at), np.array(at, "M8[ns]")]) == [at, at]
    assert plain(days) == [["2020-01-01T00:00:00.000000000"], ["2020-01-02T00:00:00.000000000"]]
    assert plain(np.timedelta64(3, "ns")) == "3 nanoseconds"
    assert plain([np.longdouble(1.5), np.array([0.5], "longdouble")]) == [1.5, [0.5]]
    assert plain(np.clongdouble(1 + 2j)) == "(1+2j)"


# -- media -------------------------------------------------------------------------------------------------------------


def test_media_items_belong_to_a_prompt_and_to_its_key_and_other_columns_of_that_name_do_not():
    item = MediaItem("eye", 0, 2, b"12")
    found = of({"prompt": "p", "answer": "a", "media": [item]})
    assert found == Prompt(7, "p", "a", {"answer": "a"}, media=(item,))
    keys = {found.key, of({"prompt": "p", "media": [item._replace(data=b"13")]}).key, of({"prompt": "p"}).key}
    assert len(keys) == 3
    assert of({"prompt": "p", "media": ["BBC"]}).info == {"media": ["BBC"]}


def test_a_record_with_media_is_no_document():
    with raises(DataError, "d.jsonl:8.media"):
        to_document({"prompt": "p", "media": (MediaItem("eye", 0, 1, b"1"),)}, "d.jsonl:8", {})
