"""The agent of a node, without Ray."""

import pytest

from tilth.cluster.backends import ray_actors
from tilth.cluster.backends.ray_actors import LATELY, NodeAgent


@pytest.fixture
def machine(monkeypatch):
    """An agent, and a clock and a count of the kernel's kills for want of memory that stand still."""
    now = {"time": 1000.0, "kills": 3}
    monkeypatch.setattr(ray_actors, "oom_kills", lambda: now["kills"])
    monkeypatch.setattr(ray_actors.time, "monotonic", lambda: now["time"])
    agent = NodeAgent("kills", 1)
    yield agent, now
    agent.end([], False)


def test_only_a_kill_of_the_last_seconds_is_one_for_want_of_memory(machine):
    agent, now = machine
    assert "memory" not in agent.ending(0, 1)
    now["time"], now["kills"] = now["time"] + LATELY / 2, 4
    assert "memory ran out: the kernel has killed 1 processes" in agent.ending(0, 1)
    now["time"] += LATELY / 2
    agent.watch({})
    now["time"] += 2 * LATELY
    assert "memory" not in agent.ending(0, 1)
