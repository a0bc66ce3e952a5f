"""How many workers a machine can take: refused before anything is started."""

import errno
import math
import os
import subprocess
from types import SimpleNamespace

import pytest

from tests.errors import raises
from tilth.cluster.backends import capacity, local
from tilth.cluster.backends.capacity import MORE_ROOM, PER_CORE, WORKER, check_room, most_workers
from tilth.cluster.backends.probe import StatusBoard
from tilth.cluster.backends.ray_connect import connect
from tilth.cluster.backends.session_dir import SessionDir
from tilth.cluster.controller.cluster import open_cluster
from tilth.core.errors import RecipeError, StorageError, WorkerLost


@pytest.mark.parametrize("cores, memory, most", [
    (2, 10**12, 2 * PER_CORE), (64, 10 * WORKER, 10), (64, 10 * WORKER - 1, 9), (1, 0, 1)
])  # fmt: skip
def test_the_most_is_what_cores_and_memory_allow(monkeypatch, cores, memory, most):
    monkeypatch.setattr(capacity, "cores", lambda: cores)
    monkeypatch.setattr(capacity, "host_memory", lambda: SimpleNamespace(free=memory))
    assert most_workers() == most
    check_room(most)
    with raises(RecipeError, "cluster.workers") as raised:
        check_room(most + 1)
    assert f"{cores} CPU" in str(raised.value) and f"cluster.workers={most} " in str(raised.value)


def test_a_storm_of_processes_is_refused_before_the_first(monkeypatch):
    def started(*_, **__):
        raise AssertionError("something was started")

    monkeypatch.setattr(subprocess, "Popen", started)
    monkeypatch.setattr(SessionDir, "create", started)
    with raises(RecipeError, "cluster.workers"):
        open_cluster("local", 100_000)
    ray = SimpleNamespace(is_initialized=lambda: False, init=started)
    with raises(RecipeError, "cluster.workers"):
        connect(ray, 100_000, "")


def test_workers_that_others_have_started_are_not_measured_by_this_machine():
    assert not connect(SimpleNamespace(is_initialized=lambda: True), 100_000, "")
    local._check(100_000, False, ours=False)


@pytest.mark.parametrize("number, end", [(errno.ENOSPC, MORE_ROOM), (errno.EROFS, os.strerror(errno.EROFS))])
def test_a_folder_without_room_ends_with_the_advice(monkeypatch, tmp_path, number, end):
    def full(*_, **__):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("tilth.cluster.backends.session_dir._root", lambda: tmp_path)
    monkeypatch.setattr(type(tmp_path), "write_bytes", full)
    with raises(StorageError, "board") as raised:
        local.LocalBackend(1)
    assert str(raised.value).endswith(end) and not list(tmp_path.iterdir())
    with raises(StorageError, "board"):
        StatusBoard.create(tmp_path / "board", 2)
    monkeypatch.setattr("tilth.cluster.backends.session_dir.tempfile.mkdtemp", full)
    with raises(StorageError, "session_dir") as raised:
        SessionDir.create()
    assert str(raised.value).endswith(end)


@pytest.mark.parametrize("load, limit", [(0.0, 120.0), (8.0, 120.0), (24.0, 360.0), (8000.0, 1200.0)])
def test_what_only_computes_has_more_time_on_a_busy_machine(monkeypatch, load, limit):
    monkeypatch.setattr(capacity, "cores", lambda: 8)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    assert capacity.patience(120.0) == limit


@pytest.mark.dist
def test_workers_that_do_not_come_are_named_with_the_time_that_they_had(monkeypatch):
    monkeypatch.setattr(local, "start_worker", lambda *_: subprocess.Popen(["sleep", "30"]))
    monkeypatch.setattr(local, "START", 0.001)
    monkeypatch.setattr(os, "getloadavg", lambda: (3.0 * capacity.cores(), 0.0, 0.0))
    with raises(WorkerLost, "cluster.start") as raised:
        open_cluster("local", 1)
    assert "within 0.003 s" in str(raised.value)


@pytest.mark.parametrize("granted, count", [(math.inf, 3), (8.0, 3), (1.5, 2), (0.2, 1)])
def test_cores_are_bounded_by_affinity_and_by_what_a_cgroup_grants(monkeypatch, granted, count):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 2, 5})
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(capacity, "core_limit", lambda: granted)
    assert capacity.cores() == count
    monkeypatch.setattr(capacity.psutil, "cpu_count", lambda logical: 32)
    assert capacity.core_share(1) == count and capacity.core_share(64) == 1
