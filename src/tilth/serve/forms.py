"""Forms of an answer: what a client gets for a chat completion, whole or as a stream of events. Imports no torch."""

from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import aclosing
from typing import Any

from tilth.serve.app import DONE, event
from tilth.serve.errors import HttpError


class Form:
    """Form of one answer while its parts come. This one, of chat completions and completions, is as they are."""

    last: tuple[str, ...] = (DONE,)
    """Ends a stream without an error."""

    def __init__(self, body: Any, head: Mapping[str, Any]) -> None:
        """head: id, time and model of the chat completion, and its ``usage`` before the first token."""

    def whole(self, found: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer for a whole chat completion."""
        return {**found}

    async def events(self, parts: AsyncGenerator[dict[str, Any]]) -> AsyncIterator[str]:
        """Yield the events of a stream of a chat completion's chunks. An error is the last, as the status is sent."""
        async with aclosing(parts):
            for one in self._begin():
                yield event(one)
            try:
                async for part in parts:
                    for one in self._hear(part):
                        yield event(one)
                for end in self.last:
                    yield end
            except HttpError as error:
                yield event(self._failed(error))

    def _begin(self) -> Iterator[dict[str, Any]]:
        """Yield the events before the first chunk."""
        yield from ()

    def _hear(self, part: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the events of a chunk, or of a whole chat completion."""
        yield {**part}

    def _failed(self, error: HttpError) -> dict[str, Any]:
        return error.body
