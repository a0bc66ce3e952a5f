"""Body of Anthropic's ``/v1/messages``, which asks for a chat completion, and the form of its answer: blocks and
events."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from tilth.serve.errors import HttpError, read, shortened
from tilth.serve.forms import Form
from tilth.serve.schemas import INT64, Body, ChatBody, DrawnBody, GivenBack, ModelBody, Words, text_of, wrong

FIELDS = {
    "messages": "messages",
    "tools": "tools",
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
}
"""Field of a chat completion -> field of a message, which has other parts."""


class ContentBlock(GivenBack):
    """Base of the blocks of a message. cache_control: read, and does nothing."""

    cache_control: Any = None


class TextBlock(ContentBlock):
    """Text."""

    type: Literal["text"]
    text: str
    citations: Annotated[list[Any], Field(max_length=0)] | None = None


class ToolUseBlock(ContentBlock):
    """A call in a message of the assistant."""

    type: Literal["tool_use"]
    id: Words
    name: Words
    input: dict[str, Any]
    caller: Any = None


Texts = str | Annotated[list[TextBlock], Field(fail_fast=True)]


class ToolResultBlock(ContentBlock):
    """Result of a tool. is_error: the model reads it, as text before the content; see ``said``."""

    type: Literal["tool_result"]
    tool_use_id: Words
    content: Texts = ""
    is_error: bool | None = None

    @property
    def said(self) -> str:
        """Content that the model reads. Chat templates have no place for an error: it begins as answers of tools in
        environments do, "error: ", unless it says so itself."""
        text = text_of(self.content)
        if not self.is_error or text.lstrip().lower().startswith("error"):
            return text
        return f"error: {text}" if text else "error"


AnyBlock = Annotated[TextBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")]


OWNERS = {"tool_use": "assistant", "tool_result": "user"}
"""Type of a block -> who alone has it."""


class BlockMessage(Body):
    """One turn of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[AnyBlock], Field(fail_fast=True)]

    @model_validator(mode="after")
    def _whole(self) -> "BlockMessage":
        for block in self.content if not isinstance(self.content, str) else ():
            if OWNERS.get(block.type, self.role) != self.role:
                raise wrong("content", f"blocks of type {block.type} belong to a message of the {OWNERS[block.type]}")
        return self


class InputTool(Body):
    """A tool that the model may call."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: Any = None
    eager_input_streaming: bool | None = None


class ToolChoice(Body):
    """Calls that are allowed or demanded. name: of the tool, for type tool."""

    type: Literal["auto", "any", "tool", "none"]
    name: Words | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _whole(self) -> "ToolChoice":
        if (self.type == "tool") != (self.name is not None):
            raise wrong("name", "name goes with type='tool', and is needed there")
        return self


class JsonFormat(Body):
    """JSON schema of the text, followed strictly."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Body):
    """Form of the text. effort: variable reasoning_effort of the chat template, where it reads one."""

    format: JsonFormat | None = None
    effort: Words | None = None


class RequestMetadata(Body):
    """Read, and does nothing."""

    user_id: str | None = None


