"""Bodies of requests: OpenAI's completions and chat completions, with the further fields that vLLM has; messages and
tools in the form that chat templates take. Imports no torch."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from tilth.config.parts import TINY
from tilth.envs.calls import ToolCall
from tilth.serve.errors import HttpError, shortened

MOST = 20
"""Most alternatives of a token that are reported, as in OpenAI's interface."""
INT64 = 2**63

Words = Annotated[str, Field(min_length=1)]
TokenId = Annotated[int, Field(ge=0, lt=INT64)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
"""Token ids, of which the first wrong one is reported: bodies have room for millions."""

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,), "allowed_token_ids": (), "audio": (), "bad_words": ([],), "best_of": (1,),
    "continue_final_message": (False,), "function_call": (), "functions": (), "include_stop_str_in_output": (False,),
    "length_penalty": (1, 1.0), "modalities": (["text"],), "prediction": (),
    "priority": (0,), "prompt_logprobs": (), "repetition_penalty": (1, 1.0), "service_tier": ("auto", "default"),
    "skip_special_tokens": (True,), "spaces_between_special_tokens": (True,), "store": (False,), "suffix": ("",),
    "truncate_prompt_tokens": (), "use_beam_search": (False,), "web_search_options": (),
}  # fmt: skip
"""Fields of OpenAI and vLLM that are taken with these values or null, which leave the answer as it is without them."""


def only(*allowed: Any) -> Callable[[Any], Any]:
    """Return a validator that refuses everything else, since it would change the result."""

    def check(value: Any) -> Any:
        if value not in allowed:
            names = " or ".join("null" if one is None else repr(one) for one in allowed)
            raise ValueError(f"this server supports only {names}")
        return value

    return check


def _representable(value: float) -> float:
    """Refuse a temperature that is impossible in fp32: one request must not break those of others."""
    if 0 < value < TINY:
        raise ValueError(f"it must be 0, or at least {TINY}")
    return value


def wrong(field: str, message: str) -> PydanticCustomError:
    """Return the error of a field that does not fit the others."""
    return PydanticCustomError("combination", "{message}", {"field": field, "message": message})


class Body(BaseModel):
    """Base of all bodies: unknown fields and values of another type are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())


class GivenBack(Body):
    """Base of what clients send back with all the fields that an answer had: null is left out."""

    @model_validator(mode="before")
    @classmethod
    def _without_null(cls, given: Any) -> Any:
        return {k: v for k, v in given.items() if v is not None} if isinstance(given, dict) else given


def text_of(content: Any) -> str:
    """Return the text of content, which may come in parts."""
    return content if isinstance(content, str) else "".join(part.text for part in content or ())


class StreamOptions(Body):
    """include_usage: a last chunk has the numbers of tokens."""

    include_usage: bool = False
    continuous_usage_stats: Annotated[bool | None, AfterValidator(only(None, False))] = None
    include_obfuscation: Annotated[bool | None, AfterValidator(only(None, False))] = None


class SchemaFormat(Body):
    """A named JSON schema, followed strictly in any case."""

    name: Words
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Body):
    """Form of the text."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaFormat | None = None

    @model_validator(mode="after")
    def _whole(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise wrong("json_schema", "json_schema goes with type='json_schema', and is needed there")
        return self


class ModelBody(Body):
    """Body of a request to a model. neutral: field that this server does not support -> values besides null with which
    it changes nothing."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = NEUTRAL
    model: Words

    @model_validator(mode="before")
    @classmethod
    def _without_neutral(cls, body: Any) -> Any:
        """Leave out fields that change nothing, and refuse them with other values, which would."""
        for name, taken in cls.neutral.items() if isinstance(body, dict) else ():
            value = body.get(name)
            if value is not None and not any(type(value) is type(one) and value == one for one in taken):
                names = " or ".join([*map(repr, taken), "null"])
                raise wrong(name, f"this server supports only {names}, not {shortened(value)}")
        return {k: v for k, v in body.items() if k not in cls.neutral} if isinstance(body, dict) else body


class DrawnBody(ModelBody):
    """Fields of all requests for text, by whatever interface."""

    temperature: Annotated[float, Field(ge=0), AfterValidator(_representable)] | None = None
    top_p: Annotated[float, Field(ge=TINY, le=1)] | None = None
    stream: bool | None = None


class TextBody(DrawnBody):
    """Fields that all of OpenAI's requests for text share."""

    user: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class SampledBody(TextBody):
    """Fields that completions and chat completions share."""

    top_k: Annotated[int, Field(ge=-1, lt=INT64)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    seed: Annotated[int, Field(ge=-INT64, lt=INT64)] | None = None
    stop: Words | Annotated[list[Words], Field(max_length=16)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=64)] | None = None
    ignore_eos: bool | None = None
    max_tokens: Annotated[int, Field(ge=0, lt=INT64)] | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=INT64)] | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    return_token_ids: bool | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None

    @model_validator(mode="after")
    def _streams(self) -> "SampledBody":
        if self.stream_options is not None and not self.stream:
            raise wrong("stream_options", "stream_options needs stream=true")
        return self


