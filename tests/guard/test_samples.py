"""Samples of real processes: the one that stands still is named."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from tilth.guard.health import ProcessSamples, local_rules
from tilth.guard.odd_machines import MISSING, MetricRule, OddMachineRules, OddMachineWatch

WORK = """
import os, sys, time
while os.getppid() == int(sys.argv[1]):
    open("/dev/zero", "rb", buffering=0).read(1 << 20)
    time.sleep(0.02)
"""
INTERVAL = 0.1


@pytest.fixture
def workers():
    made = [subprocess.Popen([sys.executable, "-S", "-c", WORK, str(os.getpid())]) for _ in range(5)]
    yield made
    for process in made:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait()


def watched(samples, rules, seconds):
    """Return the first verdict within some seconds, and the samples taken."""
    watch, until = OddMachineWatch(rules), time.monotonic() + seconds
    while time.monotonic() < until:
        samples.take(time.monotonic())
        time.sleep(INTERVAL)
        if samples.series["rank-0"] and (found := watch.detect(samples.table(INTERVAL))):
            return found
    return None


def test_the_process_that_stands_still_is_named(workers):
    io = next(rule for rule in local_rules().metrics if rule.name.startswith("MiB/s"))
    rules = OddMachineRules((replace(io, floor=2 / 4096, threshold=3.0),), window=0.5, continuity=1.0)
    samples = ProcessSamples({rank: process.pid for rank, process in enumerate(workers)})
    workers[3].send_signal(signal.SIGSTOP)
    found = watched(samples, rules, 60)
    assert found is not None and found.ranks == (3,) and found.details["machine"] == "rank-3"
    assert found.details["value"] == 0 and found.details["others"] > 0


def test_a_process_that_ended_gives_no_samples(workers):
    samples = ProcessSamples({rank: process.pid for rank, process in enumerate(workers)})
    samples.take(0.0)
    workers[1].kill()
    workers[1].wait()
    rules = OddMachineRules((MetricRule(MISSING, 0, 1, 0.05, 5.0),), window=5, continuity=10)
    for second in range(1, 40):
        samples.take(float(second))
    assert OddMachineWatch(rules).detect(samples.table(1.0)).ranks == (1,)
