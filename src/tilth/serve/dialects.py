"""Interfaces by which clients ask for a turn of the assistant: the body of a request, which asks for a chat completion,
and the form of its answer. Imports no torch."""

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from typing import Any, NamedTuple, Protocol

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from tilth.serve import anthropic_body, response_body
from tilth.serve.anthropic import MessageForm
from tilth.serve.app import DONE, event
from tilth.serve.errors import HttpError, read
from tilth.serve.responses import ResponseForm
from tilth.serve.schemas import Body, ChatBody


class Form(Protocol):
    """Form of one answer."""

    def whole(self, found: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer for a whole chat completion."""
        ...

    def events(self, parts: AsyncGenerator[dict[str, Any]]) -> AsyncIterator[str]:
        """Yield the events of a stream of a chat completion's chunks. An error is the last event."""
        ...


class PlainForm:
    """Form of chat completions, and of completions: as they are."""

    def __init__(self, body: Body, head: Mapping[str, Any]) -> None:
        pass

    def whole(self, found: Mapping[str, Any]) -> dict[str, Any]:
        """Return it as it is."""
        return {**found}

    async def events(self, parts: AsyncGenerator[dict[str, Any]]) -> AsyncIterator[str]:
        """Yield the chunks. An error is the last event, as the status has been sent."""
        async with aclosing(parts):
            try:
                async for part in parts:
                    yield event(part)
                yield DONE
            except HttpError as error:
                yield event(error.body)


class Dialect(NamedTuple):
    """One interface. body: has ``chat``, the body of a chat completion that asks for the same; form: made of the body
    and of id, time, model and usage of the chat completion; fields: of a chat completion -> of the body, where their
    names differ."""

    body: Any
    form: Callable[[Any, Mapping[str, Any]], Form]
    fields: Mapping[str, str]

    def read(self, body: bytes) -> tuple[Any, ChatBody]:
        """Return a body, and that of the chat completion. Raises HttpError with the body's field."""
        asked = read(self.body, body)
        with self.renaming():
            return asked, asked.chat()

    @contextmanager
    def renaming(self) -> Iterator[None]:
        """Give errors of the chat completion the names that its fields have in the body."""
        try:
            yield
        except HttpError as error:
            raise error.renamed(self.fields) from None


DIALECTS: Mapping[str, Dialect] = {
    "/v1/chat/completions": Dialect(ChatBody, PlainForm, {}),
    "/v1/responses": Dialect(response_body.ResponsesBody, ResponseForm, response_body.FIELDS),
    "/v1/messages": Dialect(anthropic_body.MessagesBody, MessageForm, anthropic_body.FIELDS),
}
"""Path -> interface. A further one is a row here; every server of turns has its route."""
COUNTS = "/v1/messages/count_tokens"
COUNTING = DIALECTS["/v1/messages"]._replace(body=anthropic_body.CountBody)
"""Path and body of a call for the number of tokens of a prompt alone."""


def add_turns(app: FastAPI, answer: Callable[[Request, Dialect], Awaitable[Response]]) -> None:
    """Add the route of each interface. answer: answers a request."""

    def route(dialect: Dialect) -> Callable[[Request], Awaitable[Response]]:
        async def turn(request: Request) -> Response:
            return await answer(request, dialect)

        return turn

    for path, dialect in DIALECTS.items():
        app.post(path)(route(dialect))
