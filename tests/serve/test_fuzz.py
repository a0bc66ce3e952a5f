"""Requests that are malformed in every way: each gets a 4xx that names the field."""

import asyncio
import json
import random

import httpx
import pytest

from tests.serve.servers import WEATHER, model_folder, running

MESSAGES = [{"role": "user", "content": "How are you?"}]
COMMON = {
    "model": "", "temperature": 0.5, "top_p": 0.9, "top_k": 3, "min_p": 0.1, "n": 1, "seed": 1, "stop": ["x"],
    "stop_token_ids": [3], "max_tokens": 2, "stream": False, "response_format": {"type": "text"},
    "return_token_ids": True, "user": "me", "metadata": {"a": "b"}, "logit_bias": None, "frequency_penalty": 0,
    "presence_penalty": 0.0,
}  # fmt: skip
BODIES = {
    "/v1/completions": {**COMMON, "prompt": "what", "echo": True, "logprobs": 2, "suffix": None, "best_of": None},
    "/v1/chat/completions": {
        **COMMON, "messages": MESSAGES, "max_completion_tokens": 2, "logprobs": True, "top_logprobs": 1,
        "tools": [WEATHER], "tool_choice": "auto", "parallel_tool_calls": True, "store": False, "service_tier": "auto",
    },
    "/v1/responses": {
        "model": "", "input": MESSAGES, "instructions": "so", "max_output_tokens": 2, "temperature": 0.5,
        "tools": [{"type": "function", **WEATHER["function"]}], "tool_choice": "auto", "store": False, "stream": False,
        "text": {"format": {"type": "text"}}, "reasoning": {"summary": "auto"}, "metadata": {"a": "b"}, "user": "me",
        "include": [], "top_logprobs": 1, "previous_response_id": None, "truncation": "disabled",
    },
    "/v1/messages": {
        "model": "", "messages": MESSAGES, "max_tokens": 2, "system": "so", "temperature": 0.5, "top_k": 3,
        "tools": [{"name": "a", "input_schema": {}}], "tool_choice": {"type": "auto"}, "stop_sequences": ["x"],
        "thinking": {"type": "disabled"}, "return_token_ids": True, "stream": False,
    },
    "/v1/embeddings": {"model": "", "input": "what", "dimensions": 4, "encoding_format": "float", "user": "me"},
    "/tokenize": {"model": "", "prompt": "what", "tools": None, "add_special_tokens": True},
    "/detokenize": {"model": "", "tokens": [3, 4]},
}  # fmt: skip
WRONG = [
    "text", "", 1, -1, 0, 2.5, -0.5, 1e308, 2**70, -(2**70), True, False, None, [], {}, [[]], [{}], [None], [""],
    ["a", 1], [1, "a"], [[1], ["a"]], [-1], [2**70], {"a": 1}, {"type": "function"}, {"type": "json_schema"},
    "\ud800", "\x00" * 9,
    [{"role": "user"}], [{"role": "tool", "content": []}], [{"role": "assistant", "tool_calls": [{}]}], "9" * 5000,
]  # fmt: skip


def is_wrong(name, value):
    """A value that no field of this name may have. Others may be right, by chance."""
    kinds = {
        "number": ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty"),
        "integer": (
            "top_k",
            "n",
            "seed",
            "max_tokens",
            "max_completion_tokens",
            "max_output_tokens",
            "top_logprobs",
            "best_of",
            "dimensions",
        ),
        "flag": ("stream", "return_token_ids", "echo", "parallel_tool_calls", "store", "add_special_tokens"),
        "list": ("messages", "tools", "stop_token_ids", "tokens"),
        "object": ("response_format", "metadata", "logit_bias", "reasoning"),
        "text": ("model", "user", "service_tier", "suffix", "instructions", "truncation"),
    }
    if value is None:
        return name == "tokens"
    kind = next((kind for kind, names in kinds.items() if name in names), "")
    real = isinstance(value, int | float) and not isinstance(value, bool)
    right = {
        "number": real, "integer": real and isinstance(value, int), "flag": isinstance(value, bool),
        "list": isinstance(value, list), "object": isinstance(value, dict), "text": isinstance(value, str),
    }  # fmt: skip
    return bool(kind) and not right[kind]


def malformed(chance, model):
    """(path, bytes, the field that must be named or None, True if it must be refused)."""
    path = chance.choice(list(BODIES))
    body = {**BODIES[path], "model": model}
    way = chance.randrange(6)
    if way == 0:  # another value
        name, value = chance.choice(list(body)), chance.choice(WRONG)
        wrong = is_wrong(name, value)
        return path, json.dumps({**body, name: value}).encode(), name if wrong else None, wrong
    if way == 1:  # a field that there is not
        name = "".join(chance.choices("abcxyz_", k=chance.randrange(3, 9))) + "q"
        return path, json.dumps({**body, name: chance.choice(WRONG)}).encode(), name, True
    if way == 2:  # one that is missing
        name = {
            "/v1/completions": "prompt",
            "/v1/chat/completions": "messages",
            "/v1/messages": "messages",
            "/detokenize": "tokens",
            "/v1/embeddings": "input",
            "/v1/responses": "input",
        }.get(path, "prompt")
        return path, json.dumps({k: v for k, v in body.items() if k != name}).encode(), name, True
    if way == 3:  # deep inside
        part = chance.choice(
            [
                {"role": chance.choice(WRONG), "content": "a"},
                {"role": "user", "content": chance.choice([1, {}, [1], [{"type": "image_url"}]])},
            ]
        )
        given = {**BODIES["/v1/chat/completions"], "model": model, "messages": [*MESSAGES, part]}
        return "/v1/chat/completions", json.dumps(given).encode(), "messages.1", True
    whole = json.dumps(body).encode()
    if way == 4:  # cut
        return path, whole[: chance.randrange(len(whole))], "body", True
    at = chance.randrange(len(whole))
    return path, whole[:at] + bytes([chance.randrange(256)]) + whole[at + 1 :], None, False


async def fuzz(app, model, count, seed):
    chance, met = random.Random(seed), {}
    transport = httpx.ASGITransport(app, raise_app_exceptions=True)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=60) as client:
        for _ in range(count):
            path, body, field, must = malformed(chance, model)
            found = await client.post(path, content=body)
            said = (found.status_code, found.text[:300], body[:300])
            if not must and found.status_code == 200:
                continue
            assert 400 <= found.status_code < 500, said
            param = found.json()["error"]["param"]
            unread = param == "body" and b"ud800" in body
            assert param and (field is None or param.startswith(field) or unread), (field, *said)
            met[found.status_code] = met.get(found.status_code, 0) + 1
    return met


@pytest.mark.parametrize("count", [150, pytest.param(10_000, marks=pytest.mark.slow)])
def test_whatever_is_malformed_is_a_4xx_that_names_the_field(tmp_path, count):
    model = model_folder(tmp_path, tools=True, context=512)
    with running(model) as (server, _):
        met = asyncio.run(fuzz(server.config.app, model, count, seed=count))
        assert set(met) <= {400, 404} and sum(met.values()) > 0.6 * count
        assert not server.room.load and server.room.restarts == 0
