"""A Ray that does not start, or that cannot be joined, is one sentence with what to do, in bounded time."""

import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from importlib.util import find_spec
from types import SimpleNamespace

import pytest

from tests.errors import raises
from tilth.cluster.backends import ray_connect as backend
from tilth.cluster.backends.ray_connect import _knock, connect
from tilth.core.errors import RecipeError


def stand_in(init):
    ended = []
    made = SimpleNamespace(
        init=init,
        is_initialized=lambda: False,
        shutdown=lambda: ended.append(1),
        exceptions=SimpleNamespace(RayError=LookupError),
    )
    return made, ended


def raising(error):
    def init(**_):
        raise error

    return init


def hanging(**_):
    """As Ray does: it tries again after any Exception."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        try:
            time.sleep(0.5)
        except Exception:  # noqa: BLE001
            continue


FAULTS = [
    Exception("The current node timed out during startup. This could happen\n\nbecause ..."),
    RuntimeError("Failed to start GCS. Last connection error: none"),
    TimeoutError("Timed out after 30 seconds while waiting for node to startup."),
    OSError("no such file"),
    LookupError("a RayError"),
    ValueError("no port"),
]


@pytest.mark.parametrize("address", ["", "auto"])
@pytest.mark.parametrize("error", FAULTS, ids=lambda error: type(error).__name__)
def test_whatever_ray_raises_is_one_line_that_names_the_key(address, error):
    ray, ended = stand_in(raising(error))
    with raises(RecipeError, "cluster.address" if address else "cluster.backend") as raised:
        connect(ray, 1, address)
    told = str(raised.value)
    assert str(error).split("\n")[0] in told and "\n" not in told and raised.value.__suppress_context__
    assert bool(ended) == (not address)


@pytest.mark.parametrize("address", ["", "auto"])
def test_one_that_never_answers_is_given_up(monkeypatch, address):
    monkeypatch.setattr(backend, "START", 0.2)
    numbers = (signal.SIGALRM, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    with raises(RecipeError, "cluster.address" if address else "cluster.backend") as raised:
        connect(stand_in(hanging)[0], 1, address)
    assert "within 0.2 s" in str(raised.value)
    assert [signal.getsignal(number) for number in numbers] == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_an_interrupt_goes_through():
    with pytest.raises(KeyboardInterrupt):
        connect(stand_in(raising(KeyboardInterrupt()))[0], 1, "")


@contextmanager
def answering(text):
    """The address of a server that says this to whoever comes; None: nothing at all."""

    def serve():
        with door:
            guest, _ = door.accept()
            with guest:
                if text is not None:
                    guest.sendall(text)
                    return
                guest.recv(1 << 10)
                over.wait(30)

    over = threading.Event()
    door = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield f"127.0.0.1:{door.getsockname()[1]}"
    over.set()
    thread.join(10)


@pytest.mark.parametrize("text", [None, b"", b"SSH-2.0-OpenSSH\r\n", b"HTTP/1.1 400 Bad Request\r\n\r\n"], ids=str)
def test_who_is_no_ray_is_found_out_in_seconds(monkeypatch, text):
    monkeypatch.setattr(backend, "LOOK", 0.5)
    with answering(text) as address, raises(RecipeError, "cluster.address"):
        _knock(address)


def test_a_server_of_http_2_may_be_one():
    with answering(bytes((0, 0, 6, 4, 0, 0, 0, 0, 0))) as address:
        _knock(address)


@pytest.mark.ray
@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not there")
def test_a_ray_answers_to_the_knock(ray_here):
    _knock(ray_here.get_runtime_context().gcs_address)


BROKEN = """
from tilth.cluster.backends.ray_connect import import_ray
from tilth.core.errors import RecipeError
from tilth.cluster.controller.cluster import open_cluster
import_ray()
import ray._private.services
ray._private.services.RAYLET_EXECUTABLE = "/bin/false"
try:
    open_cluster("ray", 1)
except RecipeError as error:
    print(error)
"""


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not there")
def test_a_real_one_whose_node_dies():
    found = subprocess.run([sys.executable, "-c", BROKEN], capture_output=True, text=True, timeout=180)
    assert found.stdout.startswith("cluster.backend = 'ray': Ray does not start") and found.stdout.count("\n") == 1
    assert "Traceback" not in found.stderr


def test_a_ray_that_gave_up_on_a_busy_machine_is_started_again():
    tries = iter([FAULTS[0], FAULTS[0], None])

    def init(**_):
        if (error := next(tries)) is not None:
            raise error

    made, ended = stand_in(init)
    backend._begin(made, 2)
    assert len(ended) == 2 and next(tries, "none left") == "none left"
