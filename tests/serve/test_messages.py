"""The unmodified client of Anthropic over ``/v1/messages``, beside the chat completion that asks for the same."""

import json
from functools import cache

import httpx
import pytest
from pydantic import BaseModel, TypeAdapter

from tests.serve.servers import WEATHER, client_of, model_folder, raw, running
from tilth.envs.calls import ToolCall
from tilth.serve.anthropic import MessagesBody
from tilth.serve.errors import HttpError, read
from tilth.serve.schemas import plain

anthropic = pytest.importorskip("anthropic", reason="the client anthropic is not installed (pip install anthropic)")

FUNCTION = WEATHER["function"]
TOOL = {"name": "weather", "description": FUNCTION["description"], "input_schema": FUNCTION["parameters"]}
HELLO = [{"role": "user", "content": "How are you?"}]
INPUT = {"city": "Oslo", "days": 1}
IDS = {"return_token_ids": True}
ZERO = {"extra_body": {"temperature": 0, **IDS}}
"""Fields that the client has no argument for."""


@cache
def events_schema():
    """Made once: it takes a tenth of a second."""
    return TypeAdapter(anthropic.types.RawMessageStreamEvent)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return model_folder(tmp_path_factory.mktemp("served"), tools=True, context=512)


@pytest.fixture(scope="module")
def address(model):
    with running(model) as (_, found):
        yield found


def claude(address, key="none", **more):
    return anthropic.Anthropic(base_url=address.removesuffix("/v1"), **{"api_key": key, **more}, max_retries=0)


@pytest.fixture(scope="module")
def client(address):
    with claude(address) as made:
        yield made


@pytest.fixture(scope="module")
def chat(address):
    with client_of(address) as made:
        yield made.chat.completions


def streamed(address, **body):
    """Events of a stream, each as its schema has it, under its name."""
    with httpx.stream("POST", f"{address}/messages", json={**body, "stream": True}, timeout=60) as found:
        lines = [line for line in found.iter_lines() if line]
    names, data = lines[::2], [json.loads(line.removeprefix("data: ")) for line in lines[1::2]]
    assert names == [f"event: {one['type']}" for one in data]
    for one in data if data[-1]["type"] != "error" else data[:-1]:
        events_schema().validate_python(one)
    return data


def lasting(message):
    """A message without what differs from one request to the next."""
    blocks = [{k: v for k, v in block.items() if k != "id"} for block in message["content"]]
    return {**message, "id": "", "content": blocks}


def test_a_message_is_the_answer_of_a_chat_completion(client, chat, model):
    asked = {"model": model, "max_tokens": 20, **ZERO}
    said = chat.create(**asked, messages=[{"role": "system", "content": "so"}, *HELLO])
    for system, content in (
        ("so", "How are you?"),
        ([{"type": "text", "text": "s"}, {"type": "text", "text": "o"}], [{"type": "text", "text": "How are you?"}]),
    ):
        found = client.messages.create(**asked, system=system, messages=[{"role": "user", "content": content}])
        assert found.prompt_token_ids == said.prompt_token_ids and found.token_ids == said.choices[0].token_ids
        (block,) = found.content
        assert block.text == said.choices[0].message.content
        assert (found.usage.input_tokens, found.usage.output_tokens) == (said.usage.prompt_tokens, 20)
    assert (found.stop_reason, found.stop_sequence, found.role, found.type) == (
        "max_tokens",
        None,
        "assistant",
        "message",
    )


