"""State of a worker from outside, at moments that are hard to meet."""

import subprocess
import sys

import psutil
import pytest

from tilth.cluster.backends.probe import GONE, NodeProbe
from tilth.cluster.backends.session_dir import SessionDir


@pytest.fixture
def folder():
    made = SessionDir.create()
    yield made
    made.remove()


def test_a_worker_that_ends_between_the_look_at_its_state_and_the_signal_is_gone(folder, monkeypatch):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    folder.stack(0).write_text("")
    monkeypatch.setattr(psutil, "Process", lambda pid: type("Seen", (), {"status": lambda self: "running"})())
    found = NodeProbe(folder, 1).probe(0, ended.pid)
    assert (found.state, found.stack) == (GONE, "")
