"""Access to an HTTP server of this machine: its token, its names, pages of other sites, where and how it listens."""

import errno
import hmac
import ipaddress
import re
import socket
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from uvicorn.protocols.http.h11_impl import H11Protocol

from tilth.core.errors import TilthError

SILENCE = 60.0
"""Seconds after which a connection is closed whose client does not go on: with the headers or the body of a request,
or with reading an answer."""
PORT = re.compile(r":[0-9]*$")
"""End of a Host header; an address of IPv6 is in brackets there."""
SCHEME = re.compile(rb"^bearer +", re.IGNORECASE)


class AddressError(TilthError):
    """A server cannot listen where it is asked to."""


def check_address(host: str, token: str) -> None:
    """Raise AddressError for an address beyond this machine without a token."""
    if token or is_here(host):
        return
    message = f"--host={host} can be reached from other machines, which needs --token=SECRET; or use --host=127.0.0.1"
    raise AddressError(message, key="--token")


def is_here(host: str) -> bool:
    """Return True for a name or an address that only this machine can mean."""
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


class Refusal(NamedTuple):
    """The answer to a request that is refused: status, message, part of the request, OpenAI's code."""

    status: int
    message: str
    field: str | None = None
    code: str | None = None


def refusal(
    headers: Mapping[str, bytes], token: bytes, most: float, given: bytes = b"", *, free: bool = False
) -> Refusal | None:
    """Return why a request is refused; None: it may ask. most: bytes of its body; given: its token, where that is not
    in its headers; free: anybody may ask.

    A page of a browser could reach a server without a token under another name (DNS rebinding), or send it requests
    without reading the answers, so that one answers only to names of this machine and to its pages.
    """
    length = headers.get("content-length", b"0")
    if not length.isdigit() or int(length) > most:
        return Refusal(413, f"the body has {length.decode('latin-1')} bytes, the limit is {most}", "body")
    if free:
        return None
    if not token:
        return _elsewhere(headers)
    if hmac.compare_digest(given or token_of(headers), token):
        return None
    return Refusal(401, "the token is missing or wrong: Authorization: Bearer TOKEN, x-api-key", code="invalid_api_key")


def token_of(headers: Mapping[str, bytes]) -> bytes:
    """Return the token in the headers of a request, as clients of OpenAI or Anthropic send it; empty without one."""
    return SCHEME.sub(b"", headers.get("authorization", b"")) or headers.get("x-api-key", b"")


def _elsewhere(headers: Mapping[str, bytes]) -> Refusal | None:
    """Return the refusal of a request that names another machine, or comes from a page of one."""
    name, origin = (headers.get(one, b"").decode("latin-1") for one in ("host", "origin"))
    if not is_here(PORT.sub("", name).strip("[]").lower()):
        return Refusal(403, f"without a token this server is 127.0.0.1, not {name}", "host")
    if origin and not is_here(PORT.sub("", origin.partition("://")[2]).strip("[]").lower()):
        return Refusal(403, f"without a token this server answers no pages of {origin}; give it one", "origin")
    return None


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
