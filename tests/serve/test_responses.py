"""The unmodified client of OpenAI over ``/v1/responses``, beside the chat completion that asks for the same."""

import json
from functools import cache

import httpx
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from tests.serve.servers import WEATHER, client_of, model_folder, raw, running
from tilth.envs.calls import ToolCall
from tilth.serve.schemas import NEUTRAL

TOOL = {"type": "function", **WEATHER["function"]}
HELLO = [{"role": "user", "content": "How are you?"}]
CALL = {"name": "weather", "arguments": '{"city": "Oslo", "days": 1}'}


@cache
def events_schema():
    """Made once: it takes a tenth of a second."""
    return TypeAdapter(ResponseStreamEvent)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return model_folder(tmp_path_factory.mktemp("served"), tools=True, context=512)


@pytest.fixture(scope="module")
def address(model):
    with running(model) as (_, found):
        yield found


@pytest.fixture(scope="module")
def client(address):
    with client_of(address) as made:
        yield made


def streamed(address, **body):
    """Events of a stream, each as its schema has it, and the final response."""
    with httpx.stream("POST", f"{address}/responses", json={**body, "stream": True}, timeout=60) as found:
        lines = [line.removeprefix("data: ") for line in found.iter_lines() if line.startswith("data: ")]
    events = [json.loads(line) for line in lines]
    for event in events:
        events_schema().validate_python(event)
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    return events


def lasting(response):
    """A response without the numbers that differ from one request to the next."""
    changing = {"id", "call_id", "created_at", "completed_at"}
    if isinstance(response, dict):
        return {k: lasting(v) for k, v in response.items() if k not in changing}
    return [lasting(one) for one in response] if isinstance(response, list) else response


def test_a_response_is_the_answer_of_a_chat_completion(client, model):
    asked = {"model": model, "temperature": 0}
    chat = client.chat.completions.create(
        **asked, max_tokens=20, messages=[{"role": "system", "content": "so"}, *HELLO]
    )
    for given in (
        HELLO[0]["content"],
        HELLO,
        [{"role": "user", "content": [{"type": "input_text", "text": "How are you?"}]}],
    ):
        found = client.responses.create(**asked, max_output_tokens=20, instructions="so", input=given, store=True)
        assert found.output_text == chat.choices[0].message.content
        assert found.usage.input_tokens == chat.usage.prompt_tokens
        assert found.usage.output_tokens == chat.usage.completion_tokens
        assert found.store is False
    assert chat.choices[0].finish_reason == "length" and found.status == "incomplete"
    assert found.incomplete_details.reason == "max_output_tokens" and found.output[0].status == "incomplete"


def test_a_conversation_with_calls_has_the_prompt_of_a_chat_completion(client, model):
    calls = [{"id": f"call_{i}", "type": "function", "function": CALL} for i in range(2)]
    results = [{"role": "tool", "content": "12", "tool_call_id": call["id"]} for call in calls]
    said = {"role": "assistant", "content": "so: ", "tool_calls": calls}
    asked = {"model": model, "temperature": 0}
    messages = [{"role": "developer", "content": "so"}, *HELLO, said, *results, *HELLO]
    chat = client.chat.completions.create(**asked, max_tokens=8, messages=messages, tools=[WEATHER])
    part = {"type": "output_text", "text": "so: ", "annotations": [], "logprobs": []}
    items = [
        {"role": "developer", "content": "so"},
        *HELLO,
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [part],
            "phase": None,
        },
        *({"type": "function_call", "id": "fc_1", "call_id": call["id"], **CALL, "caller": None} for call in calls),
        *({"type": "function_call_output", "call_id": call["id"], "output": "12"} for call in calls),
        *HELLO,
    ]
    found = client.responses.create(**asked, max_output_tokens=8, input=items, tools=[TOOL])
    assert found.output_text == chat.choices[0].message.content
    assert found.usage.input_tokens == chat.usage.prompt_tokens
    none = client.responses.create(**asked, max_output_tokens=8, input=items, tools=[TOOL], tool_choice="none")
    assert none.usage.input_tokens < found.usage.input_tokens


def test_a_call_goes_back_with_its_result(client, model):
    asked = {"model": model, "tools": [TOOL], "temperature": 0}
    first = client.responses.create(**asked, input=HELLO, tool_choice={"type": "function", "name": "weather"})
    (call,) = first.output
    assert call.type == "function_call" and json.loads(call.arguments)["city"] in ("Oslo", "Rome")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": [{"type": "input_text", "text": "12"}]}
    for output in (first.output, [item.model_dump() for item in first.output]):
        second = client.responses.create(**asked, input=[*HELLO, *output, result], max_output_tokens=4)
        assert second.usage.input_tokens > first.usage.input_tokens and second.output[0].type == "message"


TEXT = {"input": HELLO, "max_output_tokens": 20, "top_logprobs": 2, "include": ["message.output_text.logprobs"]}
MADE = {"input": "How?", "tools": [TOOL], "tool_choice": "required"}


