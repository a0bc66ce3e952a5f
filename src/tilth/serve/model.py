"""Model that a server speaks for: its names, its tokenizer, its templates, and requests to its engine."""

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tilth.core.errors import DataError
from tilth.data.template import PlainTemplate, Template
from tilth.data.tokenizer import Tokenizer
from tilth.engines.request import Request, SamplingParams
from tilth.serve.errors import HttpError, shortened
from tilth.serve.schemas import Message, SampledBody, ToolSchema, listed, plain

DEFAULT_TOKENS = 16
"""Longest completion of a text without ``max_tokens``, as in OpenAI's interface."""


@dataclass
class ServedModel:
    """A model and its adapters. chat: template of conversations, None without one. stop: default stop strings. origin:
    another name of the model, which requests may give too. pooling: of embeddings, "last" or "mean"."""

    name: str
    tokenizer: Tokenizer
    vocab_size: int
    max_length: int
    chat: Template | None = None
    stop: tuple[str, ...] = ()
    adapters: list[str] = field(default_factory=list)
    origin: str = ""
    pooling: str = "last"

    def __post_init__(self) -> None:
        self.plain = PlainTemplate(self.tokenizer)

    def adapter(self, model: str) -> str:
        """Return the adapter that a request's ``model`` names, "" for the base. Raises HttpError 404."""
        if model in (self.name, self.origin):
            return ""
        if model in self.adapters:
            return model
        known = ", ".join([self.name, *self.adapters])
        raise HttpError(404, f"there is no model {model!r}; this server has {known}", "model", "model_not_found")

    def texts(self, texts: Any, param: str) -> list[list[int]]:
        """Return the token ids of each text. texts: ``schemas.Texts``, of the field ``param``. Raises HttpError 400."""
        given = [texts] if isinstance(texts, str) or isinstance(texts[0], int) else texts
        found = [self.encode(one, param=param) if isinstance(one, str) else list(one) for one in given]
        for number, ids in enumerate(found):
            where = f"{param} {number}" if len(found) > 1 else param
            if not ids:
                raise HttpError(400, f"{where} has no tokens; it must have at least one", param)
            self.check_ids(ids, param, where)
        return found

    def check_ids(self, ids: Sequence[int], param: str, where: str) -> None:
        """Raise HttpError 400 for a token that the model does not have."""
        if ids and (most := max(ids)) >= self.vocab_size:
            message = f"{where}: token {most} is outside the vocabulary of {self.vocab_size}"
            raise HttpError(400, message, param)

    def encode(self, text: str, special: bool = True, param: str = "prompt") -> list[int]:
        """Return the token ids of a text. Raises HttpError 400."""
        try:
            return self.tokenizer.encode(text, special)
        except DataError as error:
            raise HttpError(400, str(error), param, _code(error)) from None

    def conversation(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema] | None, variables: Mapping[str, Any]
    ) -> list[int]:
        """Return the token ids that the assistant continues. variables: further ones of the template. Raises HttpError
        400."""
        if self.chat is None:
            message = f"model {self.name} has no chat template: use /v1/completions, or tilth serve --template chatml"
            raise HttpError(400, message, "messages", "no_chat_template")
        schemas = [listed(tool) for tool in tools or ()]
        try:
            return self.chat.begin([plain(one) for one in messages], schemas, variables)
        except DataError as error:
            if error.key == "template.tools":
                message = (
                    "lists no tools: send none, or start the server with tilth serve --template chatml or FILE.jinja"
                )
                raise HttpError(400, f"the chat template of {self.name} {message}", "tools", error.key) from None
            if error.key.startswith("template.variables."):
                name = error.key.rpartition(".")[2]
                param = name if name == "reasoning_effort" else f"chat_template_kwargs.{name}"
                raise HttpError(400, str(error), param, "template.variables") from None
            raise HttpError(400, str(error), "messages", _code(error)) from None

    def params(self, body: SampledBody, longest: int, prompt: int, *, chat: bool, schema: str = "") -> SamplingParams:
        """Return how a completion of a prompt of ``prompt`` tokens is sampled. Raises HttpError 400."""
        room = self.max_length - prompt
        if room < 1 or longest > room:
            what = f"the prompt has {prompt} tokens and up to {longest} more are asked for"
            message = f"{what}, but the context of this model is {self.max_length} tokens"
            param = "max_tokens" if room >= 1 else "messages" if chat else "prompt"
            raise HttpError(400, message, param, "context_length_exceeded")
        if (body.min_tokens or 0) > longest:
            message = f"min_tokens: {body.min_tokens} are more than the {longest} of max_tokens"
            raise HttpError(400, message, "min_tokens")
        schema = schema or _schema(body)
        if body.min_tokens and schema:
            raise HttpError(400, "min_tokens: a text of a schema ends where the schema says", "min_tokens")
        ends = self.chat.stops if chat and self.chat is not None else self.plain.stops
        stops = [*(() if body.ignore_eos else ends), *(body.stop_token_ids or ())]
        self.check_ids(stops, "stop_token_ids", "stop_token_ids")
        bias = {_token(name): value for name, value in (body.logit_bias or {}).items()}
        self.check_ids(list(bias), "logit_bias", "logit_bias")
        given = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
        return SamplingParams(
            max_tokens=longest,
            temperature=1.0 if body.temperature is None else body.temperature,
            top_k=max(body.top_k or 0, 0),
            top_p=1.0 if body.top_p is None else body.top_p,
            min_p=body.min_p or 0.0,
            stop=given or self.stop,
            stop_tokens=tuple(dict.fromkeys(stops)),
            schema=schema,
            min_tokens=body.min_tokens or 0,
            logit_bias=tuple(bias.items()),
            presence_penalty=body.presence_penalty or 0.0,
            frequency_penalty=body.frequency_penalty or 0.0,
        )

    def requests(self, body: SampledBody, ids: list[int], params: SamplingParams, likeliest: int) -> list[Request]:
        """Return ``n`` requests of one prompt, each with random numbers of its own; equal ones for an equal seed."""
        seed = secrets.randbits(63) if body.seed is None else body.seed
        more: dict[str, Any] = {"adapter": self.adapter(body.model), "likeliest": min(likeliest, self.vocab_size)}
        return [Request(i, ids, params, draws=(seed, i), **more) for i in range(body.n or 1)]


def _token(name: str) -> int:
    if not (name.isascii() and name.isdigit() and len(name) < 20):
        raise HttpError(400, f"logit_bias: {shortened(name)} is not the number of a token", "logit_bias")
    return int(name)


def _code(error: DataError) -> str | None:
    return "context_length_exceeded" if error.key == "tokenizer.most" else error.key


def _schema(body: SampledBody) -> str:
    wanted = body.response_format
    if wanted is None or wanted.type == "text":
        return ""
    return json.dumps({"type": "object"} if wanted.json_schema is None else wanted.json_schema.schema_)
