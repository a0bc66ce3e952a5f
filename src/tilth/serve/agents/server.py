"""HTTP server of a process of agents: OpenAI's and Anthropic's interfaces on this machine, a key for each episode."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from concurrent.futures import Future
from threading import Lock, Thread
from typing import Any, TypeVar

import uvicorn
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tilth.process.access import listen, token_of
from tilth.serve.agents.conversation import MODEL, PARALLEL, AgentConversations, Turn
from tilth.serve.app import LEFT, bare_app, event_stream, headers_of, unless_gone
from tilth.serve.dialects import COUNTING, COUNTS, DIALECTS, Dialect, add_turns
from tilth.serve.errors import HttpError
from tilth.serve.schemas import ChatBody

KEEP_ALIVE = 3600
"""Seconds that an idle connection of a client stays open: an agent may work long between two calls."""
LEAVING = 1.0
"""Seconds in which the server has seen that a client has left, whose call the client makes anew."""

T = TypeVar("T")
Wait = Callable[[Coroutine[Any, Any, Any]], Coroutine[Any, Any, Any]]
"""Waits for something unless the client leaves, which is an error."""


class AgentServer:
    """Server on 127.0.0.1 in a thread of its own. address: ``base_url`` of clients."""

    def __init__(self) -> None:
        self._episodes: dict[str, AgentConversations] = {}
        listener = listen("127.0.0.1", 0)
        self.address = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        app = bare_app()
        add_turns(app, self._turn)
        app.post(COUNTS)(self.count)
        app.get("/v1/models")(self.models)
        app.post("/{path:path}")(self.other)
        quiet: dict[str, Any] = {"lifespan": "off", "server_header": False, "log_level": "warning", "access_log": False}
        server = uvicorn.Server(uvicorn.Config(app, timeout_keep_alive=KEEP_ALIVE, **quiet))
        Thread(target=server.run, kwargs={"sockets": [listener]}, name="agent-server", daemon=True).start()

    def open(self, episode: AgentConversations) -> AgentConversations:
        """Answer calls of an episode from now on."""
        self._episodes[episode.token] = episode
        return episode

    def remove(self, episode: AgentConversations) -> None:
        """Know an episode no longer."""
        self._episodes.pop(episode.token, None)

    def _episode(self, request: Request) -> AgentConversations:
        episode = self._episodes.get(token_of(headers_of(request.scope)).decode("latin-1"))
        if episode is None:
            message = "no running episode has this api_key: it is wrong, or the episode has ended"
            raise HttpError(401, message, code="invalid_api_key")
        return episode

    async def models(self, request: Request) -> Response:
        """List the policy."""
        self._episode(request)
        card = {"id": MODEL, "object": "model", "created": int(time.time()), "owned_by": "tilth"}
        return JSONResponse({"object": "list", "data": [card]})

    async def other(self, request: Request) -> Response:
        """Refuse a call of something else."""
        episode = self._episode(request)
        message = f"there is no {request.url.path} for an agent, but {', '.join(DIALECTS)}"
        if request.url.path.startswith("/v1/v1"):
            message += "; this client adds /v1 itself: give it base_url without"
        error = HttpError(404, message)
        episode.refuse(error)
        raise error

    async def count(self, request: Request) -> Response:
        """Return the number of tokens of a prompt. A call that is refused costs nothing: clients can do without."""
        episode = self._episode(request)
        _, body = COUNTING.read(await request.body())
        _check_model(body)
        with COUNTING.renaming():
            asked = episode.count(body)
        found = await unless_gone(request, _answered(asked))
        if isinstance(found, HttpError):
            raise found.renamed(COUNTING.fields)
        return JSONResponse({"input_tokens": found})

    async def _turn(self, request: Request, dialect: Dialect) -> Response:
        """Answer a call with the policy's turn."""
        episode = self._episode(request)
        try:
            asked, body = dialect.read(await request.body())
            _check_model(body)
            again = request.headers.get("x-stainless-retry-count", "0") != "0"
            with dialect.renaming():
                turn = await _called(episode, body, again, lambda work: unless_gone(request, work))
        except HttpError as error:
            if error.status != LEFT:
                episode.refuse(error)
            raise
        try:
            found = await unless_gone(request, _answered(turn))
        except HttpError:
            episode.leave(turn)
            raise
        if isinstance(found, HttpError):
            raise found.renamed(dialect.fields)
        head = {"id": f"chatcmpl-{episode.token[:8]}", "created": int(time.time()), "model": MODEL}
        form = dialect.form(asked, {**head, "usage": {**found.usage, "completion_tokens": 0}})
        if body.stream:
            return event_stream(form.events(_chunks(head, found, body)))
        choice = {"index": 0, "message": found.message, **found.end, **_logprobs(found, body)}
        whole = {**head, "object": "chat.completion", "choices": [choice], "usage": found.usage}
        return JSONResponse(form.whole(whole))


def _check_model(body: ChatBody) -> None:
    if body.model != MODEL:
        message = f"there is no model {body.model!r}; this server has {MODEL}"
        raise HttpError(404, message, "model", "model_not_found")


async def _called(episode: AgentConversations, body: ChatBody, again: bool, wait: Wait) -> "Future[Turn | HttpError]":
    """Take a call. One beside another waits for its turn where the agent may have several conversations; elsewhere it
    repeats the other one if its client proves to have left."""
    while True:
        try:
            return episode.call(body, again)
        except HttpError as error:
            until = time.monotonic() + LEAVING
            while error.code == PARALLEL and episode.most == 1 and not episode.left and time.monotonic() < until:
                await asyncio.sleep(0.05)  # no event says that a client has left
            if error.code != PARALLEL or (episode.most == 1 and not episode.left):
                raise
        if episode.most > 1 and (beside := episode.turn) is not None:
            await wait(_answered(beside))


async def _answered(found: "Future[T]") -> T:
    """Wait for an answer, which comes even if nobody waits any more."""
    return await asyncio.shield(asyncio.wrap_future(found))


async def _chunks(head: dict[str, Any], turn: Turn, body: ChatBody) -> AsyncGenerator[dict[str, Any]]:
    """Yield a turn as the chunks of a stream: its text in one piece, then each call."""
    calls = turn.message.get("tool_calls", ())
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": turn.message["content"] or ""}]
    deltas += [{"tool_calls": [{"index": at, **call}]} for at, call in enumerate(calls)]
    head = {**head, "object": "chat.completion.chunk"}
    for at, delta in enumerate([*deltas, {}]):
        end = turn.end if at == len(deltas) else {"finish_reason": None}
        choice = {"index": 0, "delta": delta, **end, **(_logprobs(turn, body) if at == 0 else {})}
        yield {**head, "choices": [choice]}
    if body.stream_options is not None and body.stream_options.include_usage:
        yield {**head, "choices": [], "usage": turn.usage}


def _logprobs(turn: Turn, body: ChatBody) -> dict[str, Any]:
    if not body.logprobs or "ids" not in turn.facts:
        return {}
    pairs = zip(turn.facts["pieces"], turn.facts["logprobs"], strict=True)
    rows = [{"token": text, "logprob": x, "bytes": list(text.encode()), "top_logprobs": []} for text, x in pairs]
    return {"logprobs": {"content": rows, "refusal": None}}


_LOCK = Lock()
_SERVERS: list[AgentServer] = []


def agent_server() -> AgentServer:
    """Return the server of this process; the first call starts it."""
    with _LOCK:
        if not _SERVERS:
            _SERVERS.append(AgentServer())
        return _SERVERS[0]
