"""Interfaces by which clients ask for a turn of the assistant: the body of a request, which asks for a chat completion,
and the form of its answer. Imports no torch."""

from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from tilth.serve import anthropic, responses
from tilth.serve.anthropic import MessageForm
from tilth.serve.errors import HttpError, read
from tilth.serve.forms import Form
from tilth.serve.responses import ResponseForm
from tilth.serve.schemas import ChatBody


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
    "/v1/chat/completions": Dialect(ChatBody, Form, {}),
    "/v1/responses": Dialect(responses.ResponsesBody, ResponseForm, responses.FIELDS),
    "/v1/messages": Dialect(anthropic.MessagesBody, MessageForm, anthropic.FIELDS),
}
"""Path -> interface. A further one is a row here; every server of turns has its route."""
COUNTS = "/v1/messages/count_tokens"
COUNTING = DIALECTS["/v1/messages"]._replace(body=anthropic.CountBody)
"""Path and body of a call for the number of tokens of a prompt alone."""


def add_turns(app: FastAPI, answer: Callable[[Request, Dialect], Awaitable[Response]]) -> None:
    """Add the route of each interface. answer: answers a request."""

    def route(dialect: Dialect) -> Callable[[Request], Awaitable[Response]]:
        async def turn(request: Request) -> Response:
            return await answer(request, dialect)

        return turn

    for path, dialect in DIALECTS.items():
        app.post(path)(route(dialect))
