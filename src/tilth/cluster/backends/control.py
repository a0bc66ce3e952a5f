"""Control messages: small JSON requests that a worker answers while a call runs.

A thread of the worker serves them one at a time at a Unix socket in the session directory. Their methods
(``protocol.control``) only read, or set a flag for the running call.
"""

import json
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from socketserver import StreamRequestHandler, UnixStreamServer
from threading import Thread
from typing import Any

from tilth.core.errors import CallTimeout, WorkerError, WorkerLost

LIMIT = 5.0
"""Seconds for an answer; only a worker that is stopped or holds the GIL takes longer."""


def serve(address: str, answer: Callable[[str, str, Mapping[str, Any]], Any]) -> None:
    """Answer (role, method, keyword arguments) at a Unix socket in a daemon thread."""

    class Handler(StreamRequestHandler):
        def handle(self) -> None:
            try:
                reply = {"value": answer(*json.loads(self.rfile.readline()))}
            except Exception as error:  # noqa: BLE001 - whatever a role raises is reported
                reply = {"error": f"{type(error).__name__}: {error}"}
            self.wfile.write(json.dumps(reply).encode())

    Path(address).unlink(missing_ok=True)  # of a worker that was lost
    server = UnixStreamServer(address, Handler)
    Thread(target=server.serve_forever, name="control", daemon=True).start()


def ask(address: str, rank: int, role: str, method: str, arguments: Mapping[str, Any]) -> Any:
    """Send a message and return the answer. Raises WorkerError if the method failed, CallTimeout without an answer in
    time, WorkerLost if nobody is there."""
    where, key = f"role {role}, rank {rank}, {method}", f"{role}.{method}"
    try:
        with socket.socket(socket.AF_UNIX) as there:
            there.settimeout(LIMIT)
            there.connect(address)
            there.sendall(json.dumps([role, method, arguments]).encode() + b"\n")
            reply = json.load(there.makefile())
    except TimeoutError:
        raise CallTimeout(f"{where}: no answer to a control message within {LIMIT:g} s", key=key) from None
    except (OSError, ValueError) as error:
        lost = WorkerLost(f"{where}: the worker does not answer a control message: {error}", key=key)
        lost.ranks = (rank,)
        raise lost from None
    if "error" in reply:
        raise WorkerError(f"{where}: {reply['error']}", key=key)
    return reply["value"]
