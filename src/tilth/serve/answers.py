"""Answer to one HTTP request: its completions in the engine client, as one object or as a stream of events."""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from tilth.core.trajectory import Trajectory
from tilth.engines.client import EngineClient
from tilth.engines.completion import Completion, Delta
from tilth.engines.request import Request
from tilth.serve.app import gathered
from tilth.serve.choices import ChatChoice, TextChoice
from tilth.serve.errors import HttpError, http_error
from tilth.serve.metrics import ServerMetrics


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
