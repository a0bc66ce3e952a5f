"""Health of real workers: seen from outside, also of one that is stopped, and by another process."""

import json
import os
import signal
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.guard import stuck
from tests.patience import patience
from tilth.cluster.backends.base import Call
from tilth.cluster.controller.cluster import open_cluster
from tilth.core.layout import Mesh
from tilth.guard import health
from tilth.guard.health import HealthWatch, ProcessSamples, local_rules, read_health
from tilth.guard.recovery import Recovery


def until(condition):
    end = time.monotonic() + patience(20.0)
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


@pytest.mark.dist
def test_a_look_shows_call_operation_and_age_also_of_a_stopped_worker(tmp_path):
    cluster = open_cluster("local", 2)
    backend = cluster.backend
    try:
        group = cluster.group("policy", f"{stuck.HERE}:Stuck", {}, Mesh.of({"dp": 2}))
        watch = HealthWatch(backend, tmp_path, lambda verdict: None, dict)
        assert watch.look(0.0, 0.0) == []
        for rank in (0, 1):
            cluster.dispatch.submit(rank, Call("policy", "update", ("stop", 1), generation=group.generation))
        assert until(lambda: health.states(backend.watch.board, backend.pids())[1]["state"] == "stopped")
        time.sleep(0.6)
        assert watch.look(1.0, 1.0) == []
        found = read_health(str(backend.folder.path))
        waits, stopped = found["ranks"]
        assert (stopped["state"], stopped["call"], stopped["operation"]) == (
            "stopped", "policy.update", "backward of micro-batch 3",
        )  # fmt: skip
        assert stopped["heartbeat_age"] > 0.5 and stopped["progress_age"] >= stopped["heartbeat_age"]
        assert waits["state"] != "stopped" and waits["call"] == "policy.update"
        assert [row["rank"] for row in watch.workers] == [0, 1] and watch.workers[0]["memory"] == waits["memory"]
        assert waits["memory"] > 1e6 and waits["cores"] >= 0 and found["time"] == 1.0
        facts = json.loads(backend.folder.health.read_text())
        for ranks in ({}, [{}], [{"rank": 0}], [{"rank": 10**6, "pid": 1}], 5):  # as another version may write it
            backend.folder.health.write_text(json.dumps(facts | {"ranks": ranks}))
            assert not (read_health(str(backend.folder.path)) or {"ranks": []})["ranks"]
        os.kill(stopped["pid"], signal.SIGKILL)
    finally:
        backend.close(kill=True)
    assert read_health(str(backend.folder.path)) is None  # its run has ended


@pytest.mark.dist
def test_limits_of_disk_files_and_clock_are_warned_of_once(tmp_path, monkeypatch):
    cluster = open_cluster("local", 1)
    try:
        watch = HealthWatch(cluster.backend, tmp_path, lambda verdict: None, dict)
        usage = type("Usage", (), {"free": 1, "total": 1000})
        monkeypatch.setattr(health.shutil, "disk_usage", lambda at: usage)
        monkeypatch.setattr(health.resource, "prlimit", lambda pid, what: (1, 1))
        found = watch.look(0.0, 0.0)
        assert {one.kind for one in found} == {"disk", "files"}
        assert next(one for one in found if one.kind == "files").ranks == (0,)
        assert [one.kind for one in watch.look(1.0, 100.0)] == ["clock"]
        for i in range(2, 25):
            assert watch.look(float(i), 99.0 + i) == []
        rows = json.loads(cluster.backend.folder.health.read_text())
        assert rows["ranks"][0]["rank"] == 0
    finally:
        cluster.backend.close(kill=True)


def test_samples_follow_a_worker_that_was_replaced():
    samples = ProcessSamples({}, kept=3)
    samples.follow({0: os.getpid()})
    for now in range(12):
        samples.take(float(now))
    assert 3 <= len(samples.series["rank-0"]["cores used"][0]) <= 6
    assert samples.newest(0)["memory"] > 1e6
    samples.follow({0: 1})
    assert samples.newest(0) == {} and samples.newest(5) == {}


def test_the_rank_that_differs_from_those_with_the_same_work_is_a_warning(tmp_path, monkeypatch):
    """Rank 3 computes three times as much as four others; so does rank 5, whose work is another."""
    counts = {rank: 0.0 for rank in range(6)}

    def read(rank):
        counts[rank] += 1.2 if rank in (3, 5) else 0.3 + 0.02 * rank
        return {"cores used": counts[rank]}, 100.0

    backend = SimpleNamespace(
        pids=lambda: {rank: rank for rank in range(6)}, watch=SimpleNamespace(board=None),
        folder=SimpleNamespace(health=tmp_path / "health.json"),
    )  # fmt: skip
    monkeypatch.setattr("tilth.guard.health._read", read)
    monkeypatch.setattr(health, "states", lambda board, pids: [])
    watch = HealthWatch(backend, tmp_path, lambda verdict: None, lambda: dict.fromkeys(range(5), 0) | {5: 1})
    monkeypatch.setattr(watch, "_seldom", lambda: [])
    plain = local_rules()
    monkeypatch.setattr(watch._odd, "rules", replace(plain, metrics=plain.metrics[-1:]))
    found = [one for second in range(400) for one in watch.look(1000.0 + second, float(second))]
    assert [(one.kind, one.ranks, one.details["metric"]) for one in found] == [("odd-machine", (3,), "cores used")]
    action = Recovery(8).decide(found[0], 1, 0.0)
    assert action.step == "retry" and action.ranks == ()
