"""Replicas in processes of their own, beside a trainer: overlap, and what is left of a run when one of them dies."""

import os
import random
import signal
import threading
from contextlib import suppress

import psutil
import pytest

from tests.flows import tiny
from tests.flows.test_async_sampler import check_once, recipe, state
from tilth.core.random import stream_id
from tilth.runs.readers import read_metrics

pytestmark = pytest.mark.dist
POOLS = {"backend": "local", "pools": {"train": 1, "rollout": 2}}
PLACED = {"pool": "rollout", "layout": {"dp": 2}, "group": 4}


STEPS = 24
RANKS = {"trainer": (0,), "replica": (1, 2), "reward": (3,)}


class Kills(tiny.Recorder):
    """Kills a worker of these ranks some time after each of these steps, once; ``processes``: those of the reward."""

    def __init__(self, ranks, steps, seed, *, processes=False):
        super().__init__()
        self.ranks, self.left, self.processes, self.chance = ranks, set(steps), processes, random.Random(seed)
        self.timers, self.killed = [], []

    def on_step_end(self, run, step, metrics):
        super().on_step_end(run, step, metrics)
        if step not in self.left:
            return
        self.left.remove(step)
        pid = run.policy._dispatch.backend.pids()[self.chance.choice(self.ranks)]
        if self.processes:
            pid = self.chance.choice([p for p in psutil.Process(pid).children() if p.status() != "zombie"]).pid
        self.timers.append(threading.Timer(0.6 * self.chance.random(), self.kill, (pid,)))
        self.timers[-1].start()

    def kill(self, pid):
        with suppress(ProcessLookupError):  # a recovery has ended it meanwhile
            os.kill(pid, signal.SIGKILL)
            self.killed.append(pid)

    def join(self):
        for timer in self.timers:
            timer.join()


def test_two_replicas_generate_while_the_policy_learns(tmp_path):
    result = tiny.run(recipe(tmp_path, 2, rollout=PLACED, cluster=POOLS))
    check_once(result, 6, group=4)
    records = read_metrics(result.directory)
    assert all(record["staleness/max"] <= 2 for record in records) and records[-1]["staleness/mean"] > 0
    waited = [record["fully_async/trainer/idle_seconds"] for record in records]
    assert sum(waited[1:]) / 5 < waited[0]


def survived(folder, kills, steps, **more):
    """Every sample is consumed once by a whole group, and none is further behind than the bound."""
    made = recipe(folder, 2, rollout=PLACED, guard={"restarts": 64}, algorithm={"steps": steps}, **more)
    result = tiny.run(made, callbacks=[kills])
    kills.join()
    check_once(result, steps, group=4)
    assert not state(result).dropped
    assert all(record["staleness/max"] <= 2 for record in read_metrics(result.directory))


def test_a_worker_that_dies_at_any_time_costs_no_sample(tmp_path):
    kills = Kills(RANKS["replica"], [2], stream_id("kills", 1))
    survived(tmp_path, kills, 6, cluster=POOLS)
    assert len(kills.killed) == 1 and any("is new" in line for line in kills.messages), kills.messages


@pytest.mark.slow
@pytest.mark.parametrize("role", ["replica", "trainer", "reward", "process of the reward"])
def test_twenty_kills_of_a_role_cost_no_sample(tmp_path, role):
    pools = {**POOLS, "pools": {**POOLS["pools"], "score": 1}}
    kills = Kills(RANKS.get(role, (3,)), range(1, STEPS), stream_id(role, 1), processes=role not in RANKS)
    survived(tmp_path, kills, STEPS, cluster=pools, reward={"pool": "score"})
    assert len(kills.killed) >= 20
    assert sum("is new" in line for line in kills.messages) >= (10 if role in RANKS else 0), kills.messages
