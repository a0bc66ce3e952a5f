"""Children of tests as forks of one process that has imported torch and Tilth, in place of a second or two each.

    subprocess.run([*forked.python(), "-c", code, *arguments], capture_output=True)

``python()`` stands for ``sys.executable``: what follows may be ``-c CODE``, ``-m MODULE`` or a file. A small process
(``forked_client``) hands its arguments, environment, folder and open files to the server, passes signals on, and ends
as the fork ends; if it dies, the fork is killed. Tests of what a process imports, of options of Python, and of
variables that libraries read when they are loaded, start Python itself. Each process of ``--processes`` has a server of
its own, a fork of the first one, so that ``descendants`` are those of its tests.
"""

import ast
import atexit
import gc
import importlib
import os
import random
import runpy
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import NoReturn

import psutil

from tests.patience import patience
from tilth.cluster.backends import fork_server

ROOT = Path(__file__).parent.parent
CLIENT = ROOT / "tests" / "forked_client.py"
PLACE = "TILTH_TESTS_FORKED"
"""Variable with the address of the server."""
AHEAD = (
    "tilth.cli.main",
    "tilth.flows.run",
    "tilth.cluster.worker.fork_server",
    "pytest",
    "hypothesis",
    "tests.flows.killed",
)
"""Beside what a fork server imports."""
LATER = ("PYTHONPATH", "GOMP_SPINCOUNT", "TORCH_FR_BUFFER_SIZE")
"""Variables that a fork takes over by itself, or that torch reads when it makes its first process group."""
_own: list = []


def python() -> list[str]:
    """Return the beginning of a command that runs Python in a fork; one for each process whose ``pid`` is asked for."""
    if PLACE not in os.environ and not _own:
        start()
    place = os.environ.get(PLACE) or f"{_own[0][1]}/socket"  # a test may have put the environment back as it was
    return [sys.executable, "-S", "-E", str(CLIENT), place, uuid.uuid4().hex]


def pid(process: subprocess.Popen) -> int:
    """Wait for the process that is forked for one started by ``python()``; any other process is itself."""
    if str(CLIENT) not in process.args:
        return process.pid
    place, name = process.args[process.args.index(str(CLIENT)) + 1 :][:2]
    file = Path(place).parent / name
    until = time.monotonic() + patience(60.0)
    while not file.exists() or not file.read_text():
        assert process.poll() is None and time.monotonic() < until, "no fork"
        time.sleep(0.005)
    return int(file.read_text())


def kill(process: subprocess.Popen) -> None:
    """Kill what is forked for a process, and wait: its client alone would end before it."""
    os.kill(pid(process), signal.SIGKILL)
    process.wait()


def descendants() -> list[psutil.Process]:
    """Return the processes that this one and its server have started."""
    servers = [psutil.Process(server) for _, _, server in _own]
    found = [psutil.Process().children(recursive=True), *[server.children(recursive=True) for server in servers]]
    return list({one.pid: one for one in (*servers, *chain.from_iterable(found))}.values())


def start() -> None:
    """Start a server for this process and those that it starts; it ends with this process.

    It is a fork of the server that this process has inherited, if there is one.
    """
    program = python() if PLACE in os.environ else [sys.executable]
    folder = tempfile.mkdtemp(prefix="tilth-forked-")  # an object would remove it in every fork of this process, too
    place = f"{folder}/socket"
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(place)
    listening.listen(64)
    os.environ[PLACE] = place
    path = os.pathsep.join([str(ROOT), str(ROOT / "src"), *filter(None, sys.path)])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "1000", "PYTHONPATH": path}
    with listening:
        process = subprocess.Popen(
            [*program, "-c", "from tests import forked; forked.main()", str(listening.fileno())],
            env=environment,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            pass_fds=[listening.fileno()],
            start_new_session=True,
        )
    _own.append((process, folder, pid(process)))
    atexit.register(end)


def end() -> None:
    """End the server that this process started, and all that it forked."""
    while _own:
        process, folder, _ = _own.pop()
        process.stdin.close()
        process.wait()
        shutil.rmtree(folder)
        os.environ.pop(PLACE, None)


os.register_at_fork(after_in_child=_own.clear)


def fork_servers_too() -> None:
    """Let fork servers of the local backend be forks, too, where they would load libraries in the same way."""
    plain, own = fork_server.command, set(sys.path)

    def loaded(environment: dict[str, str]) -> dict[str, str]:
        found = fork_server.loaded_by(environment)
        return {name: value for name, value in found.items() if name not in LATER}

    def command(environment: dict[str, str]) -> list[str]:
        others = [Path(path) for path in environment["PYTHONPATH"].split(os.pathsep) if path not in own]
        alike = not any((path / name).exists() for path in others for name in ("tilth", "sitecustomize.py"))
        alike = alike and loaded(environment) == loaded(os.environ)
        return [*python(), *plain(environment)[-2:]] if alike else plain(environment)

    fork_server.command = command


class Run(BaseException):
    """Leaves the loop of the server in a fork."""


