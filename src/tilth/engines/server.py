"""A server of another engine in a process of its own, with an interpreter of its own, reached over loopback."""

import http.client
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from tilth.core.errors import RecipeError, TilthError
from tilth.process.child import Child
from tilth.process.output import OutputFile

_SECONDS = 600.0
"""Limit of a request that has no shorter one; a start, which may compile kernels, is the longest."""
_TAIL = 12
"""Lines of the log in an error."""
_HIDDEN = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
"""Environment variables of this interpreter that would mislead another one."""
_OWN = ("PYTORCH_ALLOC_CONF", "expandable_segments:True")
"""Tilth's default, which the sleep of vLLM refuses."""
_JSON = "application/json"
_PROGRAMS = Path(__file__).parent / "servers"


class ServerError(TilthError):
    """The server of a generation engine cannot start, or fails again and again; it ends with the log's last lines."""


class ServerLost(Exception):
    """The server ended, or gave no answer; its engine starts another one."""


def find_python(python: str, engine: str, package: str) -> str:
    """Return the path of the interpreter that has this package. Raises RecipeError with the key ``rollout.python``."""
    if sys.platform != "linux":
        message = f"rollout.engine = {engine} needs Linux, which can end a server with the process that started it"
        raise RecipeError(message, key="rollout.engine.system")
    where = shutil.which(python) if python else sys.executable
    if where is None:
        message = f"rollout.python = {python!r} is no program; use the interpreter of an environment that has {package}"
        raise RecipeError(message, key="rollout.python")
    check = f"import importlib.util as u, sys; sys.exit(u.find_spec({package!r}) is None)"
    if subprocess.run([where, "-P", "-c", check], env=_environment({}), capture_output=True).returncode:
        message = f"rollout.engine = {engine}: {where} has no package {package}; set rollout.python to the interpreter "
        raise RecipeError(f"{message}of an environment that has it", key="rollout.python.package")
    return where


class Connection:
    """Connection to a server on this machine, whose token it knows."""

    def __init__(self, port: int, token: str) -> None:
        self.port, self._token = port, token
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_SECONDS)

    def request(self, method: str, path: str, data: bytes = b"", kind: str = _JSON, seconds: float = _SECONDS) -> bytes:
        """Send a request and return the body of its answer. Raises ServerLost, also without one for these seconds."""
        self._connection.timeout = seconds
        if self._connection.sock is not None:
            self._connection.sock.settimeout(seconds)
        try:
            self._connection.request(method, f"/{path}", data, self._headers(kind))
            return self._answer(path, self._connection.getresponse()).read()
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            raise ServerLost(f"{path}: {error!r}") from error

    def stream(self, path: str, data: bytes) -> Iterator[bytes]:
        """Send a request over a connection of its own and yield the lines of its answer as they come."""
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=_SECONDS)) as connection:
            connection.request("POST", f"/{path}", data, self._headers(_JSON))
            yield from self._answer(path, connection.getresponse())

    def call(self, method: str, body: bytes | Mapping[str, Any] = b"", seconds: float = _SECONDS) -> Any:
        """Call a method of the server and return its answer. Raises ServerLost, also without one for these seconds."""
        whole = isinstance(body, bytes)
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return json.loads(self.request("POST", method, data, "application/octet-stream" if whole else _JSON, seconds))

    def _headers(self, kind: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._token}", "Content-Type": kind}

    def _answer(self, path: str, response: http.client.HTTPResponse) -> http.client.HTTPResponse:
        if response.status != 200:
            raise ServerLost(f"{path}: status {response.status}, {response.read()[:200].decode(errors='replace')}")
        return response

    def alive(self) -> bool:
        """Return False once the server's process has ended."""
        return True

    def stop(self) -> None:
        """Close it."""
        self._connection.close()

    def log_tail(self) -> str:
        """Return the last lines of the server's log."""
        return ""


class EngineProcess(Connection):
    """Process of a program in ``servers``; it and its children end with this process, however this one ends.

    Settings go to it over a pipe, requests over loopback with a token that only it knows. Its log is a file without a
    name, so nothing is left behind.
    """

    def __init__(self, python: str, program: str, settings: Mapping[str, Any], environment: Mapping[str, str]) -> None:
        token, self._log = secrets.token_hex(16), OutputFile()
        with socket.create_server(("127.0.0.1", 0)) as listening:
            super().__init__(listening.getsockname()[1], token)
            self._child = Child(
                [python, "-P", str(_PROGRAMS / program)],
                _environment(environment),
                stdout=self._log,
                stderr=self._log,
                pass_fds=(listening.fileno(),),
            )
            told = {**settings, "token": token, "listening": listening.fileno(), "port": self.port}
        self._child.tell(json.dumps(told).encode() + b"\n")  # the first request finds out if it has ended

    def alive(self) -> bool:
        return self._child.alive()

    @property
    def pid(self) -> int:
        """Number of the process."""
        return self._child.pid

    def stop(self) -> None:
        """End the process and its children."""
        super().stop()
        self._child.kill()

    def log_tail(self) -> str:
        """Return the last lines of its log."""
        return self._log.tail(_TAIL)


def _environment(more: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment variables without those of its interpreter; what is set wins over ``more``."""
    given = {name: value for name, value in os.environ.items() if name not in _HIDDEN and (name, value) != _OWN}
    return {**more, **given}
