"""Body of ``/v1/responses``, and the body of a chat completion that asks for the same."""

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, model_validator

from tilth.serve.errors import read
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