def serve(listening: socket.socket) -> None:
    """Fork for each connection until standard input ends. Raises Run in each fork."""
    wake, woken = socket.socketpair()
    for end in (wake, woken):
        end.setblocking(False)
    signal.set_wakeup_fd(woken.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    clients: dict[socket.socket, int] = {}
    with selectors.DefaultSelector() as ready:
        for one in (0, wake, listening):
            ready.register(one, selectors.EVENT_READ)
        while True:
            found = [key.fileobj for key, _ in ready.select()]
            if 0 in found:
                signal.set_wakeup_fd(-1)
                break
            if wake in found:
                with suppress(BlockingIOError):
                    wake.recv(4096)
                _reap(clients, ready)
            for client in [one for one in found if one in clients]:
                _pass_on(client, clients)
            if listening in found:
                client, _ = listening.accept()
                if pid := _fork(client, [ready, wake, woken, listening, *clients]):
                    clients[client] = pid
                    ready.register(client, selectors.EVENT_READ)
    for pid in clients.values():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _pass_on(client: socket.socket, clients: dict[socket.socket, int]) -> None:
    """Send a fork the signals that its client got; SIGKILL, and nothing more, if the client is gone."""
    try:
        numbers = client.recv(64)
    except ConnectionResetError:
        numbers = b""
    with suppress(ProcessLookupError):
        for number in numbers or [signal.SIGKILL]:
            os.kill(clients[client], number)


def _reap(clients: dict[socket.socket, int], ready: selectors.BaseSelector) -> None:
    with suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            for client in [one for one, pid in clients.items() if pid == found[0]]:
                with suppress(OSError):  # the client is gone
                    client.sendall(str(os.waitstatus_to_exitcode(found[1])).encode())
                ready.unregister(client)
                client.close()
                del clients[client]


def _fork(client: socket.socket, ours: list) -> int:
    """Return the fork's process id; 0: the client was killed before it had asked. Raises Run in the fork."""
    message, files, _, _ = socket.recv_fds(client, 1 << 20, 64)
    while message and not message.endswith(b"\n"):
        more = client.recv(1 << 20)
        message = message + more if more else b""
    if not message:
        client.close()
        for file in files:
            os.close(file)
        return 0
    if pid := os.fork():
        for file in files:
            os.close(file)
        return pid
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for one in (client, *ours):
        one.close()
    raise Run(ast.literal_eval(message.decode()), files)


def become(request: dict, files: list[int]) -> tuple[str, list[str]]:
    """Take over what the client has; return how to run what (``-c``, ``-m`` or a file) and it with its arguments."""
    kept = [os.dup2(file, 200 + n) for n, file in enumerate(files)]
    os.closerange(3, 200)
    for file, number in zip(kept, request["files"]):
        os.dup2(file, number)
    for file in kept:
        if file not in request["files"]:
            os.close(file)
    os.setsid()
    (Path(os.environ[PLACE]).parent / request["name"]).write_text(str(os.getpid()))
    signal.signal(signal.SIGHUP, signal.Handlers(request["hangup"]))
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    base = [path for path in sys.path if path not in (str(ROOT), "")]
    given = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    kind, *rest = request["arguments"] if request["arguments"][0] in ("-c", "-m") else ["", *request["arguments"]]
    first = "" if kind == "-c" else os.getcwd() if kind == "-m" else str(Path(rest[0]).parent)
    sys.path[:] = [first, *given, *[path for path in base if path not in given]]
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = open(number, "w" if number else "r", buffering=1 if number == 2 else -1, closefd=False)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    random.seed()
    gc.enable()
    return kind, rest


def load() -> None:
    """Import what forks need."""
    for name in AHEAD:
        importlib.import_module(name)
    for name in importlib.import_module("tilth.cluster.worker.fork_server").AHEAD:
        importlib.import_module(name)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.disable()
    load()
    fork_servers_too()
    gc.collect()
    gc.freeze()
    try:
        serve(socket.socket(fileno=int(sys.argv[1])))
        return
    except Run as asked:
        request, files = asked.args
    signal.signal(signal.SIGINT, signal.default_int_handler)
    code = 0
    try:
        run(*become(request, files))
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException as error:  # noqa: BLE001 - shown as Python shows it
        sys.excepthook(type(error), error, error.__traceback__)
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    leave(code)


def run(kind: str, rest: list[str]) -> None:
    sys.argv = ["-c" if kind == "-c" else rest[0], *rest[1:]]
    if kind == "-m":
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        names = sys.modules["__main__"].__dict__
        names.clear()
        names.update(__name__="__main__", __builtins__=__builtins__)
        exec(compile(rest[0], "<string>", "exec"), names)
    else:
        runpy.run_path(rest[0], run_name="__main__")


def leave(code: int) -> NoReturn:
    """End as Python does, without taking apart what the server has imported: a fifth of a second."""
    threading._shutdown()
    atexit._run_exitfuncs()
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code & 0xFF)
