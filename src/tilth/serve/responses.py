"""Body of ``/v1/responses``, which asks for a chat completion, and the form of its answer: items and events."""

import json
import time
import uuid
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, model_validator

from tilth.serve.errors import HttpError, read
from tilth.serve.forms import Form
from tilth.serve.schemas import (
    INT64,
    MOST,
    NEUTRAL,
    Body,
    ChatBody,
    FunctionName,
    FunctionSchema,
    GivenBack,
    SchemaFormat,
    TextBody,
    Words,
    only,
    text_of,
    wrong,
)

ROWS = "message.output_text.logprobs"
"""Value of ``include`` that asks for log-probs."""
FIELDS = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
"""Field of a chat completion -> field of a response."""
NEEDED = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
}
"""Type of an item -> what it has."""


class ResponsePart(Body):
    """A part of a message, or of what a function has returned."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: Any = None
    logprobs: Any = None


Content = str | Annotated[list[ResponsePart], Field(fail_fast=True)]


class ResponseItem(GivenBack):
    """A message, a call of a function or what it has returned; also an item of an earlier response, as it was."""

    type: Literal["message", "function_call", "function_call_output"] = "message"
    id: str | None = None
    status: str | None = None
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: Content | None = None
    call_id: Words | None = None
    name: Words | None = None
    arguments: str | None = None
    output: Content | None = None

    @model_validator(mode="after")
    def _whole(self) -> "ResponseItem":
        for name in {one: None for needed in NEEDED.values() for one in needed}:
            if (getattr(self, name) is not None) != (name in NEEDED[self.type]):
                raise wrong(name, f"an item of type {self.type} has {', '.join(NEEDED[self.type])}")
        return self


class FunctionKind(Body):
    """Base of what names a function."""

    type: Literal["function"]


class ResponseTool(FunctionSchema, FunctionKind):
    """A function that the model may call."""


class ResponseToolChoice(FunctionName, FunctionKind):
    """The function that must be called."""


class PlainFormat(Body):
    """Any text, or any JSON object."""

    type: Literal["text", "json_object"]


class NamedFormat(SchemaFormat):
    """Text of a JSON schema."""

    type: Literal["json_schema"]


class TextOptions(Body):
    """Form of the text."""

    format: Annotated[PlainFormat | NamedFormat, Field(discriminator="type")] | None = None
    verbosity: Annotated[str | None, AfterValidator(only(None, "medium"))] = None


class ReasoningOptions(Body):
    """effort: variable of the chat template, where it reads one."""

    effort: Words | None = None
    summary: Annotated[str | None, AfterValidator(only(None, "auto"))] = None


class ResponsesBody(TextBody):
    """Body of ``/v1/responses``. store: nothing is stored in either case."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "background": (False,), "conversation": (), "context_management": ([],), "max_tool_calls": (),
        "moderation": (), "prompt": (), "prompt_cache_retention": ("in_memory", "24h"),
        "service_tier": NEUTRAL["service_tier"], "stream_options": ({}, {"include_obfuscation": False}),
        "truncation": ("disabled",),
    }  # fmt: skip
    input: str | Annotated[list[ResponseItem], Field(min_length=1, max_length=4095)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, lt=INT64)] | None = None
    tools: Annotated[list[ResponseTool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST)] | None = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    store: bool | None = None
    previous_response_id: str | None = None

    @model_validator(mode="after")
    def _stateless(self) -> "ResponsesBody":
        if self.previous_response_id is not None:
            message = "this server stores no responses; send the whole conversation in input, and leave this out"
            raise wrong("previous_response_id", message)
        return self

    def chat(self) -> ChatBody:
        """Return the body of a chat completion. Raises HttpError in its field names; see ``FIELDS``."""
        shared = self.model_dump(exclude_none=True, include=ChatBody.model_fields.keys() - {"tools", "tool_choice"})
        found = {**shared, "messages": self._messages(), "max_completion_tokens": self.max_output_tokens}
        if self.stream:
            found["stream_options"] = {"include_usage": True}
        if self.top_logprobs or ROWS in (self.include or ()):
            found["logprobs"] = True
        if self.tools:
            found["tools"] = [
                {"type": "function", "function": tool.model_dump(exclude={"type"})} for tool in self.tools
            ]
        choice = self.tool_choice
        if isinstance(choice, ResponseToolChoice):
            found["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
        elif self.tools or choice != "auto":  # clients name the default beside no tools
            found["tool_choice"] = choice
        if self.reasoning is not None:
            found["reasoning_effort"] = self.reasoning.effort
        if self.text is not None and (form := self.text.format) is not None:
            named_form = {"json_schema": form.model_dump(by_alias=True, exclude={"type"})}
            found["response_format"] = {"type": form.type, **(named_form if form.type == "json_schema" else {})}
        return read(ChatBody, json.dumps(found).encode())

    def _messages(self) -> list[dict[str, Any]]:
        """Return the messages of a chat completion: calls belong to the assistant's message before them."""
        found: list[dict[str, Any]] = []
        if self.instructions is not None:
            found.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*found, {"role": "user", "content": self.input}]
        for item in self.input:
            if item.type == "message":
                found.append({"role": item.role, "content": text_of(item.content)})
            elif item.type == "function_call_output":
                found.append({"role": "tool", "tool_call_id": item.call_id, "content": text_of(item.output)})
            else:
                if not found or found[-1]["role"] != "assistant":
                    found.append({"role": "assistant", "content": None})
                function = {"name": item.name, "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                found[-1].setdefault("tool_calls", []).append(call)
        return found


class ResponseForm(Form):
    """One response while its parts come; a whole answer is one part."""

    last = ()

    def __init__(self, body: ResponsesBody, head: Mapping[str, Any]) -> None:
        self._body, self._head = body, head
        self._output: list[dict[str, Any]] = []
        self._message = ""
        """Id of the message that is being written; "" if there is none."""
        self._text = ""
        self._rows: list[dict[str, Any]] = []
        """Log-probs of all tokens, of which ``_sent`` have been sent."""
        self._sent = 0
        self._status, self._usage = "in_progress", dict[str, Any]()
        self._number = 0

    def whole(self, found: Mapping[str, Any]) -> dict[str, Any]:
        """Return the response of a chat completion."""
        for _ in self._hear(found):
            pass
        return self._response()

    def _begin(self) -> Iterator[dict[str, Any]]:
        for kind in ("created", "in_progress"):
            yield self._event(f"response.{kind}", response=self._response())

    def _failed(self, error: HttpError) -> dict[str, Any]:
        told = error.renamed(FIELDS)
        return self._event("error", message=str(told), code=told.code, param=told.param)

    def _hear(self, part: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        for choice in part["choices"]:
            said = choice["message"] if "message" in choice else choice["delta"]
            self._rows += map(_row, (choice.get("logprobs") or {}).get("content", ()))
            if said.get("content"):
                yield from self._say(said["content"])
            for call in said.get("tool_calls", ()):
                yield from self._end_message("completed")
                yield from self._call(call)
            if choice["finish_reason"] is not None:
                if not self._output and not self._message:
                    yield from self._begin_message()
                self._status = "incomplete" if choice["finish_reason"] == "length" else "completed"
                yield from self._end_message(self._status)
        if "usage" in part:
            self._usage = part["usage"]
            yield self._event(f"response.{self._status}", response=self._response())

    def _begin_message(self) -> Iterator[dict[str, Any]]:
        self._message = f"msg_{uuid.uuid4().hex}"
        yield self._item_event("added", self._written("in_progress", []))
        yield self._part_event("content_part.added", part=_part("", []))

    def _say(self, text: str) -> Iterator[dict[str, Any]]:
        if not self._message:
            yield from self._begin_message()
        self._text += text
        new, self._sent = self._rows[self._sent :], len(self._rows)
        yield self._part_event("output_text.delta", delta=text, logprobs=new)

    def _end_message(self, status: str) -> Iterator[dict[str, Any]]:
        """End the message that is being written, if there is one."""
        if not self._message:
            return
        part = _part(self._text, self._rows)
        yield self._part_event("output_text.done", text=self._text, logprobs=self._rows)
        yield self._part_event("content_part.done", part=part)
        yield from self._add(self._written(status, [part]))
        self._message = ""

    def _call(self, call: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        function = call["function"]
        item = {"type": "function_call", "id": f"fc_{uuid.uuid4().hex}", "call_id": call["id"], **function}
        place = {"item_id": item["id"], "output_index": len(self._output)}
        yield self._item_event("added", {**item, "arguments": "", "status": "in_progress"})
        yield self._event("response.function_call_arguments.delta", **place, delta=function["arguments"])
        yield self._event("response.function_call_arguments.done", **place, arguments=function["arguments"])
        yield from self._add({**item, "status": "completed"})

    def _add(self, item: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield self._item_event("done", item)
        self._output.append(item)

    def _written(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {"type": "message", "id": self._message, "role": "assistant", "status": status, "content": content}

    def _item_event(self, kind: str, item: dict[str, Any]) -> dict[str, Any]:
        return self._event(f"response.output_item.{kind}", output_index=len(self._output), item=item)

    def _part_event(self, kind: str, **more: Any) -> dict[str, Any]:
        place = {"item_id": self._message, "output_index": len(self._output), "content_index": 0}
        return self._event(f"response.{kind}", **place, **more)

    def _event(self, kind: str, **more: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **more}

    def _response(self) -> dict[str, Any]:
        """Return the response as far as it is made."""
        body, cut = self._body, self._status == "incomplete"
        return {
            "id": f"resp_{self._head['id'].partition('-')[2]}",
            "object": "response",
            "created_at": self._head["created"],
            "completed_at": int(time.time()) if self._status == "completed" else None,
            "model": self._head["model"],
            "status": self._status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": [*self._output],
            "usage": _counts(self._usage) if self._usage else None,
            "background": False,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
            "store": False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": {"type": "text"}, **_shown(body.text)},
            "tool_choice": "auto" if body.tool_choice is None else _shown(body.tool_choice),
            "tools": [_shown(tool) for tool in body.tools or ()],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
        }


def _shown(field: Any) -> Any:
    """Return a field of the request as the client gave it."""
    return field.model_dump(by_alias=True, exclude_none=True) if hasattr(field, "model_dump") else field or {}


def _part(text: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": [*rows]}


def _row(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the log-probs of a token. Responses have no null for the bytes of a part of a character."""
    more = {"top_logprobs": [_row(one) for one in found["top_logprobs"]]} if "top_logprobs" in found else {}
    return {**found, "bytes": found["bytes"] or [], **more}


def _counts(usage: Mapping[str, int]) -> dict[str, Any]:
    """Return ``usage``. This server counts neither cached tokens nor those of reasoning."""
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }
