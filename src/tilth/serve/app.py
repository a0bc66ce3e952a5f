"""HTTP server in front of an engine client: who may ask, how much, what errors look like, health, metrics, shutdown."""

import asyncio
import json
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Coroutine, Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from types import FrameType, MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import uvicorn
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from tilth.core.errors import TilthError
from tilth.process.access import SILENCE, PatientProtocol, refusal
from tilth.process.handlers import handling
from tilth.serve.errors import HttpError, first_line, http_error

if TYPE_CHECKING:  # torch, which processes of agents do without
    from tilth.engines.client import EngineClient
    from tilth.serve.metrics import ServerMetrics

BODY = 8 << 20
"""Most bytes of a request's body."""
GRACE = 30.0
"""Seconds in which requests may finish when the server is asked to end."""
DONE = "data: [DONE]\n\n"
"""Last event of a stream."""
LEFT = 499
"""Status of a request whose client has left."""
OPEN = ("/health",)
"""Paths that need no token."""
SIGNED = "/api/v1/files/"
"""Paths with a signature of their own in place of a token."""
Scope = MutableMapping[str, Any]
T = TypeVar("T")


class Guarded:
    """ASGI application that checks the token, the Host header and the size of the body, and counts answers.

    A page of a browser could reach a server without a token under another name (DNS rebinding), or send it requests
    without reading the answers, so that one answers only to names of this machine and to its pages. largest: path ->
    most bytes of a body, ``BODY`` for others.
    """

    def __init__(
        self, app: Any, token: str, metrics: "ServerMetrics", largest: Mapping[str, float] = MappingProxyType({})
    ) -> None:
        self._app, self._token, self._metrics, self._largest = app, token.encode(), metrics, largest

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begin, status = time.perf_counter(), 0

        async def sent(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        refused = self._refused(scope["path"], headers_of(scope))
        if refused is not None:
            await refused.response(scope["path"])(scope, receive, sent)
        else:
            await self._app(scope, _limited(receive, self._largest.get(scope["path"], BODY)), sent)
        path = getattr(scope.get("route"), "path", "other")  # the template: paths are the client's, without end
        self._metrics.requests.labels(path, str(status)).inc()
        self._metrics.duration.observe(time.perf_counter() - begin)

    def _refused(self, path: str, headers: dict[str, bytes]) -> HttpError | None:
        free = path in OPEN or path.startswith(SIGNED)
        found = refusal(headers, self._token, self._largest.get(path, BODY), free=free)
        return None if found is None else HttpError(*found)


def headers_of(scope: Scope) -> dict[str, bytes]:
    """Return the headers of a request, with names in small letters."""
    return {name.decode("latin-1"): value for name, value in scope["headers"]}


def _limited(receive: Any, largest: float) -> Any:
    """Return a receive that refuses bodies that grow beyond the limit without having said so, and those that stop."""
    seen, more = 0, True

    async def limited() -> Any:
        nonlocal seen, more
        try:
            async with asyncio.timeout(SILENCE if more else None):  # behind the body it waits for the client to leave
                message = await receive()
        except TimeoutError:
            raise HttpError(408, f"the body has not gone on for {SILENCE:g} seconds", "body") from None
        seen, more = seen + len(message.get("body", b"")), message.get("more_body", False)
        if seen > largest:
            raise HttpError(413, f"the body is longer than {largest} bytes", "body")
        return message

    return limited


def bare_app() -> FastAPI:
    """Return an application with errors in the form of their path, to which routes are added."""
    app = FastAPI(title="Tilth", docs_url=None, redoc_url=None, openapi_url=None)

    async def failed(request: Request, error: Exception) -> Response:
        return http_error(error).response(request.url.path)

    async def unknown(request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 404
        path = request.url.path
        return HttpError(status, f"{request.method} {path}: {getattr(error, 'detail', error)}").response(path)

    async def left(request: Request, error: Exception) -> Response:
        return HttpError(LEFT, "the client has left").response(request.url.path)

    app.add_exception_handler(ClientDisconnect, left)
    app.add_exception_handler(HttpError, failed)
    app.add_exception_handler(TilthError, failed)
    app.add_exception_handler(HTTPException, unknown)
    return app


def new_app(room: "EngineClient", metrics: "ServerMetrics") -> FastAPI:
    """Return an application with /health and /metrics besides; ``Guarded`` goes around it."""
    app = bare_app()

    @app.get("/health")
    async def health() -> Response:
        if room.failure is not None:
            return HttpError(503, f"the server serves nobody any more: {first_line(room.failure)}").response("/health")
        return JSONResponse({"status": "ok"})

    @app.get("/metrics")
    async def exposed() -> Response:
        return Response(await asyncio.to_thread(metrics.page), media_type="text/plain; version=0.0.4")

    return app


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return what ``work`` returns; it is cancelled if the client leaves before. The body has been read.

    Raises HttpError if the client has left, and what ``work`` raises.
    """
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if gone.done():
            raise HttpError(LEFT, "the client has left")
        return task.result()
    finally:
        for one in (task, gone):
            one.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await one


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def event(value: Mapping[str, Any]) -> str:
    """Return a server-sent event, with the name of its type if it has one."""
    name = f"event: {value['type']}\n" if "type" in value else ""
    return f"{name}data: {json.dumps(value, ensure_ascii=False)}\n\n"


def event_stream(events: AsyncIterator[str]) -> Response:
    """Return server-sent events; leaving the response closes ``events``."""
    return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})


class HttpServer(uvicorn.Server):
    """A server whose room ends with it: asked to end, it takes nothing more and lets requests finish for ``GRACE``."""

    def __init__(self, app: Any, room: "EngineClient", listener: socket.socket) -> None:
        """listener: bound socket, which it closes."""
        late = int(GRACE) + 5
        super().__init__(
            uvicorn.Config(
                app,
                lifespan="off",
                server_header=False,
                log_level="warning",
                access_log=False,
                timeout_graceful_shutdown=late,
                http=PatientProtocol,
            )
        )
        self.room, self.listener = room, listener
        self._closing: threading.Thread | None = None

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals while it serves, without raising them again afterwards: the engine client is closed then."""
        with handling(dict.fromkeys((signal.SIGINT, signal.SIGTERM), self.handle_exit)):
            yield

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """End the engine client beside the requests that are being answered; a second signal ends at once."""
        if self._closing is None:
            self._closing = threading.Thread(target=self.room.close, args=(GRACE,), name="closing")
            self._closing.start()
        super().handle_exit(sig, frame)

    def run_here(self) -> None:
        """Serve until a signal, or until ``should_exit`` is set; then the engine client is closed."""
        try:
            self.run(sockets=[self.listener])
        finally:
            if self._closing is not None and not self.force_exit:
                self._closing.join()
            self.room.close(0.0)


async def gathered(work: list[Awaitable[T]]) -> list[T]:
    """Return all results; if one fails the others are cancelled, and its error is raised."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
