"""A server's side of the link to the engine that started it: settings, token, requests one after another, its end.

Imports nothing but the standard library.
"""

import hmac
import json
import os
import select
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import SimpleQueue
from typing import Any

Method = Callable[[bytes], Any]
"""Takes the body of a request, returns what is sent back as JSON."""


def receive_settings() -> dict[str, Any]:
    """Read the settings that the engine writes to this process's standard input, a line of JSON."""
    return json.loads(sys.stdin.readline())


def end_with(parent: int, folder: str) -> None:
    """Kill this process and its children, and remove a folder, as soon as the parent has ended, however it ended."""
    end = os.pidfd_open(parent)
    if os.getppid() != parent:
        _end(folder)
    threading.Thread(target=_wait, args=(end, folder), daemon=True).start()


def _wait(end: int, folder: str) -> None:
    select.select([end], [], [])
    _end(folder)


def _end(folder: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


def serve(listening: int, token: str, methods: Mapping[str, Method]) -> None:
    """Answer requests on the listening socket of this file descriptor, one at a time, all on this thread.

    An exception of a method ends the process, since the state of the engine is not known then; the log has its trace.
    """
    work: SimpleQueue[tuple[Method, bytes, Future[Any]]] = SimpleQueue()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(token, methods, work), bind_and_activate=False)
    server.socket.close()
    server.socket = socket.socket(fileno=listening)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    while True:
        method, body, answer = work.get()
        try:
            answer.set_result(method(body))
        except BaseException as error:
            answer.set_exception(error)
            raise


def _handler(token: str, methods: Mapping[str, Method], work: Any) -> type[BaseHTTPRequestHandler]:
    class LinkHandler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_POST(self) -> None:
            given = self.headers.get("Authorization", "").encode()
            if not hmac.compare_digest(given, f"Bearer {token}".encode()):
                return self._refuse(401, "a request needs the token of the engine")
            if self.path not in methods:
                return self._refuse(404, f"no method {self.path}")
            answer: Future[Any] = Future()
            work.put((methods[self.path], self.rfile.read(int(self.headers["Content-Length"])), answer))
            if answer.exception() is None:
                self._reply(200, answer.result())
            self.close_connection = answer.exception() is not None

        def _refuse(self, status: int, message: str) -> None:
            self.close_connection = True  # the body has not been read
            self._reply(status, {"error": message})

        def _reply(self, status: int, value: Any) -> None:
            body = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Log nothing: a step is a request."""

    return LinkHandler