@pytest.mark.parametrize(
    "more",
    [
        TEXT,
        pytest.param(MADE, marks=pytest.mark.slow),
        {**MADE, "tool_choice": {"type": "function", "name": "weather"}},
    ],
)
def test_a_stream_ends_in_the_response(address, client, model, more):
    asked = {"model": model, "temperature": 0, **more}
    whole = raw(address, "/v1/responses", **asked)[1]
    Response.model_validate(whole)
    events = streamed(address, **asked)
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == f"response.{whole['status']}"
    assert lasting(events[-1]["response"]) == lasting(whole)
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"]
    deltas = [event for event in events if event["type"].endswith(".delta")]
    said = "".join(event["delta"] for event in deltas)
    part = whole["output"][0].get("content", [{}])[0]
    assert said == part.get("text", whole["output"][0].get("arguments"))
    assert len([row for event in deltas for row in event.get("logprobs", ())]) <= len(part.get("logprobs", ()))
    with client.responses.stream(**asked) as stream:
        for _ in stream:
            pass
        if whole["status"] == "completed":
            assert stream.get_final_response().output_text == part.get("text", "")


def test_text_before_calls_is_a_message_of_its_own(address, model, monkeypatch):
    two = [ToolCall("weather", {"city": city}) for city in ("Oslo", "Rome")]
    monkeypatch.setattr("tilth.serve.choices.split_turn", lambda *_: ("so", two))
    asked = {"model": model, "input": HELLO, "tools": [TOOL], "max_output_tokens": 2, "temperature": 0}
    monkeypatch.setattr("tilth.serve.choices.before_calls", lambda text: "")
    whole = raw(address, "/v1/responses", **asked)[1]
    assert [item["type"] for item in whole["output"]] == ["message", "function_call", "function_call"]
    assert whole["output"][0]["content"][0]["text"] == "so"
    assert lasting(streamed(address, **asked)[-1]["response"]) == lasting(whole)
    one = raw(address, "/v1/responses", **asked, parallel_tool_calls=False)[1]
    assert [item["type"] for item in one["output"]] == ["message", "function_call"]


class Number(BaseModel):
    n: bool


def test_a_schema_is_followed(client, model):
    found = client.responses.parse(model=model, input=HELLO, text_format=Number, max_output_tokens=60)
    assert isinstance(found.output_parsed, Number)


def test_an_error_in_a_stream_is_its_last_event(address, model):
    form = {"type": "json_schema", "name": "n", "schema": {"type": 1}}  # which the engine refuses
    events = streamed(address, model=model, input="How?", text={"format": form})
    assert (events[-1]["type"], events[-1]["param"]) == ("error", "text.format")


def test_fields_that_change_nothing_are_taken(client, model):
    asked = {"model": model, "input": HELLO, "temperature": 0, "max_output_tokens": 8}
    neutral = {"service_tier": NEUTRAL["service_tier"][0], "truncation": "disabled", "background": False}
    more = {"user": "me", "metadata": {"a": "b"}, "prompt_cache_key": "a", "tools": [], "tool_choice": "auto"}
    found = client.responses.create(**asked, **neutral, **more, stream_options=None, include=[])
    assert found.output_text == client.responses.create(**asked).output_text and found.metadata == {"a": "b"}


IMAGE = {"role": "user", "content": [{"type": "input_image", "image_url": "http://a"}]}
WRONG = [
    ({}, "input"),
    ({"input": []}, "input"),
    ({"input": "a", "previous_response_id": "resp_1"}, "previous_response_id"),
    ({"input": "a", "conversation": "conv_1"}, "conversation"),
    ({"input": "a", "background": True}, "background"),
    ({"input": "a", "truncation": "auto"}, "truncation"),
    ({"input": "a", "max_tokens": 1}, "max_tokens"),
    ({"input": "a", "max_output_tokens": 0}, "max_output_tokens"),
    ({"input": "a", "max_output_tokens": 600}, "max_output_tokens"),
    ({"input": HELLO * 99}, "input"),
    ({"input": [IMAGE]}, "input.0.content.0.type"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input.0.type"),
    ({"input": [{"type": "message", "role": "user"}]}, "input.0.content"),
    ({"input": [*HELLO, {"type": "function_call", "name": "a", "arguments": "{}"}]}, "input.1.call_id"),
    ({"input": [{"type": "function_call", "call_id": "1", "name": "a", "arguments": "{"}]}, "input"),
    ({"input": "a", "tools": [{"type": "web_search"}]}, "tools.0.type"),
    ({"input": "a", "tool_choice": "required"}, "tool_choice"),
    ({"input": "a", "tools": [TOOL], "tool_choice": {"type": "function", "name": "b"}}, "tool_choice"),
    ({"input": "a", "text": {"format": {"type": "xml"}}}, "text.format"),
    ({"input": "a", "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": 1}}}}, "text.format"),
    ({"input": "a", "text": {"verbosity": "low"}}, "text.verbosity"),
    ({"input": "a", "reasoning": {"effort": "low"}}, "reasoning.effort"),
    ({"input": "a", "include": ["file_search_call.results"]}, "include.0"),
    ({"input": "a", "stream_options": {"include_usage": True}}, "stream_options"),
]


@pytest.mark.parametrize("body, param", WRONG)
def test_what_is_wrong_is_named(address, model, body, param):
    status, said = raw(address, "/v1/responses", model=model, **body)
    assert (status, said["error"]["param"]) == (400, param), said


def test_an_unknown_model_is_named(client):
    with pytest.raises(openai.NotFoundError) as caught:
        client.responses.create(model="other", input="a")
    assert caught.value.param == "model"
