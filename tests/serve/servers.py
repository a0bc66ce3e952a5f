"""A server of a small model in a thread of the tests, with the clients of third parties in front of it."""

import threading
from contextlib import contextmanager

import httpx
import openai

from tests.cli import speaking
from tilth.serve.start import ServeOptions, open_server

TOOLS = """\
{%- if tools %}{{- '<|im_start|>system\\n' + (tools | tojson) + '<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] }}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>' + ({"name": call.function.name, "arguments": call.function.arguments} | tojson) }}
        {{- '</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"enum": [1, 2, 3]}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}


def model_folder(path, *, tools=False, context=256):
    """A Hugging Face directory with a chat template; return its path as text."""
    template = "chatml"
    if tools:
        (path / "tools.jinja").write_text(TOOLS)
        template = str(path / "tools.jinja")
    speaking.directory(path / "model", template=template, context=context)
    return str(path / "model")


@contextmanager
def running(model, **options):
    """A server on a free port; yields it and its address, and ends it."""
    server, address = open_server(model, ServeOptions(port=0, **{"backend": "inline", **options}))
    thread = threading.Thread(target=server.run_here)
    thread.start()
    try:
        yield server, address
    finally:
        server.should_exit = True
        server.room.close(5.0)
        thread.join()


def client_of(address, token="none"):
    return openai.OpenAI(base_url=address, api_key=token, max_retries=0)


def raw(address, path, **body):
    """Answer to a POST, and its JSON."""
    found = httpx.post(address.removesuffix("/v1") + path, json=body, timeout=60)
    return found.status_code, found.json()