def test_a_conversation_with_calls_has_the_prompt_of_a_chat_completion(client, chat, model):
    function = {"name": "weather", "arguments": json.dumps(INPUT)}
    calls = [{"id": f"call_{i}", "type": "function", "function": function} for i in range(2)]
    said_by_tools = zip(("12", "error: no wind"), calls)
    results = [{"role": "tool", "content": text, "tool_call_id": call["id"]} for text, call in said_by_tools]
    said = {"role": "assistant", "content": "so: ", "tool_calls": calls}
    asked = {"model": model, "max_tokens": 8, **ZERO}
    other = chat.create(**asked, messages=[*HELLO, said, *results, *HELLO, *HELLO], tools=[WEATHER])
    uses = [{"type": "tool_use", "id": call["id"], "name": "weather", "input": INPUT, "caller": None} for call in calls]
    mark = {"cache_control": {"type": "ephemeral"}}
    text = {"type": "text", "text": HELLO[0]["content"]}
    back = [
        {"type": "tool_result", "tool_use_id": "call_0", "content": [{"type": "text", "text": "12"}], **mark},
        {"type": "tool_result", "tool_use_id": "call_1", "is_error": True, "content": "no wind"},
        {**text, "citations": None},
    ]
    messages = [
        *HELLO,
        {"role": "assistant", "content": [{"type": "text", "text": "so: "}, *uses]},
        {"role": "user", "content": back},
        {"role": "user", "content": [text]},
    ]
    found = client.messages.create(**asked, messages=messages, tools=[{**TOOL, **mark}])
    assert found.prompt_token_ids == other.prompt_token_ids and found.token_ids == other.choices[0].token_ids
    counted = client.messages.count_tokens(model=model, messages=messages, tools=[TOOL])
    assert counted.input_tokens == len(found.prompt_token_ids) == found.usage.input_tokens
    none = client.messages.count_tokens(model=model, messages=messages, tools=[TOOL], tool_choice={"type": "none"})
    assert none.input_tokens < counted.input_tokens


def test_a_call_goes_back_with_its_result(client, model):
    asked = {"model": model, "tools": [TOOL], "max_tokens": 60, **ZERO}
    first = client.messages.create(**asked, messages=HELLO, tool_choice={"type": "tool", "name": "weather"})
    (call,) = first.content
    assert (first.stop_reason, call.type, call.name) == ("tool_use", "tool_use", "weather")
    assert call.input["city"] in ("Oslo", "Rome")
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "12"}]}
    for content in (first.content, [block.model_dump() for block in first.content]):
        said = {"role": "assistant", "content": content}
        second = client.messages.create(**{**asked, "max_tokens": 4}, messages=[*HELLO, said, result])
        assert second.usage.input_tokens > first.usage.input_tokens and second.content[0].type == "text"


@pytest.mark.parametrize(
    "more",
    [{}, {"tools": [TOOL], "tool_choice": {"type": "any"}}, {"tools": [TOOL]}],
)
def test_a_stream_ends_in_the_message(address, client, model, more):
    asked = {"model": model, "messages": HELLO, "max_tokens": 60, "temperature": 0, **more}
    whole = raw(address, "/v1/messages", **asked, **IDS)[1]
    anthropic.types.Message.model_validate(whole)
    events = streamed(address, **asked, **IDS)
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"] and kinds[-2:] == ["message_delta", "message_stop"]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == len(whole["content"])
    start, end = events[0]["message"], events[-2]
    assert start["content"] == [] and start["stop_reason"] is None and start["usage"]["output_tokens"] == 0
    assert start["usage"]["input_tokens"] == whole["usage"]["input_tokens"] and end["usage"] == whole["usage"]
    assert (start["prompt_token_ids"], end["token_ids"]) == (whole["prompt_token_ids"], whole["token_ids"])
    with client.messages.stream(model=model, messages=HELLO, max_tokens=60, **more, **ZERO) as stream:
        found = stream.get_final_message().model_dump(exclude_unset=True)
    assert found["prompt_token_ids"] == whole["prompt_token_ids"]
    assert {k: v for k, v in lasting(found).items() if k in whole} == {
        k: v for k, v in lasting(whole).items() if k != "token_ids"
    }


