"""Messages and tools of a conversation: OpenAI's form, and the one that chat templates take. Imports no torch."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tilth.envs.calls import ToolCall
from tilth.serve.errors import HttpError
from tilth.serve.schemas import Message, ToolSchema, text_of


def listed(tool: ToolSchema) -> dict[str, Any]:
    """Return a tool as templates list it."""
    function: dict[str, Any] = {"name": tool.function.name, "description": tool.function.description or ""}
    parameters = tool.function.parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": {**function, "parameters": parameters}}


def assistant(content: str, calls: Sequence[ToolCall], ids: Sequence[str]) -> dict[str, Any]:
    """Return a message of the assistant as OpenAI writes it. ids: of the calls."""
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if not calls:
        return message
    functions = [{"name": one.name, "arguments": json.dumps(one.arguments, ensure_ascii=False)} for one in calls]
    made = [{"id": id, "type": "function", "function": one} for id, one in zip(ids, functions, strict=True)]
    return {**message, "content": content or None, "tool_calls": made}


def plain(message: Message) -> dict[str, Any]:
    """Return a message in the form that chat templates take: text content, arguments of calls as objects."""
    role = "system" if message.role == "developer" else message.role
    found: dict[str, Any] = {"role": role, "content": text_of(message.content)}
    for name in ("name", "tool_call_id"):
        if (value := getattr(message, name)) is not None:
            found[name] = value
    if message.tool_calls:
        found["tool_calls"] = [
            {"id": call.id, "type": "function", "function": _called(call.function.name, call.function.arguments)}
            for call in message.tool_calls
        ]
    return found


def _called(name: str, arguments: str) -> Mapping[str, Any]:
    try:
        found = json.loads(arguments or "{}")
        json.dumps(found, allow_nan=False)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        message = f"arguments of {name} are no JSON object with finite numbers: {arguments[:80]!r}"
        raise HttpError(400, message, "messages", "tool_calls.arguments")
    return {"name": name, "arguments": found}
