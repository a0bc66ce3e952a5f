"""Completion of one request, as a coroutine awaits it."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from tilth.core.errors import TilthError
from tilth.core.trajectory import Likeliest, Trajectory
from tilth.engines.request import Progress, Request


class RequestError(TilthError):
    """An engine client has no place for a request, is closed, or could not finish what it had begun."""


class Delta(NamedTuple):
    """Newest tokens of a completion, with their log-probs, and alternatives if its request asks for them. whole: the
    trajectory, in the last piece."""

    tokens: np.ndarray
    logprobs: np.ndarray
    likeliest: Likeliest | None = None
    whole: Trajectory | None = None


class Completion:
    """Pieces of one completion in the order of their tokens, for one coroutine of the event loop that asked for it.

    Iterate to the end, or call ``close``, which ends the request in the engine. Raises the request's failure.
    """

    def __init__(self, id: int, request: Request, leave: Callable[["Completion"], None]) -> None:
        """leave: ends it in the engine."""
        self.id, self.asked = id, request
        self.request = replace(request, id=id, draws=request.draws or (0, request.id))
        """Request in the engine."""
        self.deaths = 0
        """Times that a worker died in a round with it."""
        self._at = 0
        self._said: list[int] = []
        self._pieces: asyncio.Queue[Delta | Exception] = asyncio.Queue()
        self._ready: list[Delta | Exception] = []
        self.loop = asyncio.get_running_loop()
        self._leave = leave
        self._ended = False

    # ---- the client's side ----

    async def __aiter__(self) -> AsyncIterator[Delta]:
        try:
            while not self._ended:
                piece = await self._pieces.get()
                if isinstance(piece, Exception):
                    raise piece
                self._ended = piece.whole is not None
                yield piece
        finally:
            self.close()

    async def whole(self) -> Trajectory:
        """Return the finished trajectory."""
        async for piece in self:
            if piece.whole is not None:
                return piece.whole
        raise RequestError(f"request {self.asked.id}: its client has left", key="serve.left")

    def close(self) -> None:
        """Abort the request unless it has ended; idempotent."""
        self._ended = True
        self._leave(self)

    # ---- the side of the engine client's thread ----

    def begin(self) -> Request:
        """Return the request for an engine that knows nothing of it."""
        self._at = 0
        return self.request

    def progress(self, new: Progress) -> None:
        """Note its newest tokens for ``hand_over``; those before a restart must be equal. Raises RequestError."""
        self._put(self._fresh(new.tokens, new.logprobs, new.likeliest))

    def finish(self, trajectory: Trajectory) -> None:
        """Note the rest. Raises RequestError."""
        start = trajectory.prompt_length + self._at
        top = trajectory.likeliest
        top = None if top is None else Likeliest(top.ids[self._at :], top.logprobs[self._at :])
        rest = self._fresh(trajectory.tokens[start:], trajectory.logprobs[start:], top)
        self._put(rest._replace(whole=replace(trajectory, id=self.asked.id)))

    def fail(self, error: Exception) -> None:
        """Note a failure."""
        self._put(error)

    def _fresh(self, tokens: np.ndarray, logprobs: np.ndarray, top: Likeliest | None) -> Delta:
        """Return what of these tokens was not delivered yet."""
        again = min(len(tokens), len(self._said) - self._at)
        if tokens[:again].tolist() != self._said[self._at : self._at + again]:
            message = f"request {self.asked.id}: after a restart of its worker the engine chose other tokens"
            raise RequestError(f"{message} than those it had given; ask again", key="serve.replay")
        self._at += len(tokens)
        self._said += tokens[again:].tolist()
        top = None if top is None else Likeliest(top.ids[again:], top.logprobs[again:])
        return Delta(tokens[again:], logprobs[again:], top)

    def _put(self, piece: Delta | Exception) -> None:
        if isinstance(piece, Exception) or len(piece.tokens) or piece.whole is not None:
            self._ready.append(piece)

    def new_pieces(self) -> list[Delta | Exception]:
        """Return what its client has not been given yet, and forget it."""
        found, self._ready = self._ready, []
        return found

    def hear(self, pieces: list[Delta | Exception]) -> None:
        """Give pieces to its client, in the client's event loop."""
        for piece in pieces:
            self._pieces.put_nowait(piece)


def hand_over(completions: Iterable[Completion]) -> list[Completion]:
    """Give clients what is new by one call into each event loop; return those whose loop has been closed.

    A call for each client would give its loop the interpreter's lock that often, while the engine waits for a round.
    """
    loops: dict[asyncio.AbstractEventLoop, list[Completion]] = {}
    for one in completions:
        loops.setdefault(one.loop, []).append(one)
    gone = []
    for loop, some in loops.items():
        try:
            loop.call_soon_threadsafe(_hear_all, [(one, one.new_pieces()) for one in some])
        except RuntimeError:
            gone += some
    return gone


def _hear_all(new: list[tuple[Completion, list[Delta | Exception]]]) -> None:
    for completion, pieces in new:
        completion.hear(pieces)
