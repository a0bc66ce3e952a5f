"""OpenAI's interface over an engine client: completions, chat completions, responses, models; Anthropic's messages;
vLLM's tokenize and detokenize."""

import asyncio
import base64
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from fastapi import FastAPI
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from tilth.core.trajectory import Trajectory
from tilth.engines.client import EngineClient
from tilth.engines.completion import Completion, Delta
from tilth.engines.request import Request, TextScores
from tilth.plan.packing import portions
from tilth.serve.app import event_stream, gathered, unless_gone
from tilth.serve.choices import ChatChoice, TextChoice, called_schema, hears_calls
from tilth.serve.dialects import COUNTING, COUNTS, Dialect, add_turns
from tilth.serve.errors import HttpError, http_error, read
from tilth.serve.forms import Form
from tilth.serve.metrics import ServerMetrics
from tilth.serve.model import DEFAULT_TOKENS, ServedModel
from tilth.serve.schemas import ChatBody, CompletionBody, DetokenizeBody, EmbeddingsBody, SampledBody, TokenizeBody


@dataclass
class HttpAnswer:
    """Requests of one HTTP request, their choices in order, and what all chunks have.

    usage: True to end a stream with the numbers of tokens. more: fields of the whole answer, and of a stream's first
    chunk.
    """

    kind: str
    model: str
    requests: list[Request]
    choices: Sequence[ChatChoice | TextChoice]
    prompts: int
    """Tokens of all prompts."""
    prefix: str = "cmpl"
    usage: bool = False
    more: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.id, self.created = f"{self.prefix}-{uuid.uuid4().hex}", int(time.time())
        self.begin = time.perf_counter()

    def head(self, kind: str) -> dict[str, Any]:
        """Return the fields that every object has."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def counts(self, tokens: int) -> dict[str, int]:
        """Return ``usage``."""
        return {"prompt_tokens": self.prompts, "completion_tokens": tokens, "total_tokens": self.prompts + tokens}


def check_count(room: EngineClient, count: int) -> None:
    """Raise HttpError 400 for more completions than the engine client can ever have, before any of them is made."""
    if count > room.most:
        raise HttpError(400, f"{count} completions at once are more than the {room.most} of this server", "n")


def admit(room: EngineClient, answer: HttpAnswer) -> list[Completion]:
    """Take the requests of an answer. Raises HttpError 429."""
    try:
        return room.admit(answer.requests)
    except Exception as error:  # as the answer's form has it
        raise http_error(error) from error


def check_sound(trajectory: Trajectory) -> None:
    """Raise HttpError for a completion that a schema does not let go on."""
    if trajectory.finish == "error":
        message = (
            "the text cannot go on as the schema demands: the model's vocabulary has no token for it, or too many "
            "branches of the schema are open at once; ask with fewer alternatives"
        )
        raise HttpError(400, message, "response_format", "schema_stuck")


async def in_one(room: EngineClient, answer: HttpAnswer, metrics: ServerMetrics) -> dict[str, Any]:
    """Return the whole answer; cancelled, it ends its requests. Raises HttpError."""
    completions = admit(room, answer)
    try:
        found = await gathered([completion.whole() for completion in completions])
    except Exception as error:
        raise http_error(error) from error
    finally:
        for completion in completions:
            completion.close()
    for trajectory in found:
        check_sound(trajectory)
    tokens = sum(trajectory.completion_length for trajectory in found)
    metrics.prompt_tokens.inc(answer.prompts)
    metrics.completion_tokens.inc(tokens)
    choices = [choice.whole(trajectory) for choice, trajectory in zip(answer.choices, found)]
    return {**answer.head(answer.kind), "choices": choices, "usage": answer.counts(tokens), **answer.more}


async def chunks(
    answer: HttpAnswer, completions: list[Completion], metrics: ServerMetrics
) -> AsyncGenerator[dict[str, Any]]:
    """Yield the chunks of a stream; closed, it ends its requests. Raises HttpError."""
    kind = "chat.completion.chunk" if answer.prefix == "chatcmpl" else answer.kind
    head, tokens, begun = answer.head(kind), 0, False
    more = answer.more
    try:
        for choice in answer.choices:
            for found in choice.first():
                yield {**head, "choices": [found], **more}
                more = {}
        async for index, delta in _merged(completions):
            tokens += len(delta.tokens)
            if not begun:
                begun = True
                metrics.first_token.observe(time.perf_counter() - answer.begin)
            if delta.whole is not None:
                check_sound(delta.whole)
            for found in answer.choices[index].delta(delta):
                yield {**head, "choices": [found], **more}
                more = {}
        if answer.usage:
            yield {**head, "choices": [], "usage": answer.counts(tokens)}
    except Exception as error:  # as the stream's form has it
        raise http_error(error) from error
    finally:
        metrics.prompt_tokens.inc(answer.prompts)
        metrics.completion_tokens.inc(tokens)
        for completion in completions:
            completion.close()


async def _merged(completions: list[Completion]) -> AsyncIterator[tuple[int, Delta]]:
    """Yield what comes of several completions, in the order in which it comes."""
    if len(completions) == 1:
        async for delta in completions[0]:
            yield 0, delta
        return
    found: asyncio.Queue[tuple[int, Delta] | Exception | None] = asyncio.Queue()
    tasks = [asyncio.create_task(_forward(i, one, found)) for i, one in enumerate(completions)]
    try:
        left = len(tasks)
        while left:
            come = await found.get()
            if isinstance(come, Exception):
                raise come
            if come is None:
                left -= 1
            else:
                yield come
    finally:
        for task in tasks:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


async def _forward(index: int, completion: Completion, found: asyncio.Queue[Any]) -> None:
    """Put the deltas of a completion, then None; or its error."""
    try:
        async for delta in completion:
            found.put_nowait((index, delta))
        found.put_nowait(None)
    except Exception as error:  # noqa: BLE001 - raised by the one who takes it
        found.put_nowait(error)


LONG = 1 << 16
"""Bytes of a body whose texts are encoded in a thread, so that others are served meanwhile."""
SCORED = 4096
"""Tokens that are scored between two rounds: completions of others wait meanwhile."""


T = TypeVar("T")


@dataclass
class OpenAI:
    """Endpoints of one model."""

    room: EngineClient
    model: ServedModel
    metrics: ServerMetrics

    def __post_init__(self) -> None:
        self._encoder = ThreadPoolExecutor(1, "encoder")  # one: long texts wait for each other, not the engine for them

    def add_to(self, app: FastAPI) -> None:
        """Add the routes."""
        app.post("/v1/completions")(self.completions)
        add_turns(app, self._turn)
        app.post(COUNTS)(self.count_tokens)
        app.post("/v1/embeddings")(self.embeddings)
        app.get("/v1/models")(self.models)
        app.get("/v1/models/{name:path}")(self.one_model)
        app.post("/tokenize")(self.tokenize)
        app.post("/detokenize")(self.detokenize)

    async def models(self) -> Response:
        """List the base and its adapters."""
        return JSONResponse(
            {"object": "list", "data": [self._card(n) for n in (self.model.name, *self.model.adapters)]}
        )

    async def one_model(self, name: str) -> Response:
        """Describe one of them."""
        self.model.adapter(name)
        return JSONResponse(self._card(name))

    def _card(self, name: str) -> dict[str, Any]:
        parent = self.model.name if name in self.model.adapters else None
        card = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "tilth"}
        return {**card, "max_model_len": self.model.max_length, "root": name, "parent": parent}

    async def completions(self, request: HttpRequest) -> Response:
        """Continue texts or token ids."""
        body = read(CompletionBody, await request.body())
        check_count(self.room, _texts(body.prompt) * (body.n or 1))
        adapter = self.model.adapter(body.model)
        prompts = await self._encoded(request, self.model.texts, body.prompt, "prompt")
        longest = DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens
        if not longest and not body.echo:
            raise HttpError(400, "max_tokens: 0 is for echo=true; ask for at least 1", "max_tokens")
        top = body.logprobs or 0
        self._check_scores(top > 0 or bool(body.echo and body.logprobs is not None), "logprobs")
        asked = [
            self.model.requests(body, ids, self.model.params(body, max(longest, 1), len(ids), chat=False), top)
            for ids in prompts
        ]
        scores: list[TextScores | None] = [None] * len(prompts)
        if body.echo and body.logprobs is not None:
            scores = [*await unless_gone(request, self._in_parts("score_texts", prompts, top, adapter))]
        choices = [
            TextChoice(self.model.tokenizer, at * len(each) + one.id, one, body, scores[at])
            for at, each in enumerate(asked)
            for one in each
        ]
        flat = [one for each in asked for one in each]
        tokens = sum(map(len, prompts))
        answer = HttpAnswer("text_completion", body.model, flat, choices, tokens, usage=_wants_usage(body))
        if not longest:
            whole = {"choices": [one.silently() for one in choices], "usage": answer.counts(0)}
            return JSONResponse({**answer.head("text_completion"), **whole})
        return await self._respond(request, answer, Form(body, {}), bool(body.stream))

    async def _turn(self, request: HttpRequest, dialect: Dialect) -> Response:
        """Answer a conversation, whatever the interface, by the body of a chat completion."""
        asked, body = dialect.read(await request.body())
        with dialect.renaming():
            answer = await self._conversed(request, body)
            form = dialect.form(asked, {**answer.head(answer.kind), "usage": answer.counts(0)})
            return await self._respond(request, answer, form, bool(body.stream))

    async def count_tokens(self, request: HttpRequest) -> Response:
        """Return the number of tokens of a prompt, Anthropic's."""
        _, body = COUNTING.read(await request.body())
        with COUNTING.renaming():
            return JSONResponse({"input_tokens": len(await self._prompt(request, body))})

    async def _conversed(self, request: HttpRequest, body: ChatBody) -> HttpAnswer:
        """Return the answer to a conversation, before it is admitted. Raises HttpError."""
        check_count(self.room, body.n or 1)
        ids = await self._prompt(request, body)
        given = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        if given == 0:
            raise HttpError(400, "max_tokens: ask for at least 1", "max_tokens")
        longest = max(self.model.max_length - len(ids), 1) if given is None else given
        top = body.top_logprobs or 0
        self._check_scores(top > 0, "top_logprobs")
        params = self.model.params(body, longest, len(ids), chat=True, schema=called_schema(body))
        asked = self.model.requests(body, ids, params, top)
        choices = [ChatChoice(self.model.tokenizer, one, body, hears_calls(body)) for one in asked]
        more = {"prompt_token_ids": ids} if body.return_token_ids else {}
        return HttpAnswer("chat.completion", body.model, asked, choices, len(ids), "chatcmpl", _wants_usage(body), more)

    async def _prompt(self, request: HttpRequest, body: ChatBody) -> list[int]:
        """Return the token ids that the assistant continues. Raises HttpError."""
        self.model.adapter(body.model)
        shown = None if body.tool_choice == "none" else body.tools
        variables = dict(body.chat_template_kwargs or {})
        if body.reasoning_effort is not None:
            variables["reasoning_effort"] = body.reasoning_effort
        return await self._encoded(request, self.model.conversation, body.messages, shown, variables)

    async def _respond(self, request: HttpRequest, answer: HttpAnswer, form: Form, stream: bool) -> Response:
        if stream:
            return event_stream(form.events(chunks(answer, admit(self.room, answer), self.metrics)))
        return JSONResponse(form.whole(await unless_gone(request, in_one(self.room, answer, self.metrics))))

    async def _encoded(self, request: HttpRequest, encode: Callable[..., T], *given: Any) -> T:
        """Return what ``encode`` returns; for a long body it works in a thread."""
        if len(await request.body()) <= LONG:
            return encode(*given)
        return await asyncio.get_running_loop().run_in_executor(self._encoder, encode, *given)

    def _check_scores(self, wanted: bool, param: str) -> None:
        if wanted and not self.room.abilities.scores:
            message = f"{param}: this engine gives log-probs of its own tokens only, and no embeddings"
            raise HttpError(400, message, param)

    async def _in_parts(self, method: str, texts: list[list[int]], *arguments: Any) -> list[Any]:
        """Return what a method of the role returns for each text, some texts at a time. Raises HttpError."""
        found: list[Any] = []
        try:
            for part in portions(texts, len, SCORED):
                found += await self.room.call(method, part, *arguments, idempotent=True)
        except Exception as error:
            raise http_error(error) from error
        return found

    async def embeddings(self, request: HttpRequest) -> Response:
        """Return the pooled hidden state of each text, of length 1."""
        body = read(EmbeddingsBody, await request.body())
        adapter = self.model.adapter(body.model)
        texts = await self._encoded(request, self.model.texts, body.input, "input")
        if (longest := max(map(len, texts))) > self.model.max_length:
            message = f"input has {longest} tokens, but the context of this model is {self.model.max_length} tokens"
            raise HttpError(400, message, "input", "context_length_exceeded")
        self._check_scores(True, "input")
        found = await unless_gone(request, self._in_parts("embed_texts", texts, self.model.pooling, adapter))
        tokens = sum(map(len, texts))
        self.metrics.prompt_tokens.inc(tokens)
        if (body.dimensions or 1) > len(found[0]):
            message = f"dimensions={body.dimensions}: embeddings of this model have {len(found[0])}"
            raise HttpError(400, message, "dimensions")
        rows = [_embedding(number, one[: body.dimensions], body) for number, one in enumerate(found)]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return JSONResponse({"object": "list", "data": rows, "model": body.model, "usage": usage})

    async def tokenize(self, request: HttpRequest) -> Response:
        """Return the token ids of a text or a conversation."""
        body = read(TokenizeBody, await request.body())
        if body.model is not None:
            self.model.adapter(body.model)
        if body.messages is not None:
            ids = await self._encoded(
                request, self.model.conversation, body.messages, body.tools, body.chat_template_kwargs or {}
            )
        else:
            ids = await self._encoded(request, self.model.encode, body.prompt or "", body.add_special_tokens)
        return JSONResponse({"tokens": ids, "count": len(ids), "max_model_len": self.model.max_length})

    async def detokenize(self, request: HttpRequest) -> Response:
        """Return the text of token ids, special tokens included."""
        body = read(DetokenizeBody, await request.body())
        if body.model is not None:
            self.model.adapter(body.model)
        self.model.check_ids(body.tokens, "tokens", "tokens")
        return JSONResponse({"prompt": self.model.tokenizer.decode(body.tokens, special=True)})


def _texts(given: Any) -> int:
    """Return the number of texts of a field. given: ``schemas.Texts``."""
    return 1 if isinstance(given, str) or isinstance(given[0], int) else len(given)


def _wants_usage(body: SampledBody) -> bool:
    return body.stream_options is not None and body.stream_options.include_usage


def _embedding(number: int, values: np.ndarray, body: EmbeddingsBody) -> dict[str, Any]:
    """Return one row of an answer, of length 1 again. base64: of float32, little-endian."""
    values = (values / np.linalg.norm(values)).astype("<f4")
    as_text = body.encoding_format == "base64"
    shown = base64.b64encode(values.tobytes()).decode() if as_text else values.tolist()
    return {"object": "embedding", "index": number, "embedding": shown}
