"""Tools have schemas and checked arguments; whatever they do comes back as text."""

import pytest

import tilth
from tests.envs.talkers import Wide
from tests.errors import raises
from tilth.envs import process
from tilth.envs.calls import message_of
from tilth.envs.environment import Environment, name_of
from tilth.envs.process import EnvironmentFault

FUNCTION = {
    "name": "add",
    "description": "Add two integers.",
    "parameters": {
        "additionalProperties": False,
        "properties": {"a": {"title": "A", "type": "integer"}, "b": {"default": 1, "title": "B", "type": "integer"}},
        "required": ["a"],
        "type": "object",
    },
}


def answers(*calls):
    import asyncio

    asyncio.set_event_loop(asyncio.new_event_loop())
    text = "".join(f"<tool_call>{call}</tool_call>" for call in calls)
    return [m["content"] for m in Wide().call_tools(message_of(text))]


def test_schema_of_a_method():
    assert Wide().tools()["add"].schema == {"type": "function", "function": FUNCTION}


def test_calls_are_answered_in_order():
    found = answers('{"name": "add", "arguments": {"a": 2, "b": 3}}', '{"name": "add", "arguments": {"a": "4"}}')
    assert found == ["5", "5"]


@pytest.mark.parametrize(
    "call, says",
    [
        ('{"name": "sub", "arguments": {}}', "no tool 'sub'"),
        ('{"name": "add", "arguments": {}}', "a: Missing"),
        ('{"name": "add", "arguments": {"a": "x"}}', "a: Input should be a valid integer"),
        ('{"name": "add", "arguments": {"a": 1, "c": 2}}', "c: Unexpected"),
        ('{"name": "fall", "arguments": {}}', "KeyError"),
        ('{"name": "loop", "arguments": {}}', "Circular"),
        ('{"name": "fall"', "a tool call is"),
    ],
)
def test_what_is_wrong_is_the_answer(call, says):
    (found,) = answers(call)
    assert found.startswith("error: ") and says in found


def test_bytes_and_megabytes_are_texts():
    assert answers('{"name": "late", "arguments": {}}') == ["café \ufffd"]
    (found,) = answers('{"name": "much", "arguments": {}}')
    assert len(found) < 4100 and "2996000 more characters" in found


def test_a_turn_without_a_call_ends_the_episode():
    assert Wide().step({"role": "assistant", "content": "7"}) == ([], True)
    with pytest.raises(NotImplementedError):
        Wide().reward()


def test_names():
    assert tilth.Environment is Environment
    assert name_of(type("WordGame", (), {})) == "word_game" and name_of(type("A2B", (), {})) == "a2_b"


@pytest.mark.parametrize("reward", [None, "much", float("nan"), {"reward": 1.0, "part": 2.0}, [1.0]])
def test_a_reward_of_a_turn_is_one_finite_number(reward):
    with raises(EnvironmentFault, "environment.step.reward"):
        process._step(([], False, reward))


def test_a_step_may_reward_its_turn():
    assert process._step(("go on", False, 0.5)) == {
        "messages": [{"role": "user", "content": "go on"}], "done": False, "reward": 0.5
    }  # fmt: skip
    assert process._step(("go on", True)) == {"messages": [{"role": "user", "content": "go on"}], "done": True}
    with raises(EnvironmentFault, "environment.step"):
        process._step(("go on", True, 1.0, {}))
