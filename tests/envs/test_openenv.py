"""Environments of OpenEnv, as they are: the real package and its server, where it is installed."""

import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.errors import raises
from tests.patience import patience
from tilth.core.errors import PluginError
from tilth.envs.calls import message_of
from tilth.envs.process import load_environment

SERVER = Path(__file__).parent / "community" / "openenv_server.py"


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.fixture
def server():
    """Environments of a text and of a form, once they answer, and their process."""
    pytest.importorskip("openenv.core", reason="OpenEnv is not installed (pip install openenv)")
    ports = [free_port(), free_port()]
    process, until = subprocess.Popen([sys.executable, SERVER, *map(str, ports)]), time.monotonic() + patience(60)
    try:
        kinds = [load_environment(f"openenv:http://127.0.0.1:{port}") for port in ports]
        for kind in kinds:
            while True:
                try:
                    kind.prepare()
                    break
                except PluginError as error:
                    assert error.key == "environment.openenv.server" and time.monotonic() < until
                    time.sleep(0.2)
        yield (*kinds, process)
    finally:
        process.kill()
        process.wait()


def begun(kind, info):
    one = kind()
    return one, one.reset(info)[0]["content"]


def acting(**fields):
    return message_of(f'<tool_call>{{"name": "act", "arguments": {json.dumps(fields)}}}</tool_call>')


@pytest.mark.slow
def test_episodes_are_sessions_of_the_server(server):
    text, form, process = server
    (one, first), (other, _) = (begun(text, {"seed": seed}) for seed in (0, 1))
    assert first == "say a word" and one.tools() == {}
    answers = [episode.step({"content": " bat "}) for episode in (one, other)]
    assert answers[0] == ([{"role": "user", "content": "yes"}], True, pytest.approx(0.9))
    assert answers[1] == ([{"role": "user", "content": "no"}], False, pytest.approx(-0.1))
    assert one.reward() == {"reward": 0.0, "steps": 1.0}

    filled, _ = begun(form, {"reset": {"seed": 0}})
    schema = filled.tools()["act"].schema["function"]
    assert [*schema["parameters"]["properties"]] == ["first", "second"] and schema["description"]
    for wrong in (
        acting(second="t"),
        message_of("bat"),
        message_of('<tool_call>{"name": "go", "arguments": {}}</tool_call>'),
    ):
        said, done, paid = filled.step(wrong)
        assert said[0]["content"].startswith("error: ") and not done and not paid
    assert filled.step(acting(first="b")) == ([{"role": "tool", "content": "yes"}], True, pytest.approx(0.9))

    with pytest.raises(RuntimeError, match="as asked"):
        other.step({"content": "boom"})
    process.kill()
    with pytest.raises(ConnectionError):
        begun(text, {"seed": 0})
    for episode in (one, other, filled):
        episode.close()


def test_a_server_that_does_not_answer():
    pytest.importorskip("openenv.core", reason="OpenEnv is not installed (pip install openenv)")
    with raises(PluginError, "environment.openenv.server"):
        load_environment(f"openenv:http://127.0.0.1:{free_port()}").prepare()


def test_a_package_that_is_missing(monkeypatch):
    for name in ("openenv", "openenv.core.generic_client"):  # another test may have imported it
        monkeypatch.setitem(sys.modules, name, None)
    with raises(PluginError, "environment.openenv"):
        load_environment("openenv:http://127.0.0.1:1").prepare()


def test_records_differ_in_their_seed():
    first, second = load_environment("openenv:http://here").records(2)
    assert (first["seed"], second["seed"]) == (0, 1) and first["prompt"] != second["prompt"]