class CountBody(ModelBody):
    """Body of ``/v1/messages/count_tokens``: the fields that make the prompt."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "container": (), "context_management": ({"edits": []},), "inference_geo": (), "mcp_servers": ([],),
        "service_tier": ("auto", "standard_only"), "speed": ("standard",),
        "thinking": ({"type": "disabled"}, {"type": "adaptive"}),
    }  # fmt: skip
    messages: Annotated[list[BlockMessage], Field(min_length=1, max_length=4095)]
    system: Texts | None = None
    tools: Annotated[list[InputTool], Field(max_length=128)] | None = None
    tool_choice: ToolChoice | None = None
    output_config: OutputConfig | None = None
    cache_control: Any = None

    @model_validator(mode="after")
    def _asks(self) -> "CountBody":
        if self.messages[-1].role == "assistant":
            message = "the last message is the assistant's, which this server does not go on with; end with the user's"
            raise wrong("messages", message)
        blocks = [one for message in self.messages if not isinstance(message.content, str) for one in message.content]
        called = set[str]()
        for block in blocks:
            if isinstance(block, ToolUseBlock):
                called.add(block.id)
            elif isinstance(block, ToolResultBlock) and block.tool_use_id not in called:
                raise wrong("messages", f"tool_use_id {shortened(block.tool_use_id)} is of no tool_use block before it")
        return self

    def chat(self) -> ChatBody:
        """Return the body of a chat completion. Raises HttpError in its field names; see ``FIELDS``."""
        return read(ChatBody, json.dumps(self._asked()).encode())

    def _asked(self) -> dict[str, Any]:
        """Return the fields of a chat completion."""
        found: dict[str, Any] = {"model": self.model, "messages": [*self._messages()]}
        if self.tools:
            found["tools"] = [{"type": "function", "function": _function(tool)} for tool in self.tools]
        if (choice := self.tool_choice) is not None:
            if choice.type == "tool":
                found["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
            elif self.tools or choice.type == "any":  # clients name the default beside no tools
                found["tool_choice"] = "required" if choice.type == "any" else choice.type
            if choice.disable_parallel_tool_use:
                found["parallel_tool_calls"] = False
        if (output := self.output_config) is not None:
            found["reasoning_effort"] = output.effort
            if output.format is not None:
                form = {"name": "output", "schema": output.format.schema_}
                found["response_format"] = {"type": "json_schema", "json_schema": form}
        return found

    def _messages(self) -> Iterator[dict[str, Any]]:
        """Yield the messages of a chat completion; results of tools are messages of their own."""
        if self.system is not None:
            yield {"role": "system", "content": text_of(self.system)}
        for message in self.messages:
            if isinstance(message.content, str):
                yield {"role": message.role, "content": message.content}
            elif message.role == "user":
                yield from _asked(message.content)
            else:
                yield _said(message.role, message.content)


class MessagesBody(CountBody, DrawnBody):
    """Body of ``/v1/messages``. return_token_ids: as in a chat completion, which is vLLM's."""

    max_tokens: Annotated[int, Field(ge=1, lt=INT64)]
    top_k: Annotated[int, Field(ge=0, lt=INT64)] | None = None
    stop_sequences: Annotated[list[Words], Field(max_length=16)] | None = None
    metadata: RequestMetadata | None = None
    return_token_ids: bool | None = None

    def _asked(self) -> dict[str, Any]:
        same = {"max_tokens", "temperature", "top_p", "top_k", "stream", "return_token_ids"}
        found = {**super()._asked(), **self.model_dump(include=same, exclude_none=True)}
        if self.stop_sequences:
            found["stop"] = self.stop_sequences
        if self.stream:
            found["stream_options"] = {"include_usage": True}
        return found


def _function(tool: InputTool) -> dict[str, Any]:
    return {"name": tool.name, "description": tool.description, "parameters": tool.input_schema, "strict": tool.strict}


def _said(role: str, blocks: Sequence[AnyBlock]) -> dict[str, Any]:
    """Return a message of the assistant or of the system."""
    text = "".join(one.text for one in blocks if isinstance(one, TextBlock))
    found: dict[str, Any] = {"role": role, "content": text}
    calls = [
        {"id": one.id, "type": "function", "function": {"name": one.name, "arguments": json.dumps(one.input)}}
        for one in blocks
        if isinstance(one, ToolUseBlock)
    ]
    return {**found, "tool_calls": calls} if calls else found


def _asked(blocks: Sequence[AnyBlock]) -> Iterator[dict[str, Any]]:
    """Yield what a message of the user says and what tools have returned, in order."""
    texts: list[str] = []
    for block in blocks:
        if isinstance(block, TextBlock):
            texts.append(block.text)
        elif isinstance(block, ToolResultBlock):
            if texts:
                yield {"role": "user", "content": "".join(texts)}
                texts = []
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": block.said}
    if texts or not blocks:
        yield {"role": "user", "content": "".join(texts)}


REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
"""``finish_reason`` of a chat completion -> ``stop_reason`` of a message."""


class MessageForm(Form):
    """One message while its parts come; a whole answer is one part."""

    last = ()

    def __init__(self, body: MessagesBody, head: Mapping[str, Any]) -> None:
        self._id, self._model = f"msg_{head['id'].partition('-')[2]}", head["model"]
        self._content: list[dict[str, Any]] = []
        """Blocks, of which the last one may be open."""
        self._begun = self._open = False
        self._reason: str | None = None
        self._sequence: str | None = None
        self._usage = head["usage"]
        self._more: dict[str, Any] = {}
        """Token ids, where the request asks for them."""

    def whole(self, found: Mapping[str, Any]) -> dict[str, Any]:
        """Return the message of a chat completion."""
        for _ in self._hear(found):
            pass
        return {**self._message(), "content": self._content, **self._more}

    def _hear(self, part: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        if not self._begun:
            self._begun, self._more = True, {k: v for k, v in part.items() if k == "prompt_token_ids"}
            yield {"type": "message_start", "message": {**self._message(), **self._more}}
        for choice in part["choices"]:
            said = choice["message"] if "message" in choice else choice["delta"]
            if "token_ids" in choice:
                self._more["token_ids"] = [*self._more.get("token_ids", ()), *choice["token_ids"]]
            if said.get("content"):
                yield from self._say(said["content"])
            for call in said.get("tool_calls", ()):
                yield from self._end_block()
                yield from self._call(call)
            if choice["finish_reason"] is not None:
                yield from self._end_block()
                self._reason = REASONS[choice["finish_reason"]]
                if (sequence := choice.get("stop_reason")) is not None and self._reason == "end_turn":
                    self._reason, self._sequence = "stop_sequence", sequence
        if "usage" in part:
            self._usage = part["usage"]
            ids = {k: v for k, v in self._more.items() if k == "token_ids"}
            delta = {"stop_reason": self._reason, "stop_sequence": self._sequence}
            yield {"type": "message_delta", "delta": delta, "usage": _counts(self._usage), **ids}
            yield {"type": "message_stop"}

    def _failed(self, error: HttpError) -> dict[str, Any]:
        return error.renamed(FIELDS).anthropic

    def _say(self, text: str) -> Iterator[dict[str, Any]]:
        if not self._open:
            yield self._begin_block({"type": "text", "text": ""})
        self._content[-1]["text"] += text
        yield self._block_event("delta", delta={"type": "text_delta", "text": text})

    def _call(self, call: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        written = call["function"]["arguments"]
        yield self._begin_block({"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": {}})
        self._content[-1]["input"] = json.loads(written)
        yield self._block_event("delta", delta={"type": "input_json_delta", "partial_json": written})
        yield from self._end_block()

    def _begin_block(self, block: dict[str, Any]) -> dict[str, Any]:
        self._content.append({**block})
        self._open = True
        return self._block_event("start", content_block=block)

    def _end_block(self) -> Iterator[dict[str, Any]]:
        """End the block that is open, if there is one."""
        if self._open:
            self._open = False
            yield self._block_event("stop")

    def _block_event(self, kind: str, **more: Any) -> dict[str, Any]:
        return {"type": f"content_block_{kind}", "index": len(self._content) - 1, **more}

    def _message(self) -> dict[str, Any]:
        """Return the message without its blocks."""
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": self._reason,
            "stop_sequence": self._sequence,
            "usage": _counts(self._usage),
        }


def _counts(usage: Mapping[str, int]) -> dict[str, int]:
    """Return ``usage``. This server counts no cached tokens."""
    cached = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    return {"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"], **cached}
