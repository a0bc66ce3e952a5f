"""Tool calls in the text of a policy, in the notations of the usual chat templates.

<tool_call>{"name": ..., "arguments": {...}}</tool_call>    Hermes, Qwen; several in one turn
[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]       Mistral
<|python_tag|>{"name": ..., "parameters": {...}}            Llama 3; also without the tag, as the whole turn
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)
_MISTRAL, _LLAMA = "[TOOL_CALLS]", "<|python_tag|>"
_TAGS = ("<tool_call>", _MISTRAL, _LLAMA)


@dataclass(frozen=True)
class ToolCall:
    """One call. problem: why it cannot be made; "" if it can."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    problem: str = ""


def message_of(text: str) -> dict[str, Any]:
    """Return the message of the assistant for what the policy wrote: role, content, and tool_calls if there are any."""
    content, calls = parse_calls(text)
    message: dict[str, Any] = {"role": "assistant", "content": content}
    return {**message, "tool_calls": [asdict(call) for call in calls]} if calls else message


def parse_calls(text: str) -> tuple[str, list[ToolCall]]:
    """Return the text without its calls, and the calls in order; broken ones with their problem."""
    spans, calls = find_calls(text)
    return (cut_out(text, spans).strip() if spans else text), calls


def find_calls(text: str) -> tuple[list[tuple[int, int]], list[ToolCall]]:
    """Return begin and end of the parts of a text that are calls, and the calls; broken ones with their problem."""
    if found := list(_HERMES.finditer(text)):
        return [one.span() for one in found], [call for one in found for call in _calls(one[1])]
    for tag in (_MISTRAL, _LLAMA):
        if (at := text.find(tag)) >= 0:
            return [(at, len(text))], _calls(text[at + len(tag) :])
    if (whole := text.strip()).startswith("{") and (value := _json(whole)) is not None and _is_call(value):
        return [(0, len(text))], _calls(whole)
    return [], []


def cut_out(text: str, spans: Iterable[tuple[int, int]]) -> str:
    """Return a text without some parts, given by begin and end in order."""
    edges = [0, *(edge for span in spans for edge in span), len(text)]
    return "".join(text[begin:end] for begin, end in zip(edges[::2], edges[1::2], strict=True))


def before_calls(text: str) -> str:
    """Return the beginning of a growing text that is said, whatever follows: no part of a call."""
    if text.lstrip()[:1] in ("", "{"):
        return ""
    ends = [at for tag in _TAGS if (at := text.find(tag)) >= 0]
    if ends:
        return text[: min(ends)].rstrip()
    open_tags = [n for tag in _TAGS for n in range(1, len(tag)) if text.endswith(tag[:n])]
    return text[: len(text) - max(open_tags, default=0)].rstrip()


def _calls(body: str) -> list[ToolCall]:
    found = _json(body)
    many = found if isinstance(found, list) else [found]
    return [_call(one, body) for one in many] if many else [_call(None, body)]


def _json(text: str) -> Any:
    """Return a value that can be written as JSON in UTF-8 again; None for NaN, half a character and no JSON."""
    try:
        found = json.loads(text)
        json.dumps(found, ensure_ascii=False, allow_nan=False).encode()
        return found
    except (ValueError, RecursionError):
        return None


def _is_call(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and isinstance(value.get("name"), str)
        and value["name"] != ""
        and bool({"arguments", "parameters"} & set(value))
    )


def _call(value: Any, body: str) -> ToolCall:
    if not _is_call(value):
        right = '{"name": NAME, "arguments": {...}}'
        return ToolCall("", problem=f"a tool call is {right}, not {body.strip()[:80]!r}")
    arguments = value.get("arguments", value.get("parameters"))
    arguments = _json(arguments) if isinstance(arguments, str) else arguments
    if not isinstance(arguments, dict):
        return ToolCall(value["name"], problem=f"the arguments of {value['name']} are no JSON object")
    return ToolCall(value["name"], arguments)