def test_text_before_calls_is_a_block_of_its_own(address, model, monkeypatch):
    two = [ToolCall("weather", {"city": city}) for city in ("Oslo", "Rome")]
    monkeypatch.setattr("tilth.serve.choices.split_turn", lambda *_: ("so", two))
    monkeypatch.setattr("tilth.serve.choices.before_calls", lambda text: "")
    asked = {"model": model, "messages": HELLO, "tools": [TOOL], "max_tokens": 2, "temperature": 0}
    whole = raw(address, "/v1/messages", **asked)[1]
    text, *calls = whole["content"]
    assert text == {"type": "text", "text": "so"} and [call["input"] for call in calls] == [c.arguments for c in two]
    events = streamed(address, **asked)
    begun = [event["content_block"]["type"] for event in events if event["type"] == "content_block_start"]
    assert begun == ["text", "tool_use", "tool_use"]
    assert [e["index"] for e in events if e["type"] == "content_block_stop"] == [0, 1, 2]
    one = raw(address, "/v1/messages", **asked, tool_choice={"type": "auto", "disable_parallel_tool_use": True})[1]
    assert [block["type"] for block in one["content"]] == ["text", "tool_use"]


def test_a_stop_sequence_is_named(client, chat, model):
    asked = {"model": model, "messages": HELLO, "max_tokens": 20, **ZERO}
    text = client.messages.create(**asked).content[0].text
    stop = text[5:7]
    found = client.messages.create(**asked, stop_sequences=["#never#", stop])
    assert (found.stop_reason, found.stop_sequence) == ("stop_sequence", stop)
    said = chat.create(**asked, stop=["#never#", stop]).choices[0]
    assert (said.finish_reason, said.stop_reason) == ("stop", stop)
    assert [block.text for block in found.content] == [text[: text.index(stop)]]
    with client.messages.stream(**asked, stop_sequences=["#never#", stop]) as stream:
        assert stream.get_final_message().stop_sequence == stop


class Number(BaseModel):
    n: bool


def test_a_schema_is_followed(client, model):
    found = client.messages.parse(model=model, messages=HELLO, output_format=Number, max_tokens=60)
    assert isinstance(found.parsed_output, Number)


def test_fields_that_change_nothing_are_taken(client, model):
    asked = {"model": model, "messages": HELLO, "max_tokens": 8, **ZERO}
    more = {"metadata": {"user_id": "me"}, "service_tier": "auto", "thinking": {"type": "disabled"}, "tools": []}
    found = client.messages.create(**asked, **more, tool_choice={"type": "auto"}, stop_sequences=[])
    assert found.content == client.messages.create(**asked).content
    beta = client.beta.messages.create(**asked, betas=["any-2025-01-01"])
    assert beta.content[0].text == found.content[0].text


def test_an_error_in_a_stream_is_its_last_event(address, model):
    form = {"format": {"type": "json_schema", "schema": {"type": 1}}}  # which the engine refuses
    events = streamed(address, model=model, messages=HELLO, max_tokens=8, output_config=form)
    assert (events[-1]["type"], events[-1]["error"]["type"]) == ("error", "invalid_request_error")
    assert events[-1]["error"]["param"] == "output_config.format"


def of(*blocks, role="user"):
    return {"messages": [*HELLO, {"role": role, "content": [*blocks]}, *HELLO]}


USE, RESULT = {"type": "tool_use", "id": "1", "name": "a", "input": {}}, {"type": "tool_result", "tool_use_id": "1"}
WRONG = [
    ({"messages": []}, "messages"),
    ({"messages": [*HELLO, {"role": "assistant", "content": "I"}]}, "messages"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 600}, "max_tokens"),
    ({"messages": HELLO * 99}, "messages"),
    ({"stop": ["a"]}, "stop"),
    ({"stop_sequences": [""]}, "stop_sequences.0"),
    ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
    ({"system": [{"type": "image"}]}, "system.0.type"),
    (of({"type": "image", "source": {}}), "messages.1.content.0"),
    (of(RESULT), "messages"),
    (of(USE), "messages.1.content"),
    (of(RESULT, role="assistant"), "messages.1.content"),
    (of({**RESULT, "content": [{"type": "image"}]}), "messages.1.content.0.content.0.type"),
    (of({"type": "thinking", "thinking": "", "signature": ""}, role="assistant"), "messages.1.content.0"),
    (of({**USE, "input": "{}"}, role="assistant"), "messages.1.content.0.input"),
    ({"tools": [{**TOOL, "type": "web_search_20250305"}]}, "tools.0.type"),
    ({"tools": [{"name": "a"}]}, "tools.0.input_schema"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "b"}}, "tool_choice"),
    ({"output_config": {"effort": "low"}}, "output_config.effort"),
    ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
]


