"""HTTP server in front of an engine room: who may ask, how much, what errors look like, health, metrics, shutdown."""

import asyncio
import errno
import hmac
import ipaddress
import math
import re
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Collection, Coroutine, Iterator, MutableMapping
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

import uvicorn
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from tilth.core.errors import TilthError
from tilth.serve.errors import HttpError, first_line, http_error

if TYPE_CHECKING:  # torch, which processes of agents do without
    from tilth.serve.metrics import ServerMetrics
    from tilth.serve.room import EngineRoom

BODY = 8 << 20
"""Most bytes of a request's body."""
GRACE = 30.0
"""Seconds in which requests may finish when the server is asked to end."""
LEFT = 499
"""Status of a request whose client has left."""
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

    A page of a browser could reach a server without a token under another name (DNS rebinding), so that one answers
    only to names of this machine. largest: most bytes of a body; free: paths
    whose routes limit their bodies themselves.
    """

    def __init__(
        self, app: Any, token: str, metrics: "ServerMetrics", largest: int = BODY, free: Collection[str] = ()
    ) -> None:
        self._app, self._token, self._metrics, self._largest = app, token.encode(), metrics, largest
        self._free = free

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
            await self._app(scope, _limited(receive, self._most(scope["path"])), sent)
        path = getattr(scope.get("route"), "path", "other")  # the template: paths are the client's, without end
        self._metrics.requests.labels(path, str(status)).inc()
        self._metrics.duration.observe(time.perf_counter() - begin)

    def _most(self, path: str) -> float:
        return math.inf if path in self._free else self._largest

    def _refused(self, path: str, headers: dict[str, bytes]) -> HttpError | None:
        length = headers.get("content-length", b"0")
        if not length.isdigit() or int(length) > self._most(path):
            message = f"the body has {length.decode('latin-1')} bytes, the limit is {self._largest}"
            return HttpError(413, message, "body")
        if path in OPEN or path.startswith(SIGNED):
            return None
        if not self._token:
            name = headers.get("host", b"").decode("latin-1")
            good = _is_here(PORT.sub("", name).strip("[]").lower())
            return None if good else HttpError(403, f"without a token this server is 127.0.0.1, not {name}", "host")
        given = SCHEME.sub(b"", headers.get("authorization", b"")) or headers.get("x-api-key", b"")
        if hmac.compare_digest(given, self._token):
            return None
        return HttpError(401, "the token is missing or wrong: Authorization: Bearer TOKEN", code="invalid_api_key")


def _limited(receive: Any, largest: float) -> Any:
    """Return a receive that refuses bodies that grow beyond the limit without having said so."""
    seen = 0

    async def limited() -> Any:
        nonlocal seen
        message = await receive()
        seen += len(message.get("body", b""))
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


def new_app(room: "EngineRoom", metrics: "ServerMetrics") -> FastAPI:
    """Return an application with /health and /metrics besides; ``Guarded`` goes around it."""
    app = bare_app()

    @app.get("/health")
    async def health() -> Response:
        if room.failure is not None:
            return HttpError(503, f"the engine room serves nobody any more: {first_line(room.failure)}").response()
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


def event_stream(events: AsyncIterator[str]) -> Response:
    """Return server-sent events; leaving the response closes ``events``."""
    return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})


class HttpServer(uvicorn.Server):
    """A server whose room ends with it: asked to end, it takes nothing more and lets requests finish for ``GRACE``."""

    def __init__(self, app: Any, room: "EngineRoom", door: socket.socket) -> None:
        """door: bound socket, which it closes."""
        late = int(GRACE) + 5
        super().__init__(
            uvicorn.Config(
                app,
                lifespan="off",
                server_header=False,
                log_level="warning",
                access_log=False,
                timeout_graceful_shutdown=late,
            )
        )
        self.room, self.door = room, door
        self._closing: threading.Thread | None = None

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals while it serves, without raising them again afterwards: the room is closed then."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {one: signal.signal(one, self.handle_exit) for one in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for one, handler in before.items():
                signal.signal(one, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """End the room beside the requests that are being answered; a second signal ends at once."""
        if self._closing is None:
            self._closing = threading.Thread(target=self.room.close, args=(GRACE,), name="closing")
            self._closing.start()
        super().handle_exit(sig, frame)

    def run_here(self) -> None:
        """Serve until a signal, or until ``should_exit`` is set; then the room is closed."""
        try:
            self.run(sockets=[self.door])
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
        door = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        door.bind(address)
        door.listen()  # two that are bound only could have one port
    except OSError as error:
        why = f"--host={host} --port={port}: {error.strerror or error}"
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            raise AddressError(f"{why}; choose another port, or 0 for a free one", key="--port") from None
        raise AddressError(f"{why}; choose an address of this machine, as 127.0.0.1", key="--host") from None
    return door


async def gathered(work: list[Awaitable[T]]) -> list[T]:
    """Return all results; if one fails the others are cancelled, and its error is raised."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
