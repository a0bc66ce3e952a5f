"""Servers of the Model Context Protocol as the tools of an episode: the real package, where it is installed."""

import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.errors import raises
from tests.patience import patience
from tilth.core.errors import PluginError
from tilth.envs.calls import message_of
from tilth.envs.environment import EnvironmentFault
from tilth.envs.process import load_environment

SHOP = f"{sys.executable} {Path(__file__).parent / 'community' / 'mcp_shop.py'}"
INFO = {"prompt": "Take what is on shelf 1.", "answer": "plum", "messages": []}


def calling(**calls):
    body = "".join(f'<tool_call>{{"name": "{k}", "arguments": {v}}}</tool_call>' for k, v in calls.items())
    return message_of(body)


def contents(found):
    return [m["content"] for m in found[0]]


@pytest.fixture
def adapter():
    pytest.importorskip("mcp", reason="the package mcp is not installed (pip install mcp)")
    from tilth.envs.mcp import McpEnvironment

    return McpEnvironment


def test_its_tools_are_the_episodes(adapter):
    class Shop(adapter, declares=False):
        id, options = SHOP, {"env": {"SHELF": "again"}}

    shop = Shop()
    assert shop.reset(INFO) == [{"role": "user", "content": INFO["prompt"]}]
    look = shop.tools()["look"].schema["function"]
    assert look["description"] == "Look at a shelf." and look["parameters"]["properties"]["shelf"]["type"] == "integer"
    found = shop.step(calling(look='{"shelf": 1}', take='{"item": "fig"}'))
    assert contents(found) == ["plum again", "fig"] and not found[1]
    answers = contents(shop.step(calling(look='{"shelf": 9}', take="{}", sell="{}")))
    assert "no such shelf" in answers[0] and "item" in answers[1] and "no tool 'sell'" in answers[2]
    assert contents(shop.step(calling(take='{"item": "nut"}'))) == ["fig\nnut"]  # the server keeps its state
    assert shop.step(message_of(" plum ")) == ([], True) and shop.reward() == 1.0
    with raises(EnvironmentFault, "environment.mcp.ended"):
        shop.step(calling(leave="{}"))
    shop.close()


@pytest.mark.slow
def test_a_server_at_an_address(adapter):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen([*SHOP.split(), str(port)])
    try:
        kind, until = load_environment(f"mcp:http://127.0.0.1:{port}/mcp"), time.monotonic() + patience(60)
        while True:
            try:
                kind.prepare()
                break
            except PluginError as error:
                assert error.key == "environment.mcp.server" and time.monotonic() < until
                time.sleep(0.2)
        one = kind()
        one.reset(INFO)
        assert contents(one.step(calling(look='{"shelf": 1}'))) == ["plum "]
        one.close()
    finally:
        server.kill()
        server.wait()


@pytest.mark.slow
def test_an_episodes_server_ends_with_it(adapter):
    before = {*psutil.Process().children()}
    one = load_environment(f"mcp:{SHOP}")()
    one.reset(INFO)
    (server,) = {*psutil.Process().children()} - before
    one.close()
    server.wait(patience(20))


def test_a_server_that_does_not_start(adapter):
    for command in ("no-such-command --at-all", f"{sys.executable} -c 1"):
        with raises(PluginError, "environment.mcp.server"):
            load_environment(f"mcp:{command}").prepare()


def test_a_package_that_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "mcp", None)
    with raises(PluginError, "environment.mcp"):
        load_environment("mcp:http://127.0.0.1:1/mcp").prepare()
