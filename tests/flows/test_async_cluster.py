"""Replicas in processes of their own, beside a trainer: overlap, and what is left of a run when one of them dies."""

import os
import random
import signal
import threading

import pytest

from tests.flows import tiny
from tests.flows.test_async_sampler import check_once, recipe
from tilth.core.random import stream_id
from tilth.runs.readers import read_metrics

pytestmark = pytest.mark.dist
POOLS = {"backend": "local", "pools": {"train": 1, "rollout": 2}}
PLACED = {"pool": "rollout", "layout": {"dp": 2}, "group": 4}


class Kills(tiny.Recorder):
    """Kills a worker some time after a step. ranks: 0 trains, 1 and 2 generate."""

    def __init__(self, step, rank, seconds):
        super().__init__()
        self.step, self.rank, self.seconds, self.timer = step, rank, seconds, None

    def on_step_end(self, run, step, metrics):
        super().on_step_end(run, step, metrics)
        if step == self.step and self.timer is None:
            pid = run.policy._dispatch.backend.pids()[self.rank]
            self.timer = threading.Timer(self.seconds, os.kill, (pid, signal.SIGKILL))
            self.timer.start()


def test_two_replicas_generate_while_the_policy_learns(tmp_path):
    result = tiny.run(recipe(tmp_path, 2, rollout=PLACED, cluster=POOLS))
    check_once(result, 6, group=4)
    records = read_metrics(result.directory)
    assert all(record["staleness/max"] <= 2 for record in records) and records[-1]["staleness/mean"] > 0
    waited = [record["fully_async/trainer/idle_seconds"] for record in records]
    assert sum(waited[1:]) / 5 < waited[0]


@pytest.mark.parametrize("number", [1, *(pytest.param(i, marks=pytest.mark.slow) for i in (0, *range(2, 20)))])
def test_a_worker_that_dies_at_any_time_costs_no_sample(tmp_path, number):
    """Every sample is consumed once by a whole group, or dropped by name; none is further behind than the bound."""
    chance = random.Random(stream_id("kills", number))
    kills = Kills(chance.randint(1, 4), number % 3, 0.6 * chance.random())
    result = tiny.run(recipe(tmp_path, 2, rollout=PLACED, cluster=POOLS), callbacks=[kills])
    kills.timer.join()
    check_once(result, 6, group=4)
    assert all(record["staleness/max"] <= 2 for record in read_metrics(result.directory))
    assert any("is new" in line for line in kills.messages), kills.messages