Texts = (
    str
    | Annotated[TokenIds, Field(min_length=1)]
    | Annotated[list[str], Field(min_length=1, max_length=1024)]
    | Annotated[list[Annotated[TokenIds, Field(min_length=1)]], Field(min_length=1, max_length=1024)]
)
"""A text, token ids, or several of one kind."""


class CompletionBody(SampledBody):
    """Body of ``/v1/completions``."""

    prompt: Texts
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MOST)] | None = None


class TextPart(Body):
    """A part of a message."""

    type: Literal["text"]
    text: str


class CalledFunction(Body):
    """A call's function. arguments: JSON."""

    name: Words
    arguments: str


class MessageCall(Body):
    """A call in a message of the assistant."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Body):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: list[MessageCall] | None = None
    tool_call_id: str | None = None
    refusal: Annotated[None, AfterValidator(only(None))] = None
    annotations: Any = None
    audio: Annotated[None, AfterValidator(only(None))] = None
    function_call: Annotated[None, AfterValidator(only(None))] = None

    @model_validator(mode="after")
    def _whole(self) -> "Message":
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise wrong("content", "content is needed, but in a message of the assistant with tool_calls")
        if self.tool_calls and self.role != "assistant":
            raise wrong("tool_calls", "tool_calls belong to a message of the assistant")
        return self


class FunctionSchema(Body):
    """A function that the model may call."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolSchema(Body):
    """A tool that the model may call."""

    type: Literal["function"]
    function: FunctionSchema


class FunctionName(Body):
    """Name of a function."""

    name: Words


class NamedTool(Body):
    """The tool that must be called."""

    type: Literal["function"]
    function: FunctionName


class ChatBody(SampledBody):
    """Body of ``/v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=4096)]
    max_completion_tokens: Annotated[int, Field(ge=1, lt=INT64)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST)] | None = None
    tools: Annotated[list[ToolSchema], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Words | None = None

    @model_validator(mode="after")
    def _whole(self) -> "ChatBody":
        if self.top_logprobs and not self.logprobs:
            raise wrong("top_logprobs", "top_logprobs needs logprobs=true")
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise wrong("max_tokens", "max_tokens and max_completion_tokens differ; give one of them")
        if self.tool_choice not in (None, "none") and not self.tools:
            raise wrong("tool_choice", "tool_choice needs tools")
        return self

    def chat(self) -> "ChatBody":
        """Return the body of a chat completion that asks for the same."""
        return self


class EmbeddingsBody(Body):
    """Body of ``/v1/embeddings``."""

    model: Words
    input: Texts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    user: str | None = None


class TokenizeBody(Body):
    """Body of ``/tokenize``, vLLM's: a text, or a conversation by the chat template."""

    model: Words | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=4096)] | None = None
    tools: list[ToolSchema] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _one(self) -> "TokenizeBody":
        if (self.prompt is None) == (self.messages is None):
            raise wrong("prompt", "give prompt or messages, one of them")
        return self


class DetokenizeBody(Body):
    """Body of ``/detokenize``, vLLM's."""

    model: Words | None = None
    tokens: TokenIds


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