@pytest.mark.parametrize("body, param", WRONG)
def test_what_is_wrong_is_named(address, model, body, param):
    status, said = raw(address, "/v1/messages", **{"model": model, "messages": HELLO, "max_tokens": 4, **body})
    assert (status, said["type"], said["error"]["type"]) == (400, "error", "invalid_request_error")
    assert said["error"]["param"] == param, said
    assert said["error"]["message"].count("{") == said["error"]["message"].count("}")


def test_errors_have_anthropics_form(model, address, client):
    with pytest.raises(anthropic.NotFoundError) as caught:
        client.messages.create(model="other", messages=HELLO, max_tokens=4)
    assert caught.value.body["error"]["type"] == "not_found_error"
    assert raw(address, "/v1/messages/batches")[1]["error"]["type"] == "not_found_error"
    long = httpx.post(f"{address}/messages", content=b" " * (9 << 20))
    assert (long.status_code, long.json()["error"]["type"]) == (413, "request_too_large")


@pytest.mark.parametrize("given", [{}, {"api_key": None, "auth_token": "secret"}])
def test_the_token_comes_in_either_header(model, given):
    asked = {"model": model, "messages": HELLO, "max_tokens": 1}
    with running(model, token="secret") as (_, address), claude(address, "secret", **given) as mine:
        assert mine.messages.create(**asked).usage.output_tokens == 1
        with claude(address, "wrong") as other, pytest.raises(anthropic.AuthenticationError) as caught:
            other.messages.create(**asked)
        assert caught.value.body["error"]["type"] == "authentication_error"


def test_a_body_without_a_message_of_the_user_is_that_of_no_chat():
    body = MessagesBody.model_validate({"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": []}]})
    assert body.chat().messages[0].content == ""
    with pytest.raises(HttpError):
        bad = {"model": "m", "max_tokens": 1, "messages": HELLO, "tool_choice": {"type": "any"}}
        MessagesBody.model_validate(bad).chat()


@pytest.mark.parametrize(
    ("more", "read"),
    [
        ({"content": "no"}, "no"),
        ({"content": "no", "is_error": False}, "no"),
        ({"content": "no", "is_error": True}, "error: no"),
        ({"content": [{"type": "text", "text": "n"}, {"type": "text", "text": "o"}], "is_error": True}, "error: no"),
        ({"content": "Error: no", "is_error": True}, "Error: no"),
        ({"is_error": True}, "error"),
        ({}, ""),
    ],
)
def test_an_error_of_a_tool_is_text_that_the_model_reads(more, read):
    asked = {
        "messages": [*HELLO, {"role": "assistant", "content": [USE]}, {"role": "user", "content": [RESULT | more]}]
    }
    (*_, said) = MessagesBody.model_validate({"model": "m", "max_tokens": 1, **asked}).chat().messages
    assert plain(said)["content"] == read


def test_a_call_with_an_infinite_number_is_refused():
    body = {"model": "m", "max_tokens": 1, **of({**USE, "input": {"days": 7}}, role="assistant")}
    asked = read(MessagesBody, json.dumps(body).replace("7", "1e999").encode()).chat()
    with pytest.raises(HttpError) as caught:
        plain(asked.messages[1])
    assert caught.value.code == "tool_calls.arguments"
