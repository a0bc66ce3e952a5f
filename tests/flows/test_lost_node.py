"""A run that loses a node goes on from what other nodes hold, with the bits of an undisturbed one."""

import json
import os
import random
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from tests.cli.test_whole import ENVIRONMENT, TILTH
from tests.flows import tiny
from tests.flows.lost_node import SECTIONS
from tests.launch.test_supervisor import RECIPE
from tests.launch.test_survive import assert_same_run, recoveries
from tilth.cluster.backends.capacity import patience
from tilth.config.load import load_recipe
from tilth.runs.readers import read_metrics
from tilth.runs.updates import read_updates
from tilth.ui.result import RunResult

OWN_MEMORY = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && exec "$@"', "sh"]
"""Runs a command with a /dev/shm of its own, which is gone when its processes are."""


def free_port():
    """Neither of those that Ray's workers take (10,000 on), nor of those that a connection gets as its own end."""
    while True:
        port = random.randrange(20_000, 32_000)
        with suppress(OSError), socket.socket() as door:
            door.bind(("127.0.0.1", port))
            return port


@pytest.fixture
def three_nodes():
    """(address, environment, process ids) of a Ray cluster: a head without workers and three nodes with one each."""
    if find_spec("ray") is None:
        pytest.skip("Ray is not installed (pip install '.[ray]')")
    if subprocess.run([*OWN_MEMORY, "true"], capture_output=True).returncode:
        pytest.skip("nodes on one machine need mounts of their own (unshare --mount)")
    port = free_port()
    root = Path(__file__).parents[2]
    clean = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    env = clean | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0",
                   "PYTHONPATH": f"{root / 'src'}{os.pathsep}{root}", "OMP_NUM_THREADS": "1"}  # fmt: skip
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # the names of its sockets must be short
    start = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
    start += ["--object-store-memory=80000000"]
    head = ["--head", f"--port={port}", "--num-cpus=0", "--include-dashboard=false", f"--temp-dir={folder}"]
    quiet = {"env": env, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    join, nodes = [*OWN_MEMORY, *start, "--num-cpus=1", f"--address=127.0.0.1:{port}"], []
    for command in ([*start, *head], join, join, join):  # one after the other: Ray numbers their sockets
        nodes.append(subprocess.Popen(command, **quiet))
        until = time.monotonic() + patience(60.0)
        while len(list(Path(folder).glob("session_2*/sockets/raylet*"))) < len(nodes) and time.monotonic() < until:
            time.sleep(0.1)
    yield f"127.0.0.1:{port}", env, [node.pid for node in nodes]
    started = [psutil.Process(node.pid) for node in nodes if node.poll() is None]
    for process in [process for node in started for process in (node, *node.children(recursive=True))]:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    for node in nodes:
        node.wait()
    shutil.rmtree(folder, ignore_errors=True)


def run_on_all_nodes(command, env, folder=None):
    """Run a command, again while not all nodes are there; return what it prints."""
    until = time.monotonic() + patience(60.0)
    while True:
        found = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=patience(240.0))
        if "CPUs on" not in found.stderr or time.monotonic() > until:
            break
    assert found.returncode == 0, found.stderr[-6000:]
    return found.stdout


def lose(three_nodes, folder, at, what="nodes"):
    """Run and lose nodes or workers: at: step -> rank."""
    address, env, pids = three_nodes
    command = [sys.executable, "-m", "tests.flows.lost_node", str(folder), address, json.dumps(pids)]
    command += [json.dumps(at), what]
    told = json.loads(run_on_all_nodes(command, env).splitlines()[-1])
    return SimpleNamespace(**{**told, "directory": Path(told["directory"])})


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """An undisturbed run."""
    folder = tmp_path_factory.mktemp("plain")
    return tiny.run(tiny.recipe(folder, **SECTIONS, cluster={"backend": "local", "workers": 2}))


@pytest.mark.ray
@pytest.mark.dist
@pytest.mark.slow
def test_a_lost_node_costs_no_step_and_changes_no_bit(tmp_path, three_nodes, plain):
    ours = lose(three_nodes, tmp_path / "ours", {5: 1})
    (found,) = recoveries(ours.directory)
    assert (found["kind"], found["ranks"], found["replaced"]) == ("crash", [1], [1])
    assert "lost with its node" in found["evidence"] and found["step"] in (5, 6)
    assert not any("checkpoint" in text for text in ours.messages if text.startswith("going on"))
    assert not any("in memory" in text for text in ours.messages)
    assert [step for step, *_ in ours.copied] == [1, 2, 3, 4, 5, *range(5, 11)]
    assert all(not problem and nbytes > 10_000 for _, nbytes, _, problem in ours.copied[2:5])
    assert_same_run(ours, plain)


@pytest.mark.ray
@pytest.mark.dist
@pytest.mark.slow
def test_a_node_whose_workers_crash_at_three_steps_is_evicted(tmp_path, three_nodes, plain):
    ours = lose(three_nodes, tmp_path / "ours", {2: 1, 4: 1, 6: 1}, "workers")
    found = recoveries(ours.directory)
    assert [(one["kind"], one["replaced"]) for one in found] == [("crash", [1])] * 3
    assert ["evicted" in one for one in found] == [False, False, True]
    assert any("is given up" in text for text in ours.messages)
    assert_same_run(ours, plain)


@pytest.mark.ray
@pytest.mark.dist
@pytest.mark.slow
def test_the_next_controller_goes_on_from_the_memory_of_all_nodes(tmp_path, three_nodes, monkeypatch):
    address, env, _ = three_nodes
    (tmp_path / "deaths").write_text("4")
    command = [*TILTH, "run", "addition-grpo", *RECIPE, "cluster.backend=ray", f"cluster.address={address}"]
    run_on_all_nodes(command, {**ENVIRONMENT, **env, "DEATHS": str(tmp_path / "deaths")}, tmp_path)
    (one,) = recoveries(tmp_path / "runs/a")
    assert (one["kind"], one["step"]) == ("controller", 4)
    assert (tmp_path / "runs/a/log.txt").read_text().count("from memory") == 1
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DEATHS", str(tmp_path / "deaths"))
    undisturbed = tiny.run_recipe(load_recipe("addition-grpo", [*RECIPE, "run.dir=plain"]), name="addition-grpo")
    assert_same_run(RunResult(tmp_path / "runs/a", {}), undisturbed)


@pytest.mark.ray
@pytest.mark.dist
@pytest.mark.slow
def test_a_run_goes_on_with_two_of_three_nodes_where_no_other_has_room(tmp_path, three_nodes):
    address, env, pids = three_nodes
    plugin = str(Path(__file__).with_name("lost_for_good.py"))
    shape = [word for word in RECIPE if not word.startswith(("plugins", "cluster", "policy"))]
    shape += [f"plugins={json.dumps([plugin])}", "cluster.workers=3", "policy.layout.fsdp=3"]
    command = [*TILTH, "run", "addition-grpo", *shape, "cluster.backend=ray", f"cluster.address={address}"]
    run_on_all_nodes(command, {**ENVIRONMENT, **env, "NODES": json.dumps(pids)}, tmp_path)
    (update,) = read_updates(tmp_path / "runs/a")
    assert (update.by, update.state) == ("guard", "in force") and update.step in (2, 3)
    assert update.changes.keys() == {"cluster.workers", "policy.layout.fsdp"}
    assert [one["step"] for one in read_metrics(tmp_path / "runs/a")] == list(range(1, 9))
