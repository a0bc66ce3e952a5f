"""The unmodified client of OpenAI over every endpoint of a server."""

import asyncio
import itertools
import json
import threading
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.serve.servers import TOOLS, WEATHER, client_of, model_folder, raw, running
from tilth.cli.generate import complete
from tilth.cli.main import GenerateCommand
from tilth.data.tokenizer import Tokenizer
from tilth.envs.calls import ToolCall
from tilth.serve.choices import StreamedText
from tilth.serve.model import ServedModel
from tilth.serve.openai import LONG

HELLO = [{"role": "user", "content": "How are you?"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    thought = "{%- if enable_thinking is defined and not enable_thinking %}{{- '<think></think>' }}{%- endif %}"
    (folder / "thinking.jinja").write_text(TOOLS + thought)
    return model_folder(folder, tools=True, context=512)


@pytest.fixture(scope="module")
def address(model):
    with running(model) as (_, found):
        yield found


@pytest.fixture(scope="module")
def client(address):
    with client_of(address) as made:
        yield made


def test_models_are_listed(client, model):
    assert [one.id for one in client.models.list()] == [Path(model).name]
    for name in (Path(model).name, model):
        assert client.models.retrieve(name).id == name
        assert client.completions.create(model=name, prompt="what", max_tokens=1).model == name
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("other")
    assert caught.value.param == "model"


def test_completions_are_those_of_tilth_generate(client, model):
    wanted, _ = complete(GenerateCommand(model, "what is it? ", n=3, seed=5, max_tokens=12, template=""))
    extra = {"return_token_ids": True}
    found = client.completions.create(
        model=model, prompt="what is it? ", n=3, seed=5, max_tokens=12, logprobs=2, extra_body=extra
    )
    for one, trajectory in zip(found.choices, wanted):
        mine = trajectory.mask == 1
        assert one.text == trajectory.text and one.token_ids == trajectory.tokens[mine].tolist()
        assert one.logprobs.token_logprobs == pytest.approx(trajectory.logprobs[mine].tolist(), abs=1e-4)
        assert one.finish_reason == trajectory.finish and one.prompt_token_ids == trajectory.tokens[~mine].tolist()
        tops = one.logprobs.top_logprobs
        assert all(
            own <= max(top.values()) and 2 <= len(top) <= 3 for own, top in zip(one.logprobs.token_logprobs, tops)
        )
    assert found.usage.completion_tokens == sum(t.completion_length for t in wanted)


PROMPTS = ["what is it? ", [40, 41, 42], ["what", "12+34="], [[40, 41], [42]]]


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("more", [{"n": 2, "temperature": 0.7}, {"stop": ["e", "1"], "logprobs": 3, "echo": True}])
def test_a_stream_is_the_answer_in_parts(client, model, prompt, more):
    asked = {"model": model, "prompt": prompt, "seed": 3, "max_tokens": 20, **more}
    whole = client.completions.create(**asked)
    parts = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert parts[-1].usage == whole.usage
    for choice in whole.choices:
        mine = [c for part in parts for c in part.choices if c.index == choice.index]
        assert "".join(c.text for c in mine) == choice.text
        assert [c.finish_reason for c in mine if c.finish_reason] == [choice.finish_reason]
        if "logprobs" in more:
            for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
                assert [x for c in mine for x in getattr(c.logprobs, name)] == getattr(choice.logprobs, name)


def test_no_part_of_a_stop_string_is_sent_before_it_is_whole():
    tokenizer = Tokenizer.characters("ab")
    texts = ["".join(letters) for length in range(1, 5) for letters in itertools.product("ab", repeat=length)]
    for stop, text in itertools.product(texts[6:], texts):
        kept, sent = text.partition(stop)[0], StreamedText(tokenizer, (), [stop])
        for letter in text[: len(kept) + len(stop) - 1]:
            sent.send(sent.hear(np.array(tokenizer.encode(letter, special=False))))
            assert kept.startswith(sent.sent), (stop, text)


@pytest.mark.parametrize("chat", [pytest.param(False, marks=pytest.mark.slow), True])
def test_no_text_of_a_token_behind_a_stop_string_is_sent(client, model, chat):
    ask = client.chat.completions.create if chat else client.completions.create
    asked = {
        "model": model,
        "seed": 3,
        "n": 4,
        "max_tokens": 12,
        **({"messages": HELLO} if chat else {"prompt": "what"}),
    }
    ids = [one.token_ids for one in ask(**asked, extra_body={"return_token_ids": True}).choices]
    tokens = [client.post("/../detokenize", cast_to=object, body={"tokens": [i]})["prompt"] for own in ids for i in own]
    said = lambda one: one.message.content if chat else one.text  # noqa: E731
    part = lambda one: one.delta.content if chat else one.text  # noqa: E731
    for stop in [token[0] for token in tokens if len(token) > 1 and token.isascii()][:3]:
        whole, parts = ask(**asked, stop=stop), list(ask(**asked, stop=stop, stream=True))
        for choice in whole.choices:
            mine = [part(c) or "" for one in parts for c in one.choices if c.index == choice.index]
            assert "".join(mine) == said(choice) and stop not in said(choice)


def test_a_prompt_with_log_probs_is_scored(client, model):
    found = client.completions.create(
        model=model, prompt="what is it?", echo=True, logprobs=1, max_tokens=1, temperature=0
    )
    long = client.completions.create(model=model, prompt="what is", echo=True, logprobs=1, max_tokens=0)
    own, shorter = found.choices[0].logprobs, long.choices[0].logprobs
    assert own.token_logprobs[0] is None and own.top_logprobs[0] is None and long.choices[0].text == "what is"
    assert "".join(own.tokens) == found.choices[0].text and len(own.tokens) == found.usage.total_tokens
    assert own.token_logprobs[1 : len(shorter.tokens)] == pytest.approx(shorter.token_logprobs[1:], abs=1e-4)
    assert all(one <= max(top.values()) for one, top in zip(own.token_logprobs[1:], own.top_logprobs[1:]))
    again = client.completions.create(model=model, prompt="what is it?", logprobs=1, max_tokens=1, temperature=0)
    assert again.choices[0].logprobs.token_logprobs == own.token_logprobs[-1:]


def test_an_answer_of_the_assistant_streams_too(client, model):
    asked = {"model": model, "messages": HELLO, "seed": 4, "max_completion_tokens": 20, "n": 2, "logprobs": True}
    whole = client.chat.completions.create(**asked, top_logprobs=2)
    parts = list(client.chat.completions.create(**asked, top_logprobs=2, stream=True))
    for choice in whole.choices:
        mine = [c for part in parts for c in part.choices if c.index == choice.index]
        assert mine[0].delta.role == "assistant"
        assert "".join(c.delta.content or "" for c in mine) == choice.message.content
        entries = [entry for c in mine if c.logprobs for entry in c.logprobs.content]
        assert entries == choice.logprobs.content and all(len(e.top_logprobs) == 2 for e in entries)
        assert mine[-1].finish_reason == choice.finish_reason


def test_conversations_with_tools_and_parts(client, model):
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo", "days": 1}'}}
    messages = [
        {"role": "developer", "content": "so"},
        {"role": "user", "content": [{"type": "text", "text": "How"}, {"type": "text", "text": " are you?"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "12", "tool_call_id": "1"},
    ]
    asked = {"model": model, "messages": messages, "tools": [WEATHER], "seed": 1, "max_tokens": 10}
    whole = client.chat.completions.create(**asked)
    parts = client.chat.completions.create(**asked, stream=True)
    assert "".join(p.choices[0].delta.content or "" for p in parts) == whole.choices[0].message.content
    none = client.chat.completions.create(**asked, tool_choice="none")
    assert none.usage.prompt_tokens < whole.usage.prompt_tokens


@pytest.mark.parametrize(
    "choice",
    [pytest.param("required", marks=pytest.mark.slow), {"type": "function", "function": {"name": "weather"}}],
)
def test_a_call_that_is_demanded_is_made(client, model, choice):
    asked = {"model": model, "messages": HELLO, "tools": [WEATHER], "tool_choice": choice, "seed": 2}
    whole = client.chat.completions.create(**asked).choices[0]
    (call,) = whole.message.tool_calls
    arguments = json.loads(call.function.arguments)
    assert call.function.name == "weather" and arguments["city"] in ("Oslo", "Rome") and whole.message.content is None
    parts = [p.choices[0] for p in client.chat.completions.create(**asked, stream=True)]
    assert parts[-1].finish_reason == whole.finish_reason == "tool_calls"
    assert not any(p.delta.content for p in parts)
    (streamed,) = [c for p in parts for c in p.delta.tool_calls or ()]
    assert streamed.function.arguments == call.function.arguments and streamed.index == 0


def test_a_schema_is_followed(client, model):
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    found = client.chat.completions.create(model=model, messages=HELLO, response_format=form, max_tokens=60, seed=1)
    assert json.loads(found.choices[0].message.content)["n"] in (1, 2)


def test_lengths_and_ends_are_those_that_are_asked_for(client, model):
    asked = {"model": model, "prompt": "what is it? ", "max_tokens": 24, "n": 4, "seed": 6}
    ends = {"stop_token_ids": [40], "return_token_ids": True}
    short = client.completions.create(**asked, logit_bias={"40": 100}, extra_body=ends)
    assert all(one.token_ids == [40] and one.finish_reason == "stop" for one in short.choices)
    longer = client.completions.create(**asked, logit_bias={"40": 100}, extra_body={**ends, "min_tokens": 8})
    assert all(one.token_ids[8:] == [40] and 40 not in one.token_ids[:8] for one in longer.choices)
    end = Tokenizer.load(model).eos_id
    push = {"logit_bias": {str(end): 100}}
    assert client.completions.create(**asked, **push).usage.completion_tokens == 4
    on = client.completions.create(**asked, **push, extra_body={"ignore_eos": True, "return_token_ids": True})
    assert all(one.token_ids == [end] * 24 and one.text == "" for one in on.choices)
    away = {**push, "presence_penalty": 2, "frequency_penalty": 2, "extra_body": {"ignore_eos": True}}
    assert any(one.text for one in client.completions.create(**{**asked, "max_tokens": 100}, **away).choices)


def test_fields_that_change_nothing_are_taken(client, model):
    asked = {"model": model, "messages": HELLO, "seed": 3, "max_tokens": 8}
    plain = client.chat.completions.create(**asked).choices[0].message.content
    more = {"user": "me", "store": False, "service_tier": "auto", "parallel_tool_calls": True, "metadata": {"a": "b"}}
    theirs = {"repetition_penalty": 1.0, "skip_special_tokens": True, "use_beam_search": False, "top_k": -1}
    found = client.chat.completions.create(
        **asked, **more, frequency_penalty=0, logit_bias={}, extra_body={**theirs, "min_tokens": 0, "suffix": None}
    )
    assert found.choices[0].message.content == plain


def hidden_states(model, texts):
    """By transformers, after the final norm."""
    theirs, tokenizer = AutoModelForCausalLM.from_pretrained(model).eval(), Tokenizer.load(model)
    with torch.no_grad():
        rows = [theirs(torch.tensor([tokenizer.encode(text)]), output_hidden_states=True) for text in texts]
    return [row.hidden_states[-1][0].double().numpy() for row in rows]


def unit(row):
    return row / np.linalg.norm(row)


def test_embeddings_are_the_hidden_states_of_transformers(client, model):
    texts = ["what is it?", "how are you", "a"]
    wanted = hidden_states(model, texts)
    found = client.embeddings.create(model=model, input=texts)  # the client asks for base64
    np.testing.assert_allclose([row.embedding for row in found.data], [unit(x[-1]) for x in wanted], atol=2e-5)
    assert found.usage.prompt_tokens == sum(map(len, wanted)) and [row.index for row in found.data] == [0, 1, 2]
    ids = Tokenizer.load(model).encode(texts[0])
    short = client.embeddings.create(model=model, input=ids, dimensions=5, encoding_format="float")
    np.testing.assert_allclose(short.data[0].embedding, unit(wanted[0][-1][:5]), atol=2e-5)


def test_variables_of_a_template_reach_it(model):
    body = {"model": model, "messages": HELLO, "max_tokens": 1, "reasoning_effort": "low"}
    with running(
        model, template=str(Path(model).parent / "thinking.jinja"), name="named", pooling="mean", fast=True
    ) as (
        _,
        other,
    ):
        thinking, without = (
            raw(other, "/tokenize", messages=HELLO, chat_template_kwargs={"enable_thinking": on})[1]["count"]
            for on in (True, False)
        )
        assert without > thinking and raw(other, "/v1/chat/completions", **body)[0] == 400
        with client_of(other) as client:
            assert [one.id for one in client.models.list()] == ["named"]
            assert client.completions.create(model="named", prompt="what", max_tokens=1).model == "named"
            (mean,) = client.embeddings.create(model="named", input="what is it?").data
    np.testing.assert_allclose(mean.embedding, unit(hidden_states(model, ["what is it?"])[0].mean(0)), atol=2e-5)


def test_a_schema_with_too_many_branches_is_refused(address, model):
    schema = {"anyOf": [{"type": "string", "minLength": i, "maxLength": i + 50} for i in range(1000)]}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    status, said = raw(address, "/v1/chat/completions", model=model, messages=HELLO, response_format=form, seed=1)
    assert (status, said["error"]["param"]) == (400, "response_format"), said


def test_a_long_text_holds_up_nobody(address, model, monkeypatch):
    def slow(tokenizer, text, special=True):
        encoding.set()
        assert served.wait(60)
        return [5]

    async def both():
        async with httpx.AsyncClient(timeout=60) as http:
            body = {"model": model, "prompt": "what " * (LONG // 5), "max_tokens": 1}
            long = asyncio.create_task(http.post(f"{address}/completions", json=body))
            while not encoding.is_set():
                await asyncio.sleep(0.001)
            assert (await http.get(f"{address}/models")).status_code == 200
            served.set()
            return await long

    encoding, served = threading.Event(), threading.Event()
    monkeypatch.setattr(Tokenizer, "encode", slow)
    assert asyncio.run(both()).json()["usage"]["prompt_tokens"] == 1


def test_many_clients_at_once_get_what_each_gets_alone(address, model):
    async def all_at_once():
        async with openai.AsyncOpenAI(base_url=address, api_key="none") as client:

            async def one(i):
                asked = {"model": model, "prompt": f"{i}+{i}=", "seed": i, "max_tokens": 4 + i}
                if i % 2:
                    stream = await client.completions.create(**asked, stream=True)
                    return "".join([part.choices[0].text async for part in stream])
                return (await client.completions.create(**asked)).choices[0].text

            return await asyncio.gather(*map(one, range(16)))

    found = asyncio.run(all_at_once())
    with client_of(address) as client:
        for i in range(16):
            asked = {"model": model, "prompt": f"{i}+{i}=", "seed": i, "max_tokens": 4 + i}
            assert client.completions.create(**asked).choices[0].text == found[i]


def test_tokens_go_in_and_out(address, model):
    status, found = raw(address, "/tokenize", prompt="what is it?")
    assert status == 200 and found["count"] == len(found["tokens"]) and found["max_model_len"] == 512
    assert raw(address, "/detokenize", tokens=found["tokens"])[1] == {"prompt": "what is it?"}
    chat = raw(address, "/tokenize", messages=HELLO)[1]["tokens"]
    assert raw(address, "/detokenize", tokens=chat)[1]["prompt"].endswith("<|im_start|>assistant\n")
    body = {"model": model, "messages": HELLO, "max_tokens": 2, "return_token_ids": True}
    assert raw(address, "/v1/chat/completions", **body)[1]["prompt_token_ids"] == chat


def test_a_server_says_how_it_is(address):
    base = address.removesuffix("/v1")
    assert httpx.get(f"{base}/health").json() == {"status": "ok"}
    page = httpx.get(f"{base}/metrics").text
    assert 'tilth_requests_total{path="/health",status="200"}' in page and "tilth_engine_decoded_tokens" in page


OBJECT = {"type": "json_object"}
WRONG = [
    ("/v1/completions", {"model": "other", "prompt": "a"}, 404, "model"),
    ("/v1/completions", {"prompt": "a"}, 400, "model"),
    ("/v1/completions", {"model": 1, "prompt": "a"}, 400, "model"),
    ("/v1/completions", {"prompt": []}, 400, "prompt"),
    ("/v1/completions", {"prompt": ""}, 400, "prompt"),
    ("/v1/completions", {"prompt": [1, "a"]}, 400, "prompt.1"),
    ("/v1/completions", {"prompt": [99999]}, 400, "prompt"),
    ("/v1/completions", {"prompt": [1] * 512, "max_tokens": 1}, 400, "prompt"),
    ("/v1/completions", {"prompt": [1] * 506, "max_tokens": 7}, 400, "max_tokens"),
    ("/v1/completions", {"prompt": "a", "max_tokens": 0}, 400, "max_tokens"),
    ("/v1/completions", {"prompt": "a", "temperature": -1}, 400, "temperature"),
    ("/v1/completions", {"prompt": "a", "temperature": "1"}, 400, "temperature"),
    ("/v1/completions", {"prompt": "a", "temperature": 1e-300}, 400, "temperature"),
    ("/v1/completions", {"prompt": "a", "top_p": 0}, 400, "top_p"),
    ("/v1/completions", {"prompt": "a", "top_p": 1e-300}, 400, "top_p"),
    ("/v1/completions", {"prompt": "a", "n": 0}, 400, "n"),
    ("/v1/completions", {"prompt": "a", "n": True}, 400, "n"),
    ("/v1/completions", {"prompt": ["a"] * 600}, 400, "n"),
    ("/v1/completions", {"prompt": "a", "stop": ["a", ""]}, 400, "stop.1"),
    ("/v1/completions", {"prompt": "a", "logit_bias": {"a": 2}}, 400, "logit_bias"),
    ("/v1/completions", {"prompt": "a", "logit_bias": {"99999": 2}}, 400, "logit_bias"),
    ("/v1/completions", {"prompt": "a", "logit_bias": {"1": 101}}, 400, "logit_bias.1"),
    ("/v1/completions", {"prompt": "a", "presence_penalty": 3}, 400, "presence_penalty"),
    ("/v1/completions", {"prompt": "a", "repetition_penalty": 1.1}, 400, "repetition_penalty"),
    ("/v1/completions", {"prompt": "a", "stop_token_ids": [99999]}, 400, "stop_token_ids"),
    ("/v1/completions", {"prompt": "a", "min_tokens": 17}, 400, "min_tokens"),
    ("/v1/completions", {"prompt": "a", "min_tokens": 1, "response_format": OBJECT}, 400, "min_tokens"),
    ("/v1/completions", {"prompt": "a", "best_of": 3}, 400, "best_of"),
    ("/v1/completions", {"prompt": "a", "suffix": "b"}, 400, "suffix"),
    ("/v1/completions", {"prompt": "a", "logprobs": 99}, 400, "logprobs"),
    ("/v1/completions", {"prompt": "a", "maxtokens": 9}, 400, "maxtokens"),
    ("/v1/completions", {"prompt": "a", "stream_options": {"include_usage": True}}, 400, "stream_options"),
    ("/v1/chat/completions", {}, 400, "messages"),
    ("/v1/chat/completions", {"messages": []}, 400, "messages"),
    ("/v1/chat/completions", {"messages": [{"role": "king", "content": ""}]}, 400, "messages.0.role"),
    ("/v1/chat/completions", {"messages": [{"role": "user"}]}, 400, "messages.0.content"),
    ("/v1/chat/completions", {"messages": HELLO * 99, "max_tokens": 1}, 400, "messages"),
    ("/v1/chat/completions", {"messages": HELLO, "top_logprobs": 1}, 400, "top_logprobs"),
    ("/v1/chat/completions", {"messages": HELLO, "tool_choice": "auto"}, 400, "tool_choice"),
    ("/v1/chat/completions", {"messages": HELLO, "response_format": {"type": "xml"}}, 400, "response_format.type"),
    ("/v1/chat/completions", {"messages": HELLO, "store": True}, 400, "store"),
    ("/v1/chat/completions", {"messages": HELLO, "service_tier": "flex"}, 400, "service_tier"),
    ("/v1/chat/completions", {"messages": HELLO, "reasoning_effort": "low"}, 400, "reasoning_effort"),
    ("/v1/chat/completions", {"messages": HELLO, "chat_template_kwargs": {"x": 1}}, 400, "chat_template_kwargs.x"),
    (
        "/v1/chat/completions",
        {"messages": HELLO, "chat_template_kwargs": {"messages": 1}},
        400,
        "chat_template_kwargs.messages",
    ),
    ("/v1/embeddings", {}, 400, "input"),
    ("/v1/embeddings", {"input": ""}, 400, "input"),
    ("/v1/embeddings", {"input": [1] * 513}, 400, "input"),
    ("/v1/embeddings", {"input": "a", "dimensions": 9999}, 400, "dimensions"),
    ("/v1/embeddings", {"input": "a", "encoding_format": "hex"}, 400, "encoding_format"),
    ("/tokenize", {"prompt": "a", "messages": HELLO}, 400, "prompt"),
    ("/detokenize", {"tokens": [10**9]}, 400, "tokens"),
]


@pytest.mark.parametrize("path, body, status, param", WRONG)
def test_what_is_wrong_is_named(address, model, path, body, status, param):
    given = {"model": model, **body} if body != {"prompt": "a"} and path.startswith("/v1") else body
    found, said = raw(address, path, **given)
    assert (found, said["error"]["param"]) == (status, param), said
    assert said["error"]["message"] and said["error"]["type"]


def test_a_prompt_that_is_too_long_says_both_lengths(address, model):
    _, said = raw(address, "/v1/completions", model=model, prompt=[1] * 600, max_tokens=7)
    assert "600" in said["error"]["message"] and "512" in said["error"]["message"]
    assert said["error"]["code"] == "context_length_exceeded"
    status, said = raw(address, "/v1/completions", model=model, prompt="what " * 400_000)
    assert (status, said["error"]["code"]) == (400, "context_length_exceeded")


def test_too_many_stop_strings_are_told_as_such(address, model):
    status, said = raw(address, "/v1/completions", model=model, prompt="a", stop=["a"] * 17)
    assert (status, said["error"]["param"], said["error"]["code"]) == (400, "stop", "too_long")


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[1]", b"null", b'{"model": "a\\ud800"}', b"\xff", b'{"n": 1e999}', b"[" * 9999]
)
def test_what_is_no_json_is_refused(address, body):
    found = httpx.post(f"{address}/completions", content=body)
    assert found.status_code == 400 and found.json()["error"]["param"]


def test_more_completions_than_the_room_has_are_refused_before_any_is_made(address, model, monkeypatch):
    made = []
    monkeypatch.setattr(ServedModel, "encode", lambda *given, **more: made.append(given) or [1])
    monkeypatch.setattr(ServedModel, "requests", lambda *given: made.append(given) or [])
    for more in ({"max_tokens": 1}, {"max_tokens": 0, "echo": True}):
        status, said = raw(address, "/v1/completions", model=model, prompt=["a"] * 1024, n=128, **more)
        assert (status, said["error"]["param"], made) == (400, "n", [])


@pytest.mark.parametrize("parallel, count", [(None, 2), (True, 2), (False, 1)])
def test_without_parallel_calls_the_first_one_is_returned(client, model, monkeypatch, parallel, count):
    two = [ToolCall("weather", {"city": city}) for city in ("Oslo", "Rome")]
    monkeypatch.setattr("tilth.serve.choices.split_turn", lambda *_: ("", two))
    asked = {"model": model, "messages": HELLO, "tools": [WEATHER], "max_tokens": 2}
    asked |= {} if parallel is None else {"parallel_tool_calls": parallel}
    calls = client.chat.completions.create(**asked).choices[0].message.tool_calls
    assert [json.loads(one.function.arguments)["city"] for one in calls] == ["Oslo", "Rome"][:count]
    parts = [part.choices[0].delta.tool_calls or [] for part in client.chat.completions.create(**asked, stream=True)]
    assert [one.index for part in parts for one in part] == [*range(count)]
