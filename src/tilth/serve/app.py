"""HTTP server in front of an engine client: who may ask, how much, what errors look like, health, metrics, shutdown."""

import asyncio
import errno
import hmac
import ipaddress
import json
import re
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
from uvicorn.protocols.http.h11_impl import H11Protocol

from tilth.core.errors import TilthError
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
SILENCE = 60.0
"""Seconds after which a connection is closed whose client does not go on: with the headers or the body of a request,
or with reading an answer."""
OPEN = ("/health",)
"""Paths that need no token."""
SIGNED = "/api/v1/files/"
"""Paths with a signature of their own in place of a token."""
PORT = re.compile(r":[0-9]*$")
"""End of a Host header; an address of IPv6 is in brackets there."""
SCHEME = re.compile(rb"^bearer +", re.IGNORECASE)
Scope = MutableMapping[str, Any]
T = TypeVar("T")


class AddressError(TilthError):
    """A server cannot listen where it is asked to."""


def check_address(host: str, token: str) -> None:
    """Raise AddressError for an address beyond this machine without a token."""
    if token or _is_here(host):
        return
    message = f"--host={host} can be reached from other machines, which needs --token=SECRET; or use --host=127.0.0.1"
    raise AddressError(message, key="--token")


def _is_here(host: str) -> bool:
    """Return True for a name or an address that only this machine can mean."""
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


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

        headers = {name.decode("latin-1"): value for name, value in scope["headers"]}
        refused = self._refused(scope["path"], headers)
        if refused is not None:
            await refused.response()(scope, receive, sent)
        else:
            await self._app(scope, _limited(receive, self._largest.get(scope["path"], BODY)), sent)
        path = getattr(scope.get("route"), "path", "other")  # the template: paths are the client's, without end
        self._metrics.requests.labels(path, str(status)).inc()
        self._metrics.duration.observe(time.perf_counter() - begin)

    def _refused(self, path: str, headers: dict[str, bytes]) -> HttpError | None:
        length, most = headers.get("content-length", b"0"), self._largest.get(path, BODY)
        if not length.isdigit() or int(length) > most:
            return HttpError(413, f"the body has {length.decode('latin-1')} bytes, the limit is {most}", "body")
        if path in OPEN or path.startswith(SIGNED):
            return None
        if not self._token:
            return _elsewhere(headers)
        given = SCHEME.sub(b"", headers.get("authorization", b"")) or headers.get("x-api-key", b"")
        if hmac.compare_digest(given, self._token):
            return None
        return HttpError(401, "the token is missing or wrong: Authorization: Bearer TOKEN", code="invalid_api_key")


def _elsewhere(headers: Mapping[str, bytes]) -> HttpError | None:
    """Return the refusal of a request that names another machine, or comes from a page of one."""
    name, origin = (headers.get(one, b"").decode("latin-1") for one in ("host", "origin"))
    if not _is_here(PORT.sub("", name).strip("[]").lower()):
        return HttpError(403, f"without a token this server is 127.0.0.1, not {name}", "host")
    if origin and not _is_here(PORT.sub("", origin.partition("://")[2]).strip("[]").lower()):
        return HttpError(403, f"without a token this server answers no pages of {origin}; give it one", "origin")
    return None


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
    """Return an application with errors in OpenAI's form, to which routes are added."""
    app = FastAPI(title="Tilth", docs_url=None, redoc_url=None, openapi_url=None)

    async def failed(request: Request, error: Exception) -> Response:
        return http_error(error).response()

    async def unknown(request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 404
        return HttpError(status, f"{request.method} {request.url.path}: {getattr(error, 'detail', error)}").response()

    async def left(request: Request, error: Exception) -> Response:
        return HttpError(LEFT, "the client has left").response()

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
            return HttpError(503, f"the server serves nobody any more: {first_line(room.failure)}").response()
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


class PatientProtocol(H11Protocol):
    """HTTP of one connection, which ends when its client neither completes the headers of a request nor reads on."""

    def connection_made(self, transport: Any) -> None:
        """Begin to watch."""
        super().connection_made(transport)
        self._paused, self._resumed = False, 0
        self._seen: tuple[Any, ...] | None = None
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Watch no longer."""
        self._timer.cancel()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Note that the client reads less than it is sent."""
        self._paused = True
        super().pause_writing()

    def resume_writing(self) -> None:
        """Note that the client has read."""
        self._paused, self._resumed = False, self._resumed + 1
        super().resume_writing()

    def _watch(self) -> None:
        """End the connection if it waits for its client as it did ``SILENCE`` seconds ago."""
        waits = self._paused or self.cycle is None or self.cycle.response_complete
        now = (self.cycle, self._resumed, self.transport.get_write_buffer_size()) if waits else None
        if now is not None and now == self._seen:
            self.transport.abort()  # not close, which waits until all is read
            return
        self._seen = now
        self._timer = self.loop.call_later(SILENCE, self._watch)


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


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens: clients wait in its queue until they are served. Raises AddressError; port 0: any
    that is free."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        # with the protocol asyncio sets TCP_NODELAY; else the second packet of an answer waits 40 ms for an ACK
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()  # two that are bound only could have one port
    except OSError as error:
        why = f"--host={host} --port={port}: {error.strerror or error}"
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            raise AddressError(f"{why}; choose another port, or 0 for a free one", key="--port") from None
        raise AddressError(f"{why}; choose an address of this machine, as 127.0.0.1", key="--host") from None
    return listener


async def gathered(work: list[Awaitable[T]]) -> list[T]:
    """Return all results; if one fails the others are cancelled, and its error is raised."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
