"""Calls of tools are read in every notation; a broken one says what is wrong."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilth.envs.calls import ToolCall, message_of, parse_calls

ONE = {"name": "add", "arguments": {"a": 1}}
BODY = json.dumps(ONE)
TEXTS = {
    "hermes": (f"so: <tool_call>\n{BODY}\n</tool_call>", "so:", 1),
    "hermes-two": (f"<tool_call>{BODY}</tool_call><tool_call>{BODY}</tool_call>", "", 2),
    "hermes-open": (f"<tool_call>{BODY}", "", 1),
    "mistral": (f"[TOOL_CALLS] [{BODY}, {BODY}]", "", 2),
    "llama": (json.dumps({"name": "add", "parameters": {"a": 1}}), "", 1),
    "llama-tag": ("<|python_tag|>" + json.dumps({"name": "add", "parameters": {"a": 1}}), "", 1),
    "text-of-arguments": (
        f"<tool_call>{json.dumps({'name': 'add', 'arguments': json.dumps({'a': 1})})}</tool_call>",
        "",
        1,
    ),
}


@pytest.mark.parametrize("name", TEXTS)
def test_every_notation(name):
    text, content, count = TEXTS[name]
    assert parse_calls(text) == (content, [ToolCall("add", {"a": 1})] * count)


@pytest.mark.parametrize(
    "text", ["", "hello", '{"a": 1}', "[1]", '{"name": "add"}', "x {", '{"name": 1, "arguments": {}}']
)
def test_other_texts_are_no_calls(text):
    assert parse_calls(text) == (text, []) and message_of(text) == {"role": "assistant", "content": text}


@pytest.mark.parametrize(
    "body",
    [
        *("", "{", "[]", "7", '{"name": "add"}', '{"name": "add", "arguments": [1]}', "[[]]", "[" * 5000),
        *('{"name": "", "arguments": {}}', r'{"name": "add", "arguments": {"a": "\ud800"}}'),
        *('{"name": "add", "arguments": {"a": NaN}}', '{"name": "add", "arguments": "{\\"a\\": 1e999}"}'),
    ],
)
def test_a_broken_call_says_so(body):
    _, (call,) = parse_calls(f"<tool_call>{body}</tool_call>")
    assert call.problem and not call.arguments


@given(st.text())
def test_any_text_gives_calls_or_none(text):
    for marked in (text, f"<tool_call>{text}", f"[TOOL_CALLS]{text}", f"a<|python_tag|>{text}"):
        content, calls = parse_calls(marked)
        assert isinstance(content, str) and all(isinstance(call.name, str) for call in calls)
        json.dumps(message_of(marked))
